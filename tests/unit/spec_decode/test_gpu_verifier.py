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
from specray.ops.shard_sampling import best_of, packed
from specray.ops.step_tensors import RaggedIndex
from specray.spec_decode.draft_tree import NONE, DraftTree, TreeLists
from specray.spec_decode.node_sampler import coupled
from specray.spec_decode.torch_step_ops import TorchStepOps
from specray.spec_decode.triton_step_ops import TritonStepOps
from specray.spec_decode.verify_batch import PaddedVerifyInput, VerifyInput, VerifyOutput
from tests.support.distributions import OPTIONS
from tests.support.sampling import CPU, state_of
from tests.support.verify_cases import VOCAB_SIZE, inputs, known

TRITON, TORCH = TritonStepOps(), TorchStepOps(CPU)


@pytest.fixture(autouse=True)
def torchs_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECRAY_KERNELS", "torch")


@given(inputs())
@settings(max_examples=15)
def test_the_walk_is_that_of_torch(batch: VerifyInput) -> None:
    assert known(TRITON.verify(batch)) == known(TORCH.verify(batch))


@given(inputs(), st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=16)
def test_nodes_with_padding_behind_them_give_the_same_walk(batch: VerifyInput, dtype: torch.dtype) -> None:
    """As CUDA graphs hold them: rows of logits that no tree has, and requests without a node at the end."""
    batch = batch._replace(logits=batch.logits.to(dtype))
    tree, padding = batch.tree, torch.full((2, VOCAB_SIZE), torch.nan, dtype=dtype)
    tokens, parents = (torch.nn.functional.pad(part, (0, 0, 0, 1), value=NONE) for part in (tree.tokens, tree.parents))
    options = SamplingBatch.of([*batch.sampling.states, state_of(OPTIONS, size=VOCAB_SIZE)], CPU)
    num_nodes, lengths = torch.cat((tree.num_nodes, torch.tensor([0]))), torch.cat((batch.lengths, torch.tensor([0])))
    made = DraftTree(tokens, parents, num_nodes, tree.max_depth)
    is_sampled = any(state.is_sampled for state in batch.sampling.states)
    whole = PaddedVerifyInput(torch.cat((batch.logits, padding)), made, options, lengths, is_sampled)
    walked = TRITON.verify_padded(whole, coupled)
    assert known(walked) == [*known(TORCH.verify(batch)), ([], [])]


@given(inputs())
@settings(max_examples=30)
def test_keys_are_those_of_the_nodes_positions(batch: VerifyInput) -> None:
    tree = batch.tree
    depths = (tree.ancestors().sum(-1) - 1).clamp(max=tree.max_depth)
    expected = noise_keys(batch.sampling.seeds[:, None], batch.lengths[:, None] + depths)
    total = len(batch.logits)
    of_trees = (tree.num_nodes, tree.parents, tree.max_depth)
    most = min(total + 2, tree.tokens.numel())
    seen, trees = sampling.keys_of_nodes(batch.sampling.seeds, batch.lengths, *of_trees, most)
    index = RaggedIndex.of(tree.num_nodes, total)
    assert torch.equal(seen[:total], expected[index.rows, index.offsets])
    assert trees.tolist() == [*index.rows.tolist(), *[-1] * (most - total)]


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
@settings(max_examples=15)
def test_compaction_moves_the_kv_of_accepted_nodes(
    accepted: list[list[int]], shape: tuple[int, int], dtype: torch.dtype, random: Random
) -> None:
    heads, dim = shape
    pool = torch.randn(2, 64, 2, heads, dim).to(dtype)
    slots = list(range(4, 64))
    random.shuffle(slots)
    kv_slots = torch.tensor(slots[: 13 * len(accepted)]).view(-1, 13)
    depth = max(map(len, accepted))
    nodes = torch.tensor([path + [random.randint(0, 12)] * (depth - len(path)) for path in accepted])
    counts = torch.tensor([len(path) for path in accepted])
    expected = pool.clone()
    for row, path in zip(kv_slots, accepted, strict=True):
        expected[:, row[: len(path)]] = pool[:, row[path]]
    kv.commit_paths(pool, kv_slots, VerifyOutput.of(counts, torch.zeros_like(nodes), nodes).outcome)
    assert torch.equal(pool, expected)


def test_equal_logits_choose_the_lowest_id_and_the_first_of_equal_siblings() -> None:
    tree = DraftTree.from_lists([TreeLists([3, 0, 0, 1], [NONE, 0, 0, 1])])
    states = [state_of(OPTIONS._replace(temperature=0.0), size=VOCAB_SIZE)]
    batch = VerifyInput(torch.zeros(4, VOCAB_SIZE), tree, [4], SamplingBatch.of(states, CPU), torch.tensor([1]))
    assert known(TRITON.verify(batch)) == [([0, 0], [0, 1])]


@given(inputs())
@settings(max_examples=6)
def test_the_best_token_of_all_shards_is_that_of_the_whole_vocabulary(batch: VerifyInput) -> None:
    shards = batch.logits.split(3, 1)
    choices = [TRITON.choose(batch._replace(logits=part), 3 * rank) for rank, part in enumerate(shards)]
    best = best_of(torch.stack([packed(choice) for choice in choices], 1))
    assert known(TRITON.accept(batch.tree, best)) == known(TRITON.verify(batch))
