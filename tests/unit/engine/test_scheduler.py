"""Random calls of the engine, on an executor that checks the invariants of every plan."""

from collections import Counter, defaultdict
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specray.config import EngineConfig
from specray.engine.engine import Engine
from specray.engine.engine_request import PROBATION_STEPS, EngineRequest
from specray.engine.executor import Capacity
from specray.engine.request import Request
from specray.engine.scheduler import Scheduler
from specray.errors import InvalidRequestError, QueueFullError
from specray.outputs import FinishReason, RequestOutput
from specray.sampling_params import SamplingParams
from specray.step import DraftLimit, RequestResult, StepPlan, StepResult, StepTimes
from tests.unit.engine.fake_executor import (
    EOS,
    ROW_ERROR,
    VOCAB_SIZE,
    FakeExecutor,
    check_block_accounting,
    continuation,
    letters_tokenizer,
    request,
    run_to_end,
)

CONTEXT = 48
TOKENIZER = letters_tokenizer()


@st.composite
def configs(draw: st.DrawFn) -> EngineConfig:
    chunk = draw(st.integers(1, 12))
    return EngineConfig(
        page_size=draw(st.sampled_from([1, 3, 4, 16])),
        max_running_requests=draw(st.integers(1, 5)),
        max_queued_requests=draw(st.integers(0, 6)),
        chunked_prefill_size=chunk,
        max_prefill_tokens=draw(st.integers(chunk, 20)),
        disable_radix_cache=draw(st.booleans()),
    )


accept_counts = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=8)
prompts = st.lists(st.integers(2, 3), min_size=1, max_size=CONTEXT - 1)


