"""Overload: limits of the queue, deadlines, and chunks of long prompts."""

import time
from dataclasses import replace

import pytest

from specray.config import EngineConfig
from specray.engine.engine import Engine
from specray.engine.engine_request import EngineRequest
from specray.engine.executor import Capacity
from specray.engine.fair_queue import FairQueue
from specray.engine.scheduler import MIXED_STEPS
from specray.errors import QueueFullError
from specray.outputs import FinishReason
from specray.sampling_params import SamplingParams
from specray.step import RequestResult, ScheduledRequest, StepPlan, StepResult, StepTimes
from tests.support.toy import VOCAB_SIZE, toy_tokenizer

CHUNK = 64


class PlanRecorder:
    """An executor that records plans. Each row whose known tokens are computed emits one token."""

    def __init__(self, context: int, mixed_prefill_tokens: int) -> None:
        self.capacity = Capacity(2000, 0, context, VOCAB_SIZE, [1], mixed_prefill_tokens=mixed_prefill_tokens)
        self.plans: list[StepPlan] = []
        self._pending: dict[int, int] = {}

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self._pending |= {row.slot: len(row.token_ids) - row.num_computed_tokens for row in plan.new_requests}

    def collect(self) -> StepResult:
        rows = [self._run(row) for row in self.plans[-1].rows]
        return StepResult(self.plans[-1].step_id, rows, StepTimes(0.0, 0.0, 0.0, 0.0))

    def close(self) -> None:
        pass

    def _run(self, row: ScheduledRequest) -> RequestResult:
        self._pending[row.slot] -= row.num_tokens
        if self._pending[row.slot] > 0:
            return RequestResult(row.slot, [], 0, None, None)
        self._pending[row.slot] = 1
        return RequestResult(row.slot, [4], 0, None, None)


def make_engine(context: int = 40, mixed: int = 2 * CHUNK, **options: int) -> tuple[Engine, PlanRecorder]:
    config = EngineConfig(page_size=16, disable_radix_cache=True, **options)  # type: ignore[arg-type]
    ranks = PlanRecorder(context, mixed)
    return Engine(config, ranks, toy_tokenizer().backend_tokenizer), ranks


def request(name: str, prompt: int = 4, tenant: str = "", max_tokens: int = 30, **options: float) -> EngineRequest:
    params = SamplingParams(seed=1, max_tokens=max_tokens, ignore_eos=True)
    return EngineRequest(name, [5] * prompt, params, tenant=tenant, **options)  # type: ignore[arg-type]


def test_a_request_that_is_admitted_meanwhile_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue is checked in another thread than the step's."""
    engine, _ = make_engine(max_running_requests=1, max_queued_requests=1)
    engine.add_request(request("a"))

    def step_meanwhile(queue: FairQueue, tenant: str) -> int:  # noqa: ARG001
        engine.step()
        return 0

    monkeypatch.setattr(FairQueue, "num_waiting_of", step_meanwhile)
    engine.admission.check_queue()  # raises nothing: one request runs, none waits
    assert (len(engine.scheduler.running), len(engine.scheduler.waiting)) == (1, 0)


def test_waiting_and_running_requests_end_at_their_deadline() -> None:
    engine, ranks = make_engine(max_running_requests=1)
    engine.add_request(request("runs", timeout_s=0.5))
    engine.step()
    engine.add_request(request("waits", timeout_s=0.2))
    engine.add_request(request("patient", max_tokens=2))
    time.sleep(0.6)
    before = len(ranks.plans)
    ended = {output.request_id: output.finish_reason for output in engine.step() if output.finish_reason}
    assert ended == {"runs": FinishReason.ABORT, "waits": FinishReason.ABORT}
    plan = ranks.plans[before]
    assert [len(row.token_ids) for row in plan.new_requests] == [4]  # the freed slot is used in the same step
    while engine.has_work:
        engine.step()
    assert sum(len(plan.new_requests) for plan in ranks.plans) == 2
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_usable


def test_a_request_without_a_deadline_runs_to_its_end() -> None:
    engine, _ = make_engine()
    engine.add_request(request("r", max_tokens=3))
    assert [o.finish_reason for _ in range(9) if engine.has_work for o in engine.step()][-1] is FinishReason.LENGTH


@pytest.mark.parametrize(("own_limit", "allowed"), [(None, 2), (1, 1), (0, 0), (3, 3)])
def test_a_tenant_may_use_a_part_of_the_queue(own_limit: int | None, allowed: int) -> None:
    options = {} if own_limit is None else {"max_queued_requests_per_tenant": own_limit}
    engine, _ = make_engine(max_running_requests=1, max_queued_requests=4, **options)
    engine.add_request(request("first", tenant="a"))
    engine.step()
    for index in range(allowed):
        engine.add_request(request(f"a{index}", tenant="a"))
    with pytest.raises(
        QueueFullError, match=f"with this key are waiting and max_queued_requests_per_tenant is {allowed}"
    ):
        engine.add_request(request("too many", tenant="a"))
    for index in range(4 - allowed):
        engine.add_request(request(f"b{index}"))  # without a tenant only the limit of the queue holds
    with pytest.raises(QueueFullError, match="max_queued_requests is 4"):
        engine.add_request(request("last", tenant="c"))


