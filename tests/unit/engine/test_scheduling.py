"""Random requests, drafts, aborts and preemptions: every request ends once with its full text, and no block leaks."""

from collections import Counter
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specray.config import EngineConfig, SpeculativeConfig
from specray.engine.engine import Engine
from specray.engine.engine_request import EngineRequest
from specray.engine.executor import Capacity
from specray.engine.request import Status
from specray.errors import InvalidRequestError, QueueFullError
from specray.outputs import FinishReason, RequestOutput
from specray.sampling_params import SamplingParams
from specray.step import StepPlan, StepResult
from tests.support.ranks import SimulatedRanks
from tests.support.toy import VOCAB_SIZE, toy_tokenizer
from tests.unit.engine.fake_executor import check_block_accounting

TOKENIZER = toy_tokenizer().backend_tokenizer
CONTEXT = 40


def text(token_ids: list[int]) -> int:
    """The target's next token, a function of all tokens before it. It is never the end token."""
    return 4 + hash(tuple(token_ids)) % (VOCAB_SIZE - 4)


def continuation(prompt: list[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(text(tokens))
    return tokens[len(prompt) :]


def capacity(
    num_blocks: int = 20, max_draft_tokens: int = 4, reads_next_token: bool = False, mixed_prefill_tokens: int = 12
) -> Capacity:
    return Capacity(
        num_blocks,
        max_draft_tokens,
        CONTEXT,
        VOCAB_SIZE,
        [1],
        reads_next_token,
        mixed_prefill_tokens=mixed_prefill_tokens,
    )


@dataclass(frozen=True)
class Case:
    config: EngineConfig
    num_blocks: int
    max_draft_tokens: int
    seed: int
    reads_next_token: bool = False
    mixed_prefill_tokens: int = 12

    @property
    def capacity(self) -> Capacity:
        return capacity(self.num_blocks, self.max_draft_tokens, self.reads_next_token, self.mixed_prefill_tokens)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    chunk = draw(st.integers(1, 12))
    config = EngineConfig(
        page_size=draw(st.sampled_from([1, 2, 4, 16])),
        max_running_requests=draw(st.integers(1, 5)),
        chunked_prefill_size=chunk,
        max_prefill_tokens=draw(st.integers(chunk, 20)),
        max_queued_requests=100,
        disable_radix_cache=draw(st.booleans()),
    )
    at_least = -(-CONTEXT // config.page_size) + 1
    num_blocks = draw(st.integers(at_least, at_least + 2 * CONTEXT // config.page_size))
    max_draft_tokens, mixed_prefill_tokens = draw(st.integers(0, 6)), draw(st.integers(1, 12))
    return Case(
        config, num_blocks, max_draft_tokens, draw(st.integers(0, 2**32)), draw(st.booleans()), mixed_prefill_tokens
    )


class Run:
    """An engine on simulated ranks, with random requests from `case.seed`."""

    def __init__(self, case: Case, abort_share: float = 0.0) -> None:
        self.random = Random(case.seed)
        self.ranks = SimulatedRanks(case.config, case.capacity, text, self.random)
        self.engine = Engine(case.config, self.ranks, TOKENIZER)
        self.requests: dict[str, EngineRequest] = {}
        self.outputs: dict[str, list[RequestOutput]] = {}
        self.abort_share = abort_share

    def play(self, num_requests: int) -> None:
        waiting = [self.request(index) for index in range(num_requests)]
        while waiting or self.engine.has_work:
            while waiting and self.random.random() < 0.5:
                request = waiting.pop()
                self.requests[request.request_id] = request
                self.outputs[request.request_id] = []
                self.engine.add_request(request)
            if self.requests and self.random.random() < self.abort_share:
                self.engine.requests.abort([self.random.choice(list(self.requests))])
            for output in self.engine.step():
                self.outputs[output.request_id].append(output)
            check_block_accounting(self.engine)

    def request(self, index: int) -> EngineRequest:
        prompt = [4 + self.random.randrange(2) for _ in range(self.random.randint(1, CONTEXT - 1))]
        max_new_tokens = CONTEXT - len(prompt)
        max_tokens = self.random.choice([None, self.random.randint(1, max_new_tokens)])
        params = SamplingParams(seed=index, max_tokens=max_tokens, ignore_eos=True, logprobs=0)
        return EngineRequest(str(index), prompt, params, self.random.choice(["", "tenant"]))

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs[request_id] for token in output.token_ids]


@given(cases())
@settings(max_examples=120)
def test_every_request_gets_its_full_text(case: Case) -> None:
    run = Run(case)
    run.play(num_requests=8)
    for request_id, request in run.requests.items():
        expected = request.params.max_tokens or CONTEXT - len(request.prompt_token_ids)
        assert run.tokens(request_id) == continuation(request.prompt_token_ids, expected)
        assert [o.finish_reason for o in run.outputs[request_id] if o.finish_reason] == [FinishReason.LENGTH]


@given(cases())
@settings(max_examples=80)
def test_an_aborted_request_ends_once_with_a_prefix_of_its_text_and_frees_its_blocks(case: Case) -> None:
    run = Run(case, abort_share=0.3)
    run.play(num_requests=8)
    for request_id, request in run.requests.items():
        tokens = run.tokens(request_id)
        assert tokens == continuation(request.prompt_token_ids, len(tokens))
        assert len([o for o in run.outputs[request_id] if o.finish_reason]) == 1
        assert run.outputs[request_id][-1].finish_reason is not None
    scheduler = run.engine.scheduler
    assert not scheduler.running
    assert scheduler.cache.num_idle == scheduler.cache.num_cached
    assert scheduler.pool.num_free + scheduler.cache.num_idle == scheduler.pool.num_usable


@given(cases())
@settings(max_examples=40)
def test_metrics_are_the_sums_of_usage(case: Case) -> None:
    run = Run(case)
    run.play(num_requests=6)
    run.engine.update_gauges()
    stats, usages = run.engine.stats.snapshot(), [outputs[-1].usage for outputs in run.outputs.values()]
    for output_list, usage in zip(run.outputs.values(), usages, strict=True):
        assert usage.num_completion_tokens == sum(len(o.token_ids) for o in output_list)
    assert stats["specray_generation_tokens_total"] == sum(u.num_completion_tokens for u in usages)
    assert stats["specray_prompt_tokens_total"] == sum(u.num_prompt_tokens for u in usages)
    assert stats["specray_verify_steps_total"] == sum(u.num_verify_steps for u in usages)
    assert stats["specray_spec_decode_num_draft_tokens_total"] == sum(u.num_draft_tokens for u in usages)
    assert stats["specray_spec_decode_num_accepted_tokens_total"] == sum(u.num_accepted for u in usages)
    assert stats["specray_num_preemptions_total"] == sum(u.num_preemptions for u in usages)
    assert stats["specray_request_finished_total"] == {"stop": 0, "length": len(usages), "abort": 0, "error": 0}
    assert stats["specray_kv_cache_usage_perc"] == stats["specray_num_requests_running"] == 0
    assert stats["specray_prefix_cache_hits_total"] == sum(u.num_cached_tokens for u in usages)


def test_all_requests_finish_despite_preemption() -> None:
    config = EngineConfig(page_size=4, max_running_requests=4, disable_radix_cache=True)
    run = Run(Case(config, 12, 4, seed=1))
    run.play(num_requests=12)
    assert run.engine.scheduler.slots.num_preemptions > 0
    assert all(outputs[-1].finish_reason is FinishReason.LENGTH for outputs in run.outputs.values())


@pytest.mark.parametrize(("length", "cached"), [(19, 16), (20, 16), (21, 20), (3, 0)])
def test_a_second_request_with_the_same_prompt_uses_the_cache(length: int, cached: int) -> None:
    """The last prompt token is always computed, because its logits are needed."""
    run = Run(Case(EngineConfig(page_size=4), 40, 0, seed=1))
    prompt = list(range(4, 4 + length))
    for request_id in ("cold", "warm"):
        run.engine.add_request(EngineRequest(request_id, prompt, SamplingParams(seed=1, max_tokens=1)))
        run.outputs[request_id] = run.engine.step()
    assert run.outputs["cold"][-1].usage.num_cached_tokens == 0
    assert run.outputs["warm"][-1].usage.num_cached_tokens == cached
    assert run.tokens("cold") == run.tokens("warm")


def test_requests_start_in_order_of_arrival() -> None:
    run = Run(Case(EngineConfig(page_size=4, max_running_requests=1), 40, 0, seed=1))
    for index in range(4):
        run.engine.add_request(EngineRequest(str(index), [5, 6], SamplingParams(seed=1, max_tokens=3)))
    ended: list[str] = []
    while run.engine.has_work:
        ended += [output.request_id for output in run.engine.step() if output.finish_reason]
    assert ended == ["0", "1", "2", "3"]


def test_a_preempted_request_waits_before_later_ones() -> None:
    config = EngineConfig(page_size=4, max_running_requests=2, disable_radix_cache=True)
    run = Run(Case(config, 11, 0, seed=1))
    for request_id in ("first", "second", "third"):
        run.engine.add_request(EngineRequest(request_id, [5, 6], SamplingParams(seed=1, max_tokens=30)))
    while not run.engine.scheduler.slots.num_preemptions:
        run.engine.step()
    assert [request.request_id for request in run.engine.scheduler.waiting] == ["second", "third"]


@pytest.mark.parametrize("reuses", [False, True])
def test_what_a_preempted_request_computes_again_will_be_read(reuses: bool) -> None:
    """Steps whose drafter was not called count against a request's drafts. Its cached blocks stay behind."""
    config = EngineConfig(page_size=4, max_running_requests=2, disable_radix_cache=not reuses)
    run = Run(Case(config, 11, 0, seed=1))
    for request_id in ("first", "second"):
        run.engine.add_request(EngineRequest(request_id, [5, 6], SamplingParams(seed=1, max_tokens=30)))
    run.engine.step()
    for request in run.engine.scheduler.running:
        request.acceptance.num_missed_tokens = 99
    while not run.engine.scheduler.slots.num_preemptions:
        run.engine.step()
    [preempted] = run.engine.scheduler.waiting
    while preempted.status is not Status.RUNNING:
        run.engine.step()
    num_behind = preempted.acceptance.num_missed_tokens
    assert 0 < num_behind <= len(preempted.token_ids) if reuses else num_behind == 0


def test_running_requests_get_a_token_in_every_step_of_a_long_prompt() -> None:
    config = EngineConfig(page_size=4, chunked_prefill_size=4, max_prefill_tokens=4)
    run = Run(Case(config, 60, 0, seed=1))
    run.engine.add_request(EngineRequest("short", [5], SamplingParams(seed=1, max_tokens=12)))
    run.engine.step()
    run.engine.add_request(EngineRequest("long", [6] * 30, SamplingParams(seed=1, max_tokens=2)))
    for _ in range(5):
        assert [o.request_id for o in run.engine.step() if o.token_ids] == ["short"]


def test_an_abort_is_reported_by_the_next_step_and_frees_its_slot() -> None:
    run = Run(Case(EngineConfig(page_size=4), 40, 0, seed=1))
    run.engine.add_request(EngineRequest("a", [5, 6], SamplingParams(seed=1, max_tokens=30)))
    run.engine.step()
    run.engine.requests.abort(["a", "unknown"])
    [output] = run.engine.step()
    assert (output.request_id, output.finish_reason) == ("a", FinishReason.ABORT)
    assert not run.engine.has_work
    assert not run.ranks._rows


def test_an_aborted_waiting_request_never_starts() -> None:
    run = Run(Case(EngineConfig(page_size=4, max_running_requests=1), 40, 0, seed=1))
    for request_id in ("running", "waiting"):
        run.engine.add_request(EngineRequest(request_id, [5, 6], SamplingParams(seed=1, max_tokens=3)))
    run.engine.step()
    run.engine.requests.abort(["waiting"])
    outputs = []
    while run.engine.has_work:
        outputs += run.engine.step()
    assert [(o.request_id, o.finish_reason) for o in outputs if o.finish_reason] == [
        ("waiting", FinishReason.ABORT),
        ("running", FinishReason.LENGTH),
    ]


@pytest.mark.parametrize(
    ("prompt", "options", "param"),
    [
        ([], {}, "prompt"),
        ([5] * CONTEXT, {}, "prompt"),
        ([5] * (CONTEXT + 1), {"max_tokens": 1}, "prompt"),
        ([5] * 30, {"max_tokens": 11}, "max_tokens"),
        ([VOCAB_SIZE], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([5], {"logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias"),
        ([5], {"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
    ],
)
def test_invalid_requests_are_refused_and_not_queued(prompt: list[int], options: dict[str, object], param: str) -> None:
    run = Run(Case(EngineConfig(page_size=4), 40, 0, seed=1))
    with pytest.raises(InvalidRequestError) as caught:
        run.engine.add_request(EngineRequest("x", prompt, SamplingParams(seed=1, **options)))
    assert caught.value.param == param
    assert not run.engine.has_work


def test_a_request_larger_than_the_pool_is_refused() -> None:
    run = Run(Case(EngineConfig(page_size=4), num_blocks=6, max_draft_tokens=0, seed=1))
    with pytest.raises(InvalidRequestError, match="maximum context length is 20 tokens"):
        run.engine.add_request(EngineRequest("x", [5] * 19, SamplingParams(seed=1, max_tokens=2)))
    run.engine.add_request(EngineRequest("x", [5] * 19, SamplingParams(seed=1, max_tokens=1)))
    assert run.engine.step()[0].finish_reason is FinishReason.LENGTH


def test_a_duplicate_id_is_refused() -> None:
    run = Run(Case(EngineConfig(page_size=4), 40, 0, seed=1))
    run.engine.add_request(EngineRequest("x", [5], SamplingParams(seed=1)))
    with pytest.raises(InvalidRequestError, match="already in use"):
        run.engine.add_request(EngineRequest("x", [5], SamplingParams(seed=1)))


def test_a_full_queue_refuses_requests_and_serves_those_it_has() -> None:
    config = EngineConfig(page_size=4, max_running_requests=1, max_queued_requests=2)
    run = Run(Case(config, 40, 0, seed=1))
    added = Counter[bool]()
    for index in range(6):
        try:
            run.engine.add_request(EngineRequest(str(index), [5], SamplingParams(seed=1, max_tokens=1)))
            added[True] += 1
        except QueueFullError:
            added[False] += 1
    assert added == {True: 3, False: 3}  # one runs, two wait
    ended = 0
    while run.engine.has_work:
        ended += sum(output.finish_reason is not None for output in run.engine.step())
    assert ended == 3


def test_a_row_with_an_error_ends_and_others_continue() -> None:
    class OneFailingRequest(SimulatedRanks):
        def collect(self) -> StepResult:
            result = super().collect()
            rows = [row._replace(token_ids=[], error="NaN") if row.slot == 0 else row for row in result.rows]
            return result._replace(rows=rows)

    run = Run(Case(EngineConfig(page_size=4), 40, 0, seed=1))
    run.engine.executor = OneFailingRequest(run.engine.config, run.ranks.capacity, text, Random(0))
    for request_id in ("failing", "other"):
        run.engine.add_request(EngineRequest(request_id, [5, 6], SamplingParams(seed=1, max_tokens=4)))
    outputs = []
    while run.engine.has_work:
        outputs += run.engine.step()
    ends = {output.request_id: output for output in outputs if output.finish_reason}
    assert (ends["failing"].finish_reason, ends["failing"].error) == (FinishReason.ERROR, "NaN")
    assert ends["other"].finish_reason is FinishReason.LENGTH
    check_block_accounting(run.engine)


def test_every_request_ends_with_an_error_when_the_ranks_fail() -> None:
    class FailedRanks(SimulatedRanks):
        def submit(self, plan: StepPlan) -> None:  # noqa: ARG002
            raise RuntimeError("rank 0 exited")

    run = Run(Case(EngineConfig(page_size=4), 40, 0, seed=1))
    run.engine.executor = FailedRanks(run.engine.config, run.ranks.capacity, text, Random(0))
    for index in range(3):
        run.engine.add_request(EngineRequest(str(index), [5, 6], SamplingParams(seed=1)))
    with pytest.raises(RuntimeError, match="rank 0 exited"):
        run.engine.step()
    outputs = run.engine.fail_all("rank 0 exited")
    assert {(o.request_id, o.finish_reason, o.error) for o in outputs} == {
        (str(i), FinishReason.ERROR, "rank 0 exited") for i in range(3)
    }
    assert not run.engine.requests.by_id


@pytest.mark.parametrize(
    ("max_step_draft_tokens", "shares"),
    [(None, [4, 4, 4]), (100, [4, 4, 4]), (9, [3, 3, 3]), (8, [3, 3, 2]), (3, [1, 1, 1]), (2, [1, 1, 0])],
)
def test_rows_share_the_maximum_of_drafts_per_step(max_step_draft_tokens: int | None, shares: list[int]) -> None:
    speculative = SpeculativeConfig(algorithm="NGRAM", max_step_draft_tokens=max_step_draft_tokens)
    config = EngineConfig(page_size=4, speculative=speculative)
    ranks = SimulatedRanks(config, capacity(num_blocks=64), text, Random(0))
    engine = Engine(config, ranks, TOKENIZER)
    for seed in range(3):
        engine.add_request(EngineRequest(f"r{seed}", [2, 3, 4 + seed], SamplingParams(seed=seed, max_tokens=30)))
    engine.step()  # the prompts
    plan = engine.scheduler.schedule()
    assert [row.draft_limit.num_tokens for row in plan.rows] == shares