class EngineMachine(RuleBasedStateMachine):
    """Compares each request's output with the expected text."""

    max_plans = 1
    suspects_each = 0  # every so many requests, one has ended an engine before

    @initialize(
        config=configs(),
        accepts=accept_counts,
        drafts=st.integers(0, 6),
        spare=st.integers(0, 12),
        bigrams=st.booleans(),
        stored_states=st.sampled_from([None, None, 0, 1, 3, 20]),
    )
    def start(
        self,
        config: EngineConfig,
        accepts: list[tuple[int, int]],
        drafts: int,
        spare: int,
        bigrams: bool,
        stored_states: int | None,
    ) -> None:
        num_blocks = (
            -(-CONTEXT // config.page_size) + 1 + spare
        )  # the longest request just fits, so preemption is likely
        options = (num_blocks, drafts, accepts, CONTEXT, bigrams, self.max_plans, stored_states)
        self.executor = FakeExecutor(config, *options)
        self.engine = Engine(config, self.executor, TOKENIZER)
        self.engine.scheduler.states._interval = 2 * config.page_size  # many states in these short texts
        self.added: list[EngineRequest] = []
        self.alive: set[int] = set()
        self.aborted: set[int] = set()
        self.outputs: dict[str, list[RequestOutput]] = {}

    @rule(prompt=prompts, max_tokens=st.one_of(st.none(), st.integers(1, CONTEXT)), salt=st.sampled_from(["", "b"]))
    def add(self, prompt: list[int], max_tokens: int | None, salt: str) -> None:
        max_tokens = max_tokens and min(max_tokens, CONTEXT - len(prompt))
        seed, config = len(self.added), self.engine.config
        self.executor.max_lengths[seed] = len(prompt) + (max_tokens or CONTEXT - len(prompt))
        new = request(seed, prompt, max_tokens, salt)
        if self.suspects_each:
            new = replace(new, num_deaths=int(seed % self.suspects_each == 0))
        is_full = len(self.alive) >= config.max_running_requests + config.max_queued_requests
        try:
            self.engine.add_request(new)
        except QueueFullError:
            assert len(self.engine.scheduler.waiting) >= config.max_queued_requests
            return
        assert not is_full
        self.added.append(new)
        self.alive.add(seed)
        self.outputs[new.request_id] = []

    @precondition(lambda self: self.added)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        seed = data.draw(st.integers(0, len(self.added) - 1))
        self.engine.requests.abort([f"r{seed}"])
        if seed in self.alive:
            self.aborted.add(seed)
        self.alive.discard(seed)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def break_a_row(self, data: st.DataObject) -> None:
        self.executor.broken.add(data.draw(st.sampled_from(sorted(self.alive))))

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.step_once()

    def step_once(self) -> None:
        alive, had_work, num_steps = sorted(self.alive), self.engine.has_work, self.executor.counts.steps
        outputs = self.engine.step()
        ran = self.executor.counts.steps > num_steps
        assert had_work or not (outputs or ran)
        assert ran or not alive or self.max_plans > 1, "requests are waiting but none is running"
        if ran and not self.suspects_each:  # first come, first served; a request that has ended may still have its slot
            running = [seed for seed in self.executor.seeds if seed in alive]
            assert running == alive[: len(running)]
            assert running == self.executor.seeds or self.max_plans > 1
        assert len({output.request_id for output in outputs}) == len(outputs)
        for output in outputs:
            self.take(output)
        check_block_accounting(self.engine)
        planned = {each for step in self.engine.scheduler._planned for each, _ in step}
        assert len(planned) == 1 or not any(each.is_suspect for each in planned), "a suspect does not run alone"

    def take(self, output: RequestOutput) -> None:
        outputs = self.outputs[output.request_id]
        assert not outputs or outputs[-1].finish_reason is None, "a request ended twice"
        outputs.append(output)
        if output.finish_reason is not None:
            self.alive.discard(int(output.request_id[1:]))

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        if hasattr(self, "engine"):
            check_block_accounting(self.engine)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(3000):
            if not self.engine.has_work:
                break
            self.step_once()
        assert not self.engine.has_work
        for seed, spec in enumerate(self.added):
            self.check_end(seed, spec)
        scheduler = self.engine.scheduler
        assert not self.executor.rows
        assert not scheduler.running
        assert scheduler.cache.num_idle == scheduler.cache.num_cached
        assert scheduler.pool.num_free + scheduler.cache.num_cached == scheduler.pool.num_usable

    def check_end(self, seed: int, spec: EngineRequest) -> None:
        outputs = self.outputs[spec.request_id]
        tokens = [token for output in outputs for token in output.token_ids]
        expected = continuation(spec.prompt_token_ids, self.executor.max_lengths[seed] - len(spec.prompt_token_ids))
        reason = outputs[-1].finish_reason
        assert tokens == expected[: len(tokens)]
        assert outputs[-1].usage.num_completion_tokens == len(tokens)
        if reason is FinishReason.ABORT:
            assert seed in self.aborted
        elif reason is FinishReason.ERROR:
            assert seed in self.executor.broken
            assert outputs[-1].error == ROW_ERROR
        else:
            assert seed not in self.aborted
            assert tokens == expected
            stopped = expected[-1] == EOS
            assert reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
            assert outputs[-1].stop_reason == (EOS if stopped else None)


class OverlappedMachine(EngineMachine):
    """The same with a plan that is made before the result of the last one is known."""

    max_plans = 2


class SuspectMachine(OverlappedMachine):
    """The same with requests that must show that they end no engine."""

    suspects_each = 3


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestOverlappedEngine = OverlappedMachine.TestCase
TestOverlappedEngine.settings = TestEngine.settings
TestEngineWithSuspects = SuspectMachine.TestCase
TestEngineWithSuspects.settings = TestEngine.settings


def test_a_suspect_pauses_the_others_for_as_long_as_it_is_one() -> None:
    config = EngineConfig(page_size=4)
    executor = FakeExecutor(config, 80, max_plans=2)
    engine = Engine(config, executor, TOKENIZER)
    sizes: list[list[str]] = []
    submit = executor.submit

    def noted(plan: StepPlan) -> None:
        submit(plan)
        sizes.append([f"r{executor.rows[row.slot].seed}" for row in plan.rows])

    executor.submit = noted  # type: ignore[method-assign]
    for seed in range(4):
        executor.max_lengths[seed] = 40
        new = replace(request(seed, [2, 3, 2, 3, seed + 4], 30), num_deaths=int(seed in (2, 3)))
        new = replace(new, params=replace(new.params, ignore_eos=True))
        engine.add_request(new)
    outputs: dict[str, list[int]] = defaultdict(list)
    for output in run_to_end(engine):
        outputs[output.request_id] += output.token_ids
    assert all(len(tokens) == 30 for tokens in outputs.values())
    rows = [row for row in sizes if row]
    num_alone = rows.index(["r3"])
    assert rows[:num_alone] == [["r2"]] * num_alone
    assert PROBATION_STEPS < num_alone <= PROBATION_STEPS + 3
    assert max(map(len, rows)) == 4, "afterwards they run together"
    assert engine.stats.values["specray_suspect_requests_total"] == 2


@given(accepts=accept_counts, page_size=st.sampled_from([1, 4]), reuse=st.booleans(), max_plans=st.sampled_from([1, 2]))
@settings(max_examples=60, deadline=None)
def test_preemption_does_not_change_outputs(
    accepts: list[tuple[int, int]], page_size: int, reuse: bool, max_plans: int
) -> None:
    config = EngineConfig(page_size=page_size, disable_radix_cache=not reuse, max_running_requests=4)
    num_blocks = -(-CONTEXT // page_size) + 1
    executor = FakeExecutor(config, num_blocks, 4, accepts, CONTEXT, max_plans=max_plans)
    engine = Engine(config, executor, TOKENIZER)
    prompts = [[2, 3, seed + 4] * 3 for seed in range(4)]
    for seed, prompt in enumerate(prompts):
        executor.max_lengths[seed] = len(prompt) + 30
        engine.add_request(EngineRequest(f"r{seed}", prompt, SamplingParams(seed=seed, max_tokens=30, ignore_eos=True)))
    outputs: dict[str, list[int]] = {f"r{seed}": [] for seed in range(4)}
    for output in run_to_end(engine):
        outputs[output.request_id] += output.token_ids
    assert engine.scheduler.slots.num_preemptions > 0
    for seed, prompt in enumerate(prompts):
        tokens = prompt + outputs[f"r{seed}"]
        assert len(tokens) == len(prompt) + 30
        alone = FakeExecutor(config, num_blocks, 0, context_length=CONTEXT)
        alone.max_lengths[seed] = len(tokens)
        engine = Engine(config, alone, TOKENIZER)
        engine.add_request(EngineRequest("alone", prompt, SamplingParams(seed=seed, max_tokens=30, ignore_eos=True)))
        assert [t for output in run_to_end(engine) for t in output.token_ids] == outputs[f"r{seed}"]


def test_lookahead_blocks_of_a_new_row_are_sent_once() -> None:
    """A request that starts and drafts in one step gets its lookahead blocks in ScheduledRequest, not in NewRequest."""
    config = EngineConfig(page_size=1)
    executor = FakeExecutor(config, 40, 4, context_length=CONTEXT)
    executor.max_lengths[0] = 20
    engine = Engine(config, executor, TOKENIZER)
    engine.add_request(request(0, [2, 3], max_tokens=18))
    plan = engine.scheduler.schedule()
    assert len(plan.new_requests[0].block_ids) == 2
    assert len(plan.rows[0].new_block_ids) == plan.rows[0].draft_limit.num_tokens == 4
    executor.submit(plan)


def test_drafts_of_an_older_request_do_not_use_a_block_that_a_later_one_needs() -> None:
    config = EngineConfig(page_size=4, disable_radix_cache=True)
    scheduler = Scheduler(config, Capacity(6, 4, CONTEXT, VOCAB_SIZE, [EOS]))
    old, young, short = (_waiting(seed, length) for seed, length in enumerate((5, 8, 1)))
    for each in (old, young, short):
        scheduler.add(each)
    plan = scheduler.schedule()  # 2 + 2 + 1 blocks: none is left for drafts
    results = [RequestResult(row.slot, [2], 0, None, None) for row in plan.rows]
    for emitted in scheduler.emitted(plan, StepResult(1, results, StepTimes(0, 0, 0, 0))):
        scheduler.commit(emitted, num_kept=1)
    scheduler.finish(short)
    plan = scheduler.schedule()  # one block: `old` could draft into it, `young` has a ninth token
    assert [row.slot for row in plan.rows] == [old.slot, young.slot]
    assert [len(each.block_ids) for each in (old, young)] == [2, 3]
    assert scheduler.slots.num_preemptions == 0


def _waiting(seed: int, num_tokens: int) -> Request:
    return Request(request(seed, [2] * num_tokens), CONTEXT, 0.0, [2] * num_tokens, num_tokens)


def test_no_more_drafts_than_the_request_can_emit() -> None:
    """With three tokens left, two drafts are useful; the third is the bonus token."""
    config = EngineConfig(page_size=16)
    executor = FakeExecutor(config, max_draft_tokens=6)
    executor.max_lengths[0] = 5
    engine = Engine(config, executor, TOKENIZER)
    engine.add_request(request(0, [2, 3], max_tokens=3))
    assert engine.scheduler.schedule().rows[0].draft_limit.num_tokens == 2


def test_drafts_in_flight_leave_the_next_step_its_own() -> None:
    """They may all fail, so they do not count as tokens, unless the context has no positions for both."""
    scheduler = Scheduler(EngineConfig(page_size=16), Capacity(40, 6, CONTEXT, VOCAB_SIZE, [EOS], max_plans=2))

    def drafts(prompt: int, max_tokens: int) -> list[int]:
        tokens = [2] * prompt
        scheduler.add(Request(request(0, tokens, max_tokens), prompt + max_tokens, 0.0, tokens, prompt))
        return [scheduler.schedule().rows[-1].draft_limit.num_tokens for _ in range(2)]

    assert drafts(2, 9) == [6, 6]  # 2 + 1 + 6 tokens at least, and 11 at most
    assert drafts(CONTEXT - 9, 9) == [6, 2]  # the context ends 2 tokens after those that the first step may emit


def test_the_drafter_reads_only_prompts_of_requests_without_drafts() -> None:
    """Their other tokens would cost time for drafts that nobody asks for; beside others, they are read with them."""
    config = EngineConfig(page_size=4)
    scheduler = Scheduler(config, Capacity(40, 4, CONTEXT, VOCAB_SIZE, [EOS]))
    undrafted = _waiting(0, 3)
    undrafted.spec = replace(undrafted.spec, draft_limit=DraftLimit(0, 0))
    scheduler.add(undrafted)
    assert _step(scheduler).runs_drafter
    assert not _step(scheduler).runs_drafter
    scheduler.add(_waiting(1, 3))
    assert _step(scheduler).runs_drafter
    assert _step(scheduler).runs_drafter


@pytest.mark.parametrize(
    ("reason", "fields", "drafts", "budget"),
    [
        ("limit", {}, 0, None),
        ("budget", {}, 4, 0),
        ("absent", {"drafter_is_absent": True}, 4, None),
        ("absent", {"draft_faults": ["gone"]}, 4, None),
        ("late", {"draft_faults": ["late"]}, 4, None),
        ("none_found", {}, 4, None),
    ],
)
def test_a_step_without_drafts_counts_by_its_reason(
    reason: str, fields: dict[str, Any], drafts: int, budget: int | None
) -> None:
    options = {} if budget is None else {"speculative": {"algorithm": "NGRAM", "max_step_draft_tokens": 1}}
    config = EngineConfig.model_validate({"page_size": 4, **options})
    scheduler = Scheduler(config, Capacity(40, 4, CONTEXT, VOCAB_SIZE, [EOS]))
    requests = [_waiting(seed, 3) for seed in range(2 if budget == 0 else 1)]
    for each in requests:
        each.spec = replace(each.spec, draft_limit=DraftLimit(drafts, 8))
        scheduler.add(each)
    for _ in range(5):
        plan = scheduler.schedule()
        results = [RequestResult(row.slot, [2], 0, None, None) for row in plan.rows]
        result = StepResult(plan.step_id, results, StepTimes(0, 0, 0, 0))._replace(**fields)
        for emitted in scheduler.emitted(plan, result):
            scheduler.commit(emitted, num_kept=1)
    counts = sum((each.undrafted for each in requests), Counter[str]())
    assert counts[reason] == 4
    assert requests[-1].usage().undrafted.counts() == requests[-1].undrafted


def _step(scheduler: Scheduler, num_drafts: int = 0) -> StepPlan:
    """Plan a step and commit a token for each of its requests, whose drafts are rejected."""
    plan = scheduler.schedule()
    results = [RequestResult(row.slot, [2], num_drafts, None, None) for row in plan.rows]
    for emitted in scheduler.emitted(plan, StepResult(plan.step_id, results, StepTimes(0, 0, 0, 0))):
        scheduler.commit(emitted, num_kept=1)
    return plan


def test_a_drafter_that_takes_over_is_new_to_requests_of_which_its_predecessor_has_read_a_part() -> None:
    scheduler = Scheduler(EngineConfig(page_size=4), Capacity(40, 4, CONTEXT, VOCAB_SIZE, [EOS]))
    old, cached, new = (_waiting(seed, length) for seed, length in enumerate((9, 9, 3)))
    scheduler.add(old)
    _step(scheduler)
    scheduler.add(cached)
    scheduler.add(new)
    plan = scheduler.schedule()  # the drafter connects during this step, and reads it
    scheduler.slots.drafter_took_over()
    assert [each.acceptance.is_new_to_drafter for each in (old, cached, new)] == [True, True, False]
    assert (cached.num_cached_tokens, len(plan.new_requests)) == (8, 2)


def test_a_drafter_empties_the_cache_when_it_has_drafted_and_not_when_it_connects() -> None:
    """One that ends at its first order, each time that it is restarted, costs no request its cached prefix."""
    scheduler = Scheduler(EngineConfig(page_size=4), Capacity(40, 4, CONTEXT, VOCAB_SIZE, [EOS]))
    old, short, cached = (_waiting(seed, length) for seed, length in enumerate((9, 1, 9)))
    short.spec = replace(short.spec, cache_salt="other")
    scheduler.add(old)
    scheduler.add(short)
    _step(scheduler)
    scheduler.slots.drafter_took_over()
    _step(scheduler)
    scheduler.add(cached)
    _step(scheduler)
    assert (cached.num_cached_tokens, cached.acceptance.is_new_to_drafter) == (8, True)
    _step(scheduler, num_drafts=1)
    assert scheduler.cache.match("", old.token_ids) == []
    for _ in range(4):
        _step(scheduler)
    assert scheduler.cache.match("other", short.token_ids) == [], "the drafter has not read the start of its block"
    after = _waiting(3, 9)
    scheduler.add(after)
    _step(scheduler)
    assert (after.num_cached_tokens, after.acceptance.is_new_to_drafter) == (0, False)
    assert len(scheduler.cache.match("", after.token_ids)) == 2


def test_the_next_step_frees_the_slot_of_an_aborted_request() -> None:
    executor = FakeExecutor(EngineConfig(page_size=4))
    engine = Engine(EngineConfig(page_size=4), executor, TOKENIZER)
    for seed in range(2):
        executor.max_lengths[seed] = 40
        engine.add_request(
            EngineRequest(f"r{seed}", [2, seed + 2], SamplingParams(seed=seed, max_tokens=30, ignore_eos=True))
        )
    engine.step()
    engine.requests.abort(["r0"])
    engine.step()
    assert executor.seeds == [1]


@pytest.mark.parametrize(
    ("prompt", "options", "expected"),
    [
        ([], {}, ["no tokens", "at least one"]),
        ([2] * CONTEXT, {}, [str(CONTEXT), "shorten the prompt"]),
        ([2] * 40, {"max_tokens": 9}, ["40", "9 as max_tokens", str(CONTEXT), "lower max_tokens"]),
        ([2, VOCAB_SIZE], {}, [str(VOCAB_SIZE), f"has {VOCAB_SIZE} tokens"]),
        ([2, -7], {}, ["-7"]),
        ([2], {"logit_bias": {99: 1.0}}, ["logit_bias", "99"]),
        ([2], {"stop_token_ids": [77]}, ["stop_token_ids", "77"]),
    ],
)
def test_the_error_for_an_invalid_request_has_the_value_and_the_fix(
    prompt: list[int], options: dict[str, object], expected: list[str]
) -> None:
    engine = Engine(EngineConfig(), FakeExecutor(EngineConfig()), TOKENIZER)
    with pytest.raises(InvalidRequestError) as caught:
        engine.add_request(EngineRequest("x", prompt, SamplingParams(seed=1, **options)))
    assert all(part in str(caught.value) for part in expected), str(caught.value)
    assert not engine.has_work


def test_a_duplicate_id_is_refused_without_effect_on_the_first_request() -> None:
    executor = FakeExecutor(EngineConfig())
    executor.max_lengths[0] = 5
    engine = Engine(EngineConfig(), executor, TOKENIZER)
    engine.add_request(request(0, [2, 3], max_tokens=3))
    with pytest.raises(InvalidRequestError, match="'r0' is already in use; choose another"):
        engine.add_request(request(0, [5], max_tokens=1))
    assert [t for o in run_to_end(engine) for t in o.token_ids] == continuation([2, 3], 3)
    engine.add_request(request(0, [2, 3], max_tokens=3))  # its id can be used again after its end


def test_the_error_for_a_full_queue_has_the_limit_and_suggests_a_retry() -> None:
    config = EngineConfig(max_running_requests=2, max_queued_requests=1)
    engine = Engine(config, FakeExecutor(config), TOKENIZER)
    for seed in range(3):
        engine.add_request(request(seed, [2], max_tokens=1))
    with pytest.raises(QueueFullError, match="max_queued_requests is 1; send the request again"):
        engine.add_request(request(3, [2], max_tokens=1))
    ended = Counter(output.request_id for output in run_to_end(engine) if output.finish_reason)
    assert ended == {"r0": 1, "r1": 1, "r2": 1}


def test_fail_all_ends_running_waiting_and_aborted_requests_once() -> None:
    config = EngineConfig(max_running_requests=1)
    executor = FakeExecutor(config)
    engine = Engine(config, executor, TOKENIZER)
    for seed in range(3):
        executor.max_lengths[seed] = 40
        engine.add_request(EngineRequest(f"r{seed}", [2], SamplingParams(seed=seed, max_tokens=30, ignore_eos=True)))
    engine.step()
    engine.requests.abort(["r1"])
    ends = {output.request_id: output for output in engine.fail_all("rank 0 exited")}
    assert {name: end.finish_reason for name, end in ends.items()} == {
        "r0": FinishReason.ERROR,
        "r1": FinishReason.ABORT,
        "r2": FinishReason.ERROR,
    }
    assert ends["r0"].error == ends["r2"].error == "rank 0 exited"
    assert engine.fail_all("again") == []
    check_block_accounting(engine)


def test_an_abort_is_reported_even_if_the_next_step_fails() -> None:
    class FailingExecutor(FakeExecutor):
        def collect(self) -> object:  # type: ignore[override]
            raise RuntimeError("rank 0 exited")

    executor = FailingExecutor(EngineConfig())
    engine = Engine(EngineConfig(), executor, TOKENIZER)
    for seed in range(2):
        executor.max_lengths[seed] = 40
        engine.add_request(request(seed, [2], max_tokens=30))
    engine.requests.abort(["r0"])
    with pytest.raises(RuntimeError, match="rank 0 exited"):
        engine.step()
    ends = [(output.request_id, output.finish_reason) for output in engine.fail_all("rank 0 exited")]
    assert sorted(ends) == [("r0", FinishReason.ABORT), ("r1", FinishReason.ERROR)]