def test_requests_that_arrive_during_a_step_count() -> None:
    engine, _ = make_engine(max_running_requests=1, max_queued_requests=4)
    engine.add_request(request("first", tenant="a"))
    engine.step()
    arriving = [request(f"b{index}", tenant="b") for index in range(2)]
    engine.admission.check(request("a0", tenant="a"), arriving)
    with pytest.raises(QueueFullError, match="2 requests with this key"):
        engine.admission.check(request("b2", tenant="b"), arriving)


@pytest.mark.parametrize("probe", ["none", "arriving", "waiting", "running"])
def test_a_probe_takes_no_clients_place(probe: str) -> None:
    engine, _ = make_engine(max_running_requests=1, max_queued_requests=1)
    sent = [replace(request("probe"), is_probe=True)] * (probe != "none")
    if probe in ("waiting", "running"):
        engine.add_request(sent.pop())
    if probe == "running":
        engine.step()
    engine.admission.check_queue(arriving=[*sent, request("a")])
    with pytest.raises(QueueFullError, match="2 requests are waiting"):
        engine.admission.check_queue(arriving=[*sent, request("a"), request("b")])


def test_decoding_rows_wait_for_few_prompt_tokens() -> None:
    options = {"chunked_prefill_size": 4 * CHUNK, "max_prefill_tokens": 8 * CHUNK}
    engine, ranks = make_engine(9000, max_running_requests=12, **options)
    names = [f"short{index}" for index in range(6)]
    for name in names:
        engine.add_request(request(name, max_tokens=600))
    engine.step()
    for index in range(3):
        engine.add_request(request(f"long{index}", prompt=8000, max_tokens=2))
    decoding = {running.slot for running in engine.scheduler.running}
    prefills = []
    for _ in range(100):
        emitted = {output.request_id for output in engine.step() if output.token_ids}
        plan = ranks.plans[-1]
        assert {row.slot for row in plan.rows if row.num_tokens == 1} >= decoding
        assert emitted >= set(names), "a decoding request got no token"
        prefills.append([row.num_tokens for row in plan.rows if row.num_tokens > 1])
    assert all(size <= CHUNK for sizes in prefills for size in sizes)
    assert all(sum(sizes) <= 2 * CHUNK for sizes in prefills)
    assert [CHUNK, CHUNK] in prefills, "the second prompt waited for the end of the first"


def test_one_long_prompt_takes_half_of_what_a_mixed_step_allows() -> None:
    engine, ranks = make_engine(9000, max_running_requests=4, chunked_prefill_size=4 * CHUNK)
    engine.add_request(request("short", max_tokens=400))
    engine.step()
    engine.add_request(request("long", prompt=8000, max_tokens=1))
    for _ in range(60):
        engine.step()
        assert sorted(row.num_tokens for row in ranks.plans[-1].rows) == [1, CHUNK]


def test_without_decoding_rows_prompts_may_fill_a_step() -> None:
    engine, ranks = make_engine(9000, max_running_requests=4, chunked_prefill_size=CHUNK, max_prefill_tokens=4 * CHUNK)
    for index in range(4):
        engine.add_request(request(f"long{index}", prompt=1000, max_tokens=1))
    engine.step()
    assert [row.num_tokens for row in ranks.plans[0].rows] == [CHUNK] * 4


@pytest.mark.parametrize(("mixed", "chunk", "largest"), [(2 * CHUNK, 10, 10), (5, CHUNK, 3), (1, CHUNK, 1)])
def test_a_prompt_gets_a_token_in_each_mixed_step_and_never_more_than_a_chunk(
    mixed: int, chunk: int, largest: int
) -> None:
    engine, ranks = make_engine(200, mixed, chunked_prefill_size=chunk)
    engine.add_request(request("short", prompt=1, max_tokens=150))
    engine.step()
    engine.add_request(request("long", prompt=100, max_tokens=1))
    engine.step()
    assert sorted(row.num_tokens for row in ranks.plans[-1].rows) == [1, largest]


def test_a_step_has_few_prompt_tokens_until_no_request_has_decoded_for_a_while() -> None:
    engine, ranks = make_engine(9000, chunked_prefill_size=4 * CHUNK)
    engine.add_request(request("short", max_tokens=2))
    engine.add_request(request("long", prompt=8000, max_tokens=1))
    for _ in range(MIXED_STEPS + 3):
        engine.step()
    sizes = [max(row.num_tokens for row in plan.rows) for plan in ranks.plans]
    assert sizes == [4 * CHUNK] + [CHUNK] * MIXED_STEPS + [4 * CHUNK] * 2


def test_a_prompt_that_arrives_when_no_request_is_left_fills_its_chunks() -> None:
    engine, ranks = make_engine(9000, chunked_prefill_size=4 * CHUNK)
    engine.add_request(request("first", max_tokens=3))
    while engine.scheduler.running or engine.scheduler.waiting.num_waiting:
        engine.step()
    before = len(ranks.plans)
    engine.add_request(request("next", prompt=12 * CHUNK, max_tokens=1))
    for _ in range(3):
        engine.step()
    assert [row.num_tokens for plan in ranks.plans[before:] for row in plan.rows] == [4 * CHUNK] * 3
