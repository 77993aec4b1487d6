"""Verification on vocabulary shards gives the outcome of verification with all logits."""

import threading
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specray.layers.linear import VocabHead
from specray.layers.parallel import RankGroup
from specray.spec_decode.node_sampler import NodeBatch, NodeSampler, coupled
from specray.spec_decode.shard_verifier import verify_padded_shards, verify_shards
from specray.spec_decode.step_ops import step_ops
from specray.spec_decode.verifier import verify
from specray.spec_decode.verify_batch import PaddedVerifyInput, VerifyInput, VerifyOutput
from tests.support.sampling import CPU
from tests.support.verify_cases import FILTERED, VOCAB_SIZE, inputs, known


class Ranks:
    """What the threads of a group exchange."""

    def __init__(self, size: int) -> None:
        self.parts: list[Tensor | None] = [None] * size
        self.barrier = threading.Barrier(size)
        self.num_exchanged = 0


class ThreadGroup(RankGroup):
    """A rank in a thread of this process."""

    def __init__(self, rank: int, ranks: Ranks) -> None:
        super().__init__()
        self.rank, self.size, self.leads, self._ranks = rank, len(ranks.parts), rank == 0, ranks

    def gather(self, part: Tensor) -> Tensor:
        self._ranks.parts[self.rank] = part
        self._ranks.barrier.wait(10)
        whole = torch.cat([other for other in self._ranks.parts if other is not None], -1)
        self._ranks.num_exchanged += part.numel()
        self._ranks.barrier.wait(10)
        return whole

    def broadcast(self, tensor: Tensor) -> Tensor:
        if self.leads:
            self._ranks.parts[0] = tensor
        self._ranks.barrier.wait(10)
        first = self._ranks.parts[0]
        self._ranks.barrier.wait(10)
        assert first is not None
        return first


def verify_on_ranks(size: int, batch: VerifyInput, sampler: NodeSampler = coupled) -> tuple[VerifyOutput, int]:
    """Rank 0's outcome, and how many numbers all ranks sent."""
    ranks, num_rows = Ranks(size), -(-VOCAB_SIZE // size)

    def run(rank: int) -> VerifyOutput | None:
        head = VocabHead(torch.zeros(num_rows, 1), VOCAB_SIZE, ThreadGroup(rank, ranks))
        shard = batch.logits[:, head.first_id : head.first_id + head.num_columns]
        return verify_shards(batch._replace(logits=shard), head, sampler)

    with ThreadPoolExecutor(size) as pool:
        first, *others = pool.map(run, range(size))
    assert first is not None
    assert others == [None] * (size - 1)
    return first, ranks.num_exchanged


@pytest.mark.parametrize("size", [2, 4, 5])  # of five ranks, the last one has no token
@given(st.data())
@settings(max_examples=30)
def test_the_outcome_is_that_of_all_logits(size: int, data: st.DataObject) -> None:
    batch = data.draw(inputs(FILTERED, {"temperature": 1.0, "presence_penalty": 1.0}))
    output, _ = verify_on_ranks(size, deepcopy(batch))  # a walk by depth counts tokens for penalties
    assert known(output) == known(verify(batch))


@given(inputs())
@settings(max_examples=20)
def test_torchs_operations_agree_on_shards_too(batch: VerifyInput) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECRAY_KERNELS", "torch")
        assert known(verify_on_ranks(3, batch)[0]) == known(verify(batch))


@given(inputs())
@settings(max_examples=10)
def test_requests_without_filters_send_three_numbers_a_node(batch: VerifyInput) -> None:
    _, num_exchanged = verify_on_ranks(2, batch)
    assert num_exchanged == 2 * 3 * len(batch.logits)


@given(st.data(), st.booleans())
@settings(max_examples=30)
def test_padded_steps_agree_and_gather_the_logits_for_filters_only(data: st.DataObject, is_filtered: bool) -> None:
    batch = data.draw(inputs(FILTERED) if is_filtered else inputs())
    is_sampled = any(state.is_sampled for state in batch.sampling.states)
    logits = torch.cat((batch.logits, torch.zeros(2, VOCAB_SIZE)))  # two rows of padding
    whole = PaddedVerifyInput(logits, batch.tree, batch.sampling, batch.lengths, is_sampled)
    ranks, num_rows = Ranks(2), -(-VOCAB_SIZE // 2)

    def run(rank: int) -> VerifyOutput:
        head = VocabHead(torch.zeros(num_rows, 1), VOCAB_SIZE, ThreadGroup(rank, ranks))
        shard = whole.logits[:, head.first_id : head.first_id + head.num_columns].contiguous()
        return verify_padded_shards(whole._replace(logits=shard), coupled, head, is_filtered)

    with ThreadPoolExecutor(2) as pool:
        outputs = list(pool.map(run, range(2)))
    expected = step_ops(CPU).verify_padded(whole, coupled)
    assert known(outputs[0]) == known(outputs[1]) == known(expected)
    three_numbers = 2 * 3 * len(logits)
    assert (ranks.num_exchanged == three_numbers) == (not (is_sampled and is_filtered))


@given(inputs())
@settings(max_examples=5)
def test_a_sampler_that_depends_on_the_drafts_gets_all_logits(batch: VerifyInput) -> None:
    seen = []

    def last(nodes: NodeBatch) -> Tensor:
        seen.append(nodes.logits.shape[1])
        return torch.full((len(nodes.logits),), VOCAB_SIZE - 1)

    verify_on_ranks(2, batch, last)
    assert set(seen) == {VOCAB_SIZE}
