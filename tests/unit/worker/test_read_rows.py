"""For rows whose output nobody reads, the last layer computes keys and values only. Nothing else changes."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from specray.config import EngineConfig
from specray.models.target_model import BEFORE_FINAL_NORM
from specray.ops.attention import AttentionBatch
from specray.ops.cpu import processor
from specray.ops.cpu.library import kernels
from specray.spec_decode.draft_tree import NONE, DraftTree, TreeLists
from specray.spec_decode.inline_drafts import InlineDrafts
from specray.spec_decode.merged import MergedDrafter
from specray.step import UNLIMITED, NewRequest, PromptLogprobs, ScheduledRequest, StepPlan
from specray.worker.input_batch import InputBatch, ScheduledBatch, StepBatch, build_batch
from specray.worker.kernel_backend import KernelBackend
from specray.worker.startup import start_worker
from specray.worker.worker import Worker
from tests.support.distributions import OPTIONS
from tests.support.methods import eagle

pytestmark = pytest.mark.skipif(kernels() is None, reason="needs the compiled kernels")

# A prompt that is not complete after the step, one with drafts, one token, and a prompt without drafts.
PROMPTS = [[0, 9, 8, 7, 6, 5, 4, 9, 8], [5, 6, 7, 8], [3], [0, 2, 4, 2, 4, 2, 4]]
NUM_TOKENS = [4, 9, 9, 9]
TREES = [
    TreeLists([7], [NONE]),
    TreeLists([8, 20, 21, 22], [NONE, 0, 0, 1]),
    TreeLists([3, 30, 31], [NONE, 0, 1]),
    TreeLists([4], [NONE]),
]
READ = [3, 7, 8, 9, 10, 11, 12, 13, 20]  # rows among all of the step


class Computed(NamedTuple):
    hidden: Tensor
    logits: Tensor
    aux_hidden_states: list[Tensor]
    kv: Tensor


TYPES = {"float32": {"dtype": "float32"}, "bfloat16, KV in int8": {"dtype": "bfloat16", "kv_cache_dtype": "int8"}}


@pytest.fixture(params=TYPES)
def types(request: pytest.FixtureRequest) -> dict[str, str]:
    return TYPES[request.param]


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def worker(
    request: pytest.FixtureRequest, types: dict[str, str], toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Worker:
    monkeypatch.setattr(processor, "_SMALL", 0)  # the toy model's weights are small enough for one thread
    options: dict[str, Any] = {"device": "cpu", "page_size": 4, "max_total_tokens": 128, **types}
    speculative = eagle(3, draft_vocab_size=40)(toy, tmp_path)
    config = EngineConfig(model=str(toy), num_threads=request.param, speculative=speculative, **options)
    return start_worker(config)


def batch_of(worker: Worker, prompt_logprobs: PromptLogprobs | None = None) -> InputBatch:
    new = [
        NewRequest(
            slot, prompt, len(prompt), 0, [1 + 4 * slot + page for page in range(4)], OPTIONS, "", prompt_logprobs
        )
        for slot, prompt in enumerate(PROMPTS)
    ]
    rows = [ScheduledRequest(slot, count, UNLIMITED, []) for slot, count in enumerate(NUM_TOKENS)]
    step = ScheduledBatch.of(worker._table, StepPlan(1, [], new, rows))
    sizes = [len(tree.tokens) for tree in TREES]
    return build_batch(worker._table, StepBatch(step, DraftTree.from_lists(TREES), sizes))


def compute(worker: Worker, batch: InputBatch, layers: tuple[int, ...]) -> Computed:
    assert isinstance(worker.backend, KernelBackend)
    runner, passes = worker.backend.runner, worker.backend._passes
    pool, attend = runner.kv.pool, runner.attention.plan(batch.attention)
    pool.zero_()
    step = (batch.token_ids, batch.positions, attend, batch.node_places, layers)
    number, (hidden, logits, aux_hidden_states) = passes.start(*step, read_lens=batch.read_lens)
    passes.wait(number)
    assert isinstance(logits, Tensor)
    return Computed(hidden, logits, aux_hidden_states, pool.clone())


def test_a_pass_computes_what_is_read(worker: Worker) -> None:
    batch = batch_of(worker)
    assert batch.read_lens == [1, 4, 3, 1]
    every, read = (compute(worker, each, (0, 1)) for each in (batch._replace(read_lens=None), batch))
    assert torch.equal(read.logits, every.logits)
    assert torch.equal(read.kv, every.kv)
    assert all(map(torch.equal, read.aux_hidden_states, every.aux_hidden_states))
    assert torch.equal(read.hidden[READ], every.hidden[READ])
    others = sorted(set(range(len(every.hidden))) - set(READ))
    assert not torch.equal(read.hidden[others], every.hidden[others])


@pytest.mark.parametrize("after", ["the last layer", "the final norm"])
def test_aux_hidden_states_after_the_last_layer_are_those_of_all_rows(after: str, worker: Worker) -> None:
    batch = batch_of(worker)
    layer = BEFORE_FINAL_NORM if after == "the last layer" else worker.model.shape.num_layers
    every, read = (compute(worker, each, (layer,)) for each in (batch._replace(read_lens=None), batch))
    assert torch.equal(read.aux_hidden_states[0], every.aux_hidden_states[0])


def test_prompt_logprobs_read_all_rows(worker: Worker) -> None:
    assert batch_of(worker, PromptLogprobs(0, 2)).read_lens is None


@pytest.mark.parametrize("read_lens", [[0, 1, 0, 1], [0, 0, 0, 0], [4, 1, 1, 2]], ids=str)
def test_a_head_computes_what_is_read(read_lens: list[int], worker: Worker) -> None:
    assert isinstance(worker.drafts, InlineDrafts)
    assert isinstance(worker.drafts.drafter, MergedDrafter)
    drafter = worker.drafts.drafter.drafter
    network, attention = drafter._head.network, drafter._kv.attention  # type: ignore[attr-defined]
    lens = [4, 4, 1, 7]
    slots = [[4 * request + 16 + place for place in range(length)] for request, length in enumerate(lens)]
    states = torch.randn(sum(lens), worker.model.shape.hidden_size, generator=torch.Generator().manual_seed(0))
    states = states.to(drafter._head.dtype)  # type: ignore[attr-defined]
    token_ids = torch.arange(3, 3 + sum(lens))
    positions = torch.cat([torch.arange(length) for length in lens])
    kv_slots = torch.tensor([[*row, *[0] * (7 - len(row))] for row in slots])
    written = torch.tensor([slot for row in slots for slot in row])
    batch = AttentionBatch(lens, lens, kv_slots, written, [(0, 0)] * len(lens))
    found = []
    for read in (None, read_lens):
        attention.pool.zero_()
        output = network.extend(token_ids, states, positions, attention.plan(batch), read)
        found.append((output, attention.pool.clone()))
    (every, all_kv), (output, kv) = found
    ends = torch.tensor(lens).cumsum(0).tolist()
    rows = [row for end, count in zip(ends, read_lens, strict=True) for row in range(end - count, end)]
    assert torch.equal(output[rows], every[rows])
    assert torch.equal(kv, all_kv)
    assert kv[:, written].abs().sum() > 0
