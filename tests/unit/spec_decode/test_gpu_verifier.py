"""Verification by Triton's kernels, in the interpreter, equals that by torch's operations."""

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from specray.ops.gpu import kv, sampling
from specray.ops.noise import noise_keys
from specray.ops.sampling_state import SamplingBatch
from specray.spec_decode import verifier
from specray.spec_decode.draft_tree import NONE, DraftTree, TreeLists
from specray.spec_decode.verify_batch import VerifyInput, VerifyOutput
from tests.support.distributions import OPTIONS
from tests.support.sampling import CPU, state_of

VOCAB_SIZE = 6  # so that drafts are often accepted, and siblings often repeat each other


@pytest.fixture(autouse=True)
def torchs_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("argmax", "sampling"):
        monkeypatch.setattr(f"specray.ops.{module}.kernels", lambda: None)


@st.composite
def trees(draw: st.DrawFn) -> TreeLists:
    size = draw(st.integers(0, 20))
    reach = draw(st.sampled_from([1, 3, 20]))  # 1: a chain
    parents = [NONE] + [draw(st.integers(max(0, node - reach + 1), node)) for node in range(size)]
    return TreeLists(draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=size + 1, max_size=size + 1)), parents)


@st.composite
def inputs(draw: st.DrawFn) -> VerifyInput:
    lists = draw(st.lists(trees(), min_size=1, max_size=4))
    made = DraftTree.from_lists(lists)
    depth = draw(st.integers(0, made.max_depth))
    tree = DraftTree(made.tokens, made.parents, made.num_nodes, depth)
    num_nodes = [len(row.tokens) for row in lists]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    logits = torch.randn(sum(num_nodes), VOCAB_SIZE, generator=generator) * 2
    if draw(st.booleans()):
        broken = draw(st.sampled_from([float("nan"), float("inf"), float("-inf")]))
        logits[draw(st.integers(0, len(logits) - 1))] = broken
    temperatures = draw(st.sampled_from([[0.0], [0.7], [0.0, 1.0]]))
    options = [
        OPTIONS._replace(seed=draw(st.integers(0, 99)), temperature=temperatures[row % len(temperatures)])
        for row in range(len(lists))
    ]
    states = [state_of(option, size=VOCAB_SIZE) for option in options]
    lengths = torch.tensor([draw(st.integers(1, 50)) for _ in lists])
    return VerifyInput(logits, tree, num_nodes, SamplingBatch.of(states, CPU), lengths)


def known(output: VerifyOutput) -> list[tuple[list[int], list[int]]]:
    """(tokens, nodes) of each request, without what is undefined."""
    rows = zip(output.num_tokens.tolist(), output.tokens.tolist(), output.nodes.tolist(), strict=True)
    return [(tokens[:count], nodes[:count]) for count, tokens, nodes in rows]


@given(inputs())
@settings(max_examples=25)
def test_the_walk_is_that_of_torch(batch: VerifyInput) -> None:
    assert known(verifier._verify_on_gpu(batch)) == known(verifier._verify_at_once(batch, None))


@given(inputs())
@settings(max_examples=12)
def test_trees_in_padded_rows_give_the_same_walk(batch: VerifyInput) -> None:
    """As CUDA graphs hold them: a row of logits for every place, and requests without a node at the end."""
    tree, count = batch.tree, len(batch.num_nodes)
    width = tree.tokens.shape[1]
    padded = torch.full((count + 1, width, VOCAB_SIZE), torch.nan)
    for row, (start, nodes) in enumerate(zip(batch.starts().tolist(), batch.num_nodes, strict=True)):
        padded[row, :nodes] = batch.logits[start : start + nodes]
    tokens, parents = (torch.cat((part, torch.full((1, width), NONE))) for part in (tree.tokens, tree.parents))
    states = [*batch.sampling.states, state_of(OPTIONS, size=VOCAB_SIZE)]
    rows = sampling.Rows(
        padded.flatten(0, 1), torch.arange(count + 1) * width, torch.cat((tree.num_nodes, torch.tensor([0]))), width
    )
    lengths = torch.cat((batch.lengths, torch.tensor([0])))
    walked = sampling.walk(rows, tokens, parents, tree.max_depth, SamplingBatch.of(states, CPU), lengths)
    assert known(VerifyOutput(*walked, {})) == [*known(verifier._verify_at_once(batch, None)), ([], [])]


@given(inputs())
@settings(max_examples=30)
def test_keys_are_those_of_the_nodes_positions(batch: VerifyInput) -> None:
    tree = batch.tree
    depths = (tree.ancestors().sum(-1) - 1).clamp(max=tree.max_depth)
    expected = noise_keys(batch.sampling.seeds[:, None], batch.lengths[:, None] + depths).flatten(0, 1)
    seen = sampling._keys_of_nodes(batch.sampling.seeds, batch.lengths, tree.parents, tree.max_depth)
    assert torch.equal(seen, expected)


@st.composite
def paths(draw: st.DrawFn) -> list[int]:
    """Nodes of a path from the root, in ascending order; rows that failed keep none."""
    return draw(st.sampled_from([[], [0]])) or [0, *sorted(draw(st.sets(st.integers(1, 12), max_size=12)))]


@given(
    st.lists(paths(), min_size=1, max_size=4),
    st.sampled_from([(1, 1), (3, 24), (2, 80)]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.randoms(use_true_random=False),
)
@settings(max_examples=25)
def test_compaction_moves_the_kv_of_accepted_nodes(
    accepted: list[list[int]], shape: tuple[int, int], dtype: torch.dtype, random: Random
) -> None:
    heads, dim = shape
    pool = torch.randn(2, 64, 2, heads, dim).to(dtype)
    slots = list(range(4, 64))
    random.shuffle(slots)
    kv_slots = torch.tensor(slots[: 13 * len(accepted)]).view(-1, 13)
    depth = max(map(len, accepted))
    outcome = torch.tensor([[len(path), *path, *[random.randint(0, 12)] * (depth - len(path))] for path in accepted])
    expected = pool.clone()
    for row, path in zip(kv_slots, accepted, strict=True):
        expected[:, row[: len(path)]] = pool[:, row[path]]
    kv.commit_paths(pool, kv_slots, outcome[:, 1:], outcome[:, 0])
    assert torch.equal(pool, expected)


def test_equal_logits_choose_the_lowest_id_and_the_first_of_equal_siblings() -> None:
    tree = DraftTree.from_lists([TreeLists([3, 0, 0, 1], [NONE, 0, 0, 1])])
    states = [state_of(OPTIONS._replace(temperature=0.0), size=VOCAB_SIZE)]
    batch = VerifyInput(torch.zeros(4, VOCAB_SIZE), tree, [4], SamplingBatch.of(states, CPU), torch.tensor([1]))
    assert known(verifier._verify_on_gpu(batch)) == [([0, 0], [0, 1])]
