"""Random inputs of the verifier, and the defined part of its outputs."""

import torch
from hypothesis import strategies as st

from specray.ops.sampling_state import SamplingBatch
from specray.spec_decode.draft_tree import NONE, DraftTree, TreeLists
from specray.spec_decode.verify_batch import VerifyInput, VerifyOutput
from tests.support.distributions import OPTIONS
from tests.support.sampling import CPU, state_of

VOCAB_SIZE = 7  # so that drafts are often accepted, and siblings often repeat each other
FILTERED = {"temperature": 0.8, "top_p": 0.7}


@st.composite
def trees(draw: st.DrawFn) -> TreeLists:
    size = draw(st.integers(0, 12))
    reach = draw(st.sampled_from([1, 3, 20]))  # 1: a chain
    parents = [NONE] + [draw(st.integers(max(0, node - reach + 1), node)) for node in range(size)]
    return TreeLists(draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=size + 1, max_size=size + 1)), parents)


@st.composite
def inputs(draw: st.DrawFn, *options: dict[str, float]) -> VerifyInput:
    """Greedy and sampled requests, and some with each of `options`."""
    lists = draw(st.lists(trees(), min_size=1, max_size=4))
    made = DraftTree.from_lists(lists)
    tree = DraftTree(made.tokens, made.parents, made.num_nodes, draw(st.integers(0, made.max_depth)))
    num_nodes = [len(row.tokens) for row in lists]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    logits = torch.randn(sum(num_nodes), VOCAB_SIZE, generator=generator) * 2
    if draw(st.booleans()):
        broken = draw(st.sampled_from([float("nan"), float("inf"), float("-inf")]))
        logits[draw(st.integers(0, len(logits) - 1))] = broken
    chosen = draw(st.lists(st.sampled_from([{"temperature": 0.0}, {"temperature": 0.7}, *options]), min_size=1))
    states = [
        state_of(OPTIONS._replace(seed=draw(st.integers(0, 99)), **chosen[row % len(chosen)]), size=VOCAB_SIZE)
        for row in range(len(lists))
    ]
    lengths = torch.tensor([draw(st.integers(1, 50)) for _ in lists])
    return VerifyInput(logits, tree, num_nodes, SamplingBatch.of(states, CPU), lengths)


def known(output: VerifyOutput) -> list[tuple[list[int], list[int]]]:
    """(tokens, nodes) of each request, without what is undefined."""
    rows = zip(output.num_tokens.tolist(), output.tokens.tolist(), output.nodes.tolist(), strict=True)
    return [(tokens[:count], nodes[:count]) for count, tokens, nodes in rows]
