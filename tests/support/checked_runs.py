"""Runs for tests of drafters: prompts with common prefixes, engine options, and checks."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from specray.llm import LLM
from specray.outputs import Completion
from specray.sampling_params import SamplingParams
from specray.spec_decode.draft_tree import DraftTree, TreeLists
from specray.spec_decode.propose_context import ProposeContext
from specray.spec_decode.tree_edits import limit_depth

PREFIX = [0, 9, 8, 7, 6, 5, 4, 30, 31, 32, 9, 8, 7, 6, 5, 4]
# Prefixes of different lengths, and the same prefix before different tokens. For some drafters the KV at the end of a
# block depends on the next token.
PROMPTS = [[*PREFIX, 40, 41, 42], [*PREFIX, 50, 41], [*PREFIX[:8], 33], [*PREFIX[:8], 34, 35], [5]]
# Target and draft share their noise, so acceptance grows with the temperature.
TEMPERATURES = [0.0, 4.0, 0.8, 8.0, 1.5]
RUNS: dict[str, dict[str, Any]] = {
    "pages-of-1": {"page_size": 1},
    "pages-of-16": {"page_size": 16},
    "chunks": {"page_size": 4, "chunked_prefill_size": 4, "max_prefill_tokens": 6},
    "one-by-one": {"page_size": 4, "max_running_requests": 1},
    "preemption": {"page_size": 4, "max_total_tokens": 52},
    "no-cache": {"page_size": 4, "disable_radix_cache": True},
}
CLOSE = 1e-5  # relative gap between probabilities that rounding can close


class Checked(Protocol):
    """A drafter that compares its trees with those of a reference."""

    num_checked: int
    num_close_calls: int


def is_grown_to(tree: TreeLists, expected: TreeLists, context: ProposeContext, num_steps: int) -> bool:
    """Whether a tree equals the expected one, as far as some request needs its levels and nodes."""
    deepest = max(request.draft_limit.num_steps for request in context.requests)
    size = 1 + max(request.draft_limit.num_tokens for request in context.requests)
    expected = TreeLists(expected.tokens[:size], expected.parents[:size])
    if deepest >= num_steps:
        return tree == expected
    return limited(tree, deepest) == limited(expected, deepest)


def limited(tree: TreeLists, num_steps: int) -> TreeLists:
    """At most `num_steps` levels and as many nodes, which no deeper node can displace."""
    [cut] = limit_depth(DraftTree.from_lists([tree]), torch.tensor([num_steps])).to_lists()
    return TreeLists(cut.tokens[: num_steps + 1], cut.parents[: num_steps + 1])


def run(
    llm: LLM, prompts: Sequence[list[int]] = PROMPTS, max_tokens: int = 8, temperatures: Sequence[float] = TEMPERATURES
) -> list[Completion]:
    params = [
        SamplingParams(temperature=temperatures[i], seed=i, max_tokens=max_tokens, ignore_eos=True)
        for i in range(len(prompts))
    ]
    return [generation.choices[0] for generation in llm.generate(prompts, params)]


def total(choices: Sequence[Completion], name: str) -> int:
    return sum(getattr(choice.usage, name) for choice in choices)


def assert_checked(drafter: Checked, at_least: int) -> None:
    assert drafter.num_checked >= at_least
    assert drafter.num_close_calls <= drafter.num_checked // 20
