"""A worker on a GPU that is not there: no operation mixes devices, and the host reads only what a step may read."""

from pathlib import Path

import pytest
import torch

from specray.config import EngineConfig, SpeculativeConfig
from specray.errors import ConfigError
from specray.ops.attention_torch import TorchAttention
from specray.step import UNLIMITED, NewRequest, SamplingOptions, ScheduledRequest, StepPlan
from specray.worker.loading import choose_device
from specray.worker.remote_drafter.server import DraftServer, make_remote_drafter, remote_target_view
from specray.worker.remote_drafter.wire import DeltaDecoder, DeltaEncoder, TargetHandshake, pack, unpack_order
from specray.worker.startup import start_worker
from tests.support.fake_cuda import fake_cuda
from tests.support.methods import KINDS, METHODS

GPU = torch.device("cuda", 0)
GREEDY = SamplingOptions(0, 0.0, 1.0, 0, 0.0, 0.0, 0.0, 1.0, [], 0, [], None)
SAMPLED = GREEDY._replace(seed=7, temperature=0.8, top_p=0.9, top_k=20, min_p=0.05)


@pytest.fixture(autouse=True)
def torchs_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter would read the tensors."""
    monkeypatch.setenv("SPECRAY_KERNELS", "torch")


def prefill(chunk: int) -> StepPlan:
    requests = [
        NewRequest(0, list(range(5, 25)), 20, 0, [1, 2, 3], GREEDY, ""),
        NewRequest(2, [7, 8, 9], 3, 0, [4, 5], SAMPLED, ""),
    ]
    return StepPlan(0, [], requests, [ScheduledRequest(0, chunk, UNLIMITED, []), ScheduledRequest(2, 3, UNLIMITED, [])])


def decode(step: int) -> StepPlan:
    return StepPlan(step, [], [], [ScheduledRequest(slot, 64, UNLIMITED, []) for slot in (0, 2)])


def configuration(target: Path, speculative: SpeculativeConfig) -> EngineConfig:
    sizes = {"max_total_tokens": 512, "max_running_requests": 4}
    return EngineConfig(model=str(target), device="cuda", dtype="float32", speculative=speculative, **sizes)


def with_triton_experts(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    """torch's experts run one after the other, and the host reads which have tokens."""
    pytest.importorskip("triton")
    monkeypatch.setattr("triton.runtime.interpreter.InterpretedFunction.run", lambda *_, **__: None)
    return config.model_copy(update={"moe_runner_backend": "triton"})


# These differ from others in sizes only, or on the host; transformers' modules are tried out, with numbers.
SIZES = (
    *("EAGLE3-wide", "EAGLE3-chain", "EAGLE3-repeated", "EAGLE-chain", "EAGLE-deep", "PARALLEL-chain"),
    *("NGRAM-short", "NGRAM-prob", "NGRAM-suffix", "MTP-mimo-v2"),
)
MERGED = ("EAGLE3-merged", "DSPARK-merged")  # on the host, which reads the trees
LIKE_ANOTHER = ("EAGLE-map", "MTP-deepseek", "NEXTN")  # read the same of an order as EAGLE3 and MTP-stack


@pytest.mark.parametrize("method", [None, *(name for name in METHODS if name not in SIZES + MERGED)])
def test_a_step_stays_on_its_gpu(
    method: str | None, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speculative = SpeculativeConfig() if method is None else METHODS[method](toy, tmp_path)
    config = configuration(toy, speculative)
    if method == "MTP-deepseek":
        config = with_triton_experts(config, monkeypatch)
    with fake_cuda(read=1 if method is None else 2):
        worker = start_worker(config)
        assert worker.model.embedding.weight.device == GPU
        for step in range(3):  # a chunk of a prompt, the rest of it, and a tree; then a draft after a tree
            worker.propose()
            result = worker.execute(decode(step) if step else prefill(8))
            assert [row.error for row in result.rows] == [None, None]
        worker.propose()


@pytest.mark.parametrize("method", [name for name in KINDS if name not in MERGED + LIKE_ANOTHER])
def test_a_drafter_of_another_process_reads_its_hidden_states_on_its_gpu(
    method: str, toy: Path, tmp_path: Path
) -> None:
    """The states cross through the host's memory."""
    config = configuration(toy, METHODS[method](toy, tmp_path))
    with fake_cuda(read=2):
        worker = start_worker(config)
        drafter = make_remote_drafter(config, remote_target_view(config), 512)
        table, width = worker._table, len(drafter.aux_hidden_state_layers) * worker.model.shape.hidden_size
        target = TargetHandshake(64, width, "float32", table.num_slots, table.max_tokens, 16, table.vocab_size)
        encoder, decoder = DeltaEncoder(), DeltaDecoder(target, GPU)
        server = DraftServer(drafter, GPU)
        region = torch.empty(64, width)
        for step in range(3):
            worker.execute(decode(step) if step else prefill(64))
            reply = server._reply(unpack_order(pack(encoder.order(step, 0, worker._context))), region, decoder)
            assert reply.fault is None


def test_a_rank_takes_its_gpu_and_makes_it_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    config = EngineConfig(device="cuda")
    assert [choose_device(config, rank) for rank in range(3)] == [GPU, torch.device("cuda", 1), GPU]
    assert current == [GPU, torch.device("cuda", 1), GPU]
    assert choose_device(EngineConfig(device="cpu"), 0).type == "cpu"


def test_a_gpu_that_is_not_there_is_an_error_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="device=cuda, but torch finds no GPU here"):
        choose_device(EngineConfig(device="cuda"), 0)
    assert choose_device(EngineConfig(), 0).type == "cpu"


def test_requests_share_one_batch_of_attention_on_a_gpu(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU a batch has as much KV as a cache holds."""
    monkeypatch.setattr("specray.ops.attention_torch._BATCH_BYTES", 1)
    groups = []
    group = TorchAttention._group
    monkeypatch.setattr(TorchAttention, "_group", lambda *args: groups.append(args[2]) or group(*args))
    with fake_cuda():
        start_worker(configuration(toy, SpeculativeConfig())).execute(prefill(64))
    assert groups == [[0, 1]]
