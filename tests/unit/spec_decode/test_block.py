"""The drafter of DFLASH and DSPARK in engine runs, compared at each call with a reference without KV and batching."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specray.config import SpeculativeConfig
from specray.errors import ConfigError
from specray.llm import LLM
from specray.spec_decode import DRAFTERS, Method, check_speculative
from specray.spec_decode.block import BlockDrafter
from specray.spec_decode.draft_tree import DraftTree
from specray.spec_decode.drafter import Drafter, TargetView
from specray.spec_decode.propose_context import ProposeContext
from tests.support.block_toy import BlockToy, block_toy
from tests.support.checked_runs import CLOSE, PROMPTS, RUNS, assert_checked, is_grown_to, run, total
from tests.support.engine import make_llm
from tests.support.methods import block
from tests.support.naive_eagle import NaiveBlock, attend_to_the_past
from tests.support.toy import CONTEXT

# (layout, shape or the nodes of a chain)
HEADS: dict[str, tuple[str, Any]] = {
    "dflash": ("z-lab", (4, 3, 9)),
    "dflash-chain": ("speculators-dflash", None),
    "dflash-short-chain": ("z-lab", 4),
    "dflash-window": ("z-lab-not-causal", (3, 2, 7)),
    "dflash-causal-window": ("z-lab-sliding", (4, 2, 7)),
    "dflash-scaled": ("z-lab-scaled", (3, 2, 6)),
    "jetspec": ("jetspec", (5, 2, 8)),
    "dspark": ("deepspec-vanilla", (4, 3, 9)),
    "dspark-chain": ("speculators-dspark", None),
    "dspark-gated": ("speculators-dspark", (5, 3, 12)),
    "dspark-rnn": ("deepspec-rnn", (4, 3, 10)),
}


class CheckedDrafter:
    """A drafter whose trees are compared with the reference."""

    reads_next_token = False

    def __init__(self, drafter: BlockDrafter, toy: BlockToy, target: TargetView) -> None:
        self.max_draft_tokens, self.aux_hidden_state_layers = drafter.max_draft_tokens, drafter.aux_hidden_state_layers
        self.num_checked = self.num_close_calls = 0
        self._drafter, self._toy, self._target = drafter, toy, target

    def propose(self, context: ProposeContext) -> DraftTree:
        proposed, shape = self._drafter.propose(context), self._drafter._kv.shape
        for request, tree in zip(context.requests, proposed.to_lists(), strict=True):
            expected = NaiveBlock(context, request, self._toy, self._states(context.token_ids(request)), shape)
            self.num_checked += 1
            is_same = is_grown_to(tree, expected.tree, context, shape.num_steps)
            self.num_close_calls += not is_same
            assert is_same or expected.has_near_tie(CLOSE), request
        return proposed

    def release(self, slots: Sequence[int]) -> None:
        self._drafter.release(slots)

    @torch.inference_mode()
    def _states(self, token_ids: list[int]) -> Tensor:
        assert self._target.model is not None
        tokens = torch.tensor(token_ids[:-1])
        _, found = self._target.model(
            tokens, torch.arange(len(tokens)), attend_to_the_past, self.aux_hidden_state_layers
        )
        return torch.cat(list(found), -1)


Start = Callable[..., tuple[LLM, CheckedDrafter]]


@pytest.fixture
def start(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """A function (name in HEADS, engine options) -> (engine, its checked drafter)."""
    drafters: list[CheckedDrafter] = []

    def start(head: str, **options: Any) -> tuple[LLM, CheckedDrafter]:
        layout, shape = HEADS[head]
        make = block(layout, shape) if isinstance(shape, tuple) else block(layout, nodes=shape)

        def checked(method: Method) -> Method:
            def make(config: SpeculativeConfig, target: TargetView) -> Drafter:
                drafter = method.make(config, target)
                assert isinstance(drafter, BlockDrafter)
                drafters.append(CheckedDrafter(drafter, block_toy(layout, toy), target))
                return drafters[-1]

            return method._replace(make=make)

        for name in ("DFLASH", "DSPARK"):
            monkeypatch.setitem(DRAFTERS, name, checked(DRAFTERS[name]))
        llm = make_llm(toy, speculative=make(toy, tmp_path), **options)
        return llm, drafters[-1]

    return start


@pytest.mark.parametrize("head", HEADS)
def test_trees_equal_the_reference_with_and_without_a_cached_prefix(head: str, start: Start) -> None:
    llm, drafter = start(head, page_size=4)
    with llm:
        cold = run(llm)
        warm = run(llm)
    assert [choice.token_ids for choice in warm] == [choice.token_ids for choice in cold]
    assert total(warm, "num_cached_tokens") >= 40
    assert total(warm, "num_accepted") > 0
    assert_checked(drafter, at_least=40)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("head", ["dflash-window", "dspark"])
def test_trees_equal_the_reference_with_any_pages_chunks_and_preemption(head: str, name: str, start: Start) -> None:
    llm, drafter = start(head, **RUNS[name])
    with llm:
        choices = run(llm) + run(llm, PROMPTS[::-1])
    assert (total(choices, "num_preemptions") > 0) == (name == "preemption")
    assert_checked(drafter, at_least=40)


@pytest.mark.parametrize("head", ["dflash", "dspark"])
def test_trees_at_the_end_of_the_context(head: str, start: Start) -> None:
    """Rows behind the last position are never verified."""
    llm, drafter = start(head, page_size=16)
    with llm:
        [choice] = run(llm, [[*[7] * (CONTEXT - 20), 5]], max_tokens=19)
    assert len(choice.token_ids) == 19
    assert drafter.num_checked >= 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_draft_tokens": 7},
            r"num_draft_tokens=7 is more than .* predicts 5 tokens; set it to at most 6",
        ),
        ({"num_steps": 6, "eagle_topk": 2, "num_draft_tokens": 8}, r"num_steps=6 is more than .* set it to at most 5"),
        ({"num_steps": 2}, r"eagle_topk and num_draft_tokens|eagle_topk, num_draft_tokens is not set"),
    ],
)
def test_sizes_that_a_block_does_not_have_are_refused(
    options: dict[str, int], message: str, toy: Path, tmp_path: Path
) -> None:
    speculative = block("z-lab")(toy, tmp_path).model_copy(update=options)
    with pytest.raises(ConfigError, match=message):
        make_llm(toy, speculative=speculative)


def test_a_block_needs_a_head() -> None:
    with pytest.raises(ConfigError, match="DFLASH needs a draft model"):
        check_speculative(SpeculativeConfig(algorithm="DFLASH"))
