"""The engine gives each request a drafter and learns from steps; scripted ranks make one of them faster."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import repeat
from typing import Any

import pytest

from specray.config import EngineConfig
from specray.engine import acceptance_alarm
from specray.engine.drafter_selection.bandit import DrafterBandit
from specray.engine.drafter_selection.paired_gain import MIN_REQUESTS
from specray.engine.drafter_selection.selector import LOWER_BOUND, DrafterSelector
from specray.engine.drafter_selection.text_kind import TextKind
from specray.engine.engine import Engine
from specray.engine.engine_request import EngineRequest
from specray.step import DrafterUse, DraftLimit, StepPlan, StepResult
from tests.unit.engine.fake_executor import FakeExecutor, letters_tokenizer, request, run_to_end

TOKENIZER = letters_tokenizer()
FAST, SLOW = (
    {"name": name, "algorithm": "NGRAM", "num_draft_tokens": size} for name, size in (("fast", 6), ("slow", 3))
)


class TimedExecutor(FakeExecutor):
    """Reports drafting times, and records the drafters and shadows of new requests."""

    seconds: dict[str, float]
    shadow: DrafterUse | None = None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.chosen: list[tuple[str, str]] = []
        self.limits: dict[str, int] = {}
        self._names: dict[int, str] = {}

    def accept(self, num_drafts: int, num_accepted: int) -> None:
        """From now on, of each tree."""
        self._accepts = repeat((num_drafts, num_accepted))

    def submit(self, plan: StepPlan) -> None:
        for new in plan.new_requests:
            self.chosen.append((new.drafter, new.shadow))
            self._names[new.slot] = new.drafter
        for row in plan.rows:
            name = self._names[row.slot]
            self.limits[name] = max(self.limits.get(name, 0), row.draft_limit.num_tokens)
        super().submit(plan)

    def collect(self) -> StepResult:
        result = super().collect()
        drafting = {self._names[row.slot] for row in result.rows}
        uses = [DrafterUse(name, seconds) for name, seconds in self.seconds.items() if name in drafting]
        return result._replace(drafters=uses + ([] if self.shadow is None else [self.shadow]))


def make_engine(seconds: dict[str, float] | None = None, **speculative: Any) -> tuple[Engine, TimedExecutor]:
    options = {"drafters": [FAST, SLOW], **speculative}
    config = EngineConfig.model_validate({"page_size": 4, "max_running_requests": 4, "speculative": options})
    executor = TimedExecutor(config, 200, 5, [(5, 2)], 64)
    executor.seconds = seconds or {}
    return Engine(config, executor, TOKENIZER), executor


def run(engine: Engine, requests: Sequence[EngineRequest]) -> list[str]:
    """The drafters that the last outputs name, in the order of the requests."""
    executor = engine.executor
    assert isinstance(executor, FakeExecutor)
    for each in requests:
        executor.max_lengths[each.params.seed or 0] = len(each.prompt_token_ids) + (each.params.max_tokens or 0)
        engine.add_request(each)
    last = {output.request_id: output.usage.drafter for output in run_to_end(engine)}
    return [last[each.request_id] for each in requests]


def test_a_request_gets_the_drafter_that_it_names_or_the_default() -> None:
    engine, executor = make_engine(default_drafter="slow")
    named = [replace(request(seed, [2, 3], 9), drafter=name) for seed, name in enumerate(("fast", "", "dropped"))]
    assert run(engine, named) == ["fast", "slow", "slow"]
    assert executor.chosen == [("fast", ""), ("slow", ""), ("slow", "")]
    counts = engine.stats.labelled
    assert counts["specray_drafter_requests_total"] == {"fast": 1, "slow": 2}
    assert all(counts["specray_drafter_verify_steps_total"].values())
    assert executor.limits == {"fast": 5, "slow": 2}, "trees are planned as large as the drafter's own"


def test_the_engine_learns_which_drafter_is_faster() -> None:
    """Both are accepted alike, but drafting takes one of them a second."""
    engine, _ = make_engine({"slow": 1.0})
    chosen = [name for seed in range(24) for name in run(engine, [request(seed, [2, 3], 30)])]
    assert set(chosen[:2]) == {"fast", "slow"}
    assert chosen[8:].count("fast") >= 14


def test_the_share_of_requests_has_a_shadow() -> None:
    engine, executor = make_engine(default_drafter="fast", shadow={"drafter": "slow", "share": 0.25})
    no_drafts = replace(request(1000, [2, 3], 5), draft_limit=DraftLimit(0, 0))
    run(engine, [no_drafts])
    assert executor.chosen == [("fast", "")], "it has no drafts to compare with"
    for seed in range(200):
        run(engine, [request(seed, [2, 3], 3)])
    shadows = [shadow for _, shadow in executor.chosen]
    assert 25 < shadows.count("slow") < 75
    run(engine, [replace(request(2000, [2, 3], 5), drafter="slow")])
    assert executor.chosen[-1] == ("slow", ""), "nothing is its own shadow"


def test_the_gain_of_a_shadow_begins_anew_with_what_is_compared() -> None:
    engine, executor = make_engine(default_drafter="fast", shadow={"drafter": "slow", "share": 1.0})
    labelled = engine.stats.labelled
    for num_requests, bound in ((MIN_REQUESTS - 1, 0.0), (1, 0.5)):
        trees, gain, squares = 10 * num_requests, 5 * num_requests, 25 * num_requests
        executor.shadow = DrafterUse("slow", 0.0, 0.0, trees, trees, gain, num_requests, trees, gain, squares)
        engine.add_request(request(num_requests, [2, 3], 1))
        engine.step()
        executor.shadow = None
        run_to_end(engine)
        assert labelled[LOWER_BOUND] == {"fast": 0.0, "slow": bound}
    group = engine.config.speculative.model_dump(exclude_defaults=True) | {"default_drafter": "slow", "shadow": {}}
    engine.drafter.replace(type(engine.config.speculative).model_validate(group), 5)
    assert labelled[LOWER_BOUND] == {"fast": 0.0, "slow": 0.0}


def test_a_request_with_a_prediction_has_no_shadow() -> None:
    """Its verified trees are the client's, and its text is easy to predict."""
    engine, executor = make_engine(default_drafter="fast", shadow={"drafter": "slow", "share": 1.0})
    run(engine, [replace(request(1, [2, 3], 5), predicted_token_ids=[4, 5])])
    run(engine, [request(2, [2, 3], 5)])
    assert executor.chosen == [("fast", ""), ("fast", "slow")]


def test_the_bandit_does_not_choose_a_shadow() -> None:
    engine, _ = make_engine(shadow={"drafter": "slow"})
    assert run(engine, [request(seed, [2, 3], 5) for seed in range(4)]) == ["fast"] * 4


def test_an_engine_with_one_drafter_selects_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DrafterSelector, "__init__", lambda *_: pytest.fail("it is made for several drafters only"))
    config = EngineConfig.model_validate({"page_size": 4, "speculative": {"algorithm": "NGRAM"}})
    engine = Engine(config, FakeExecutor(config, 200, 5, [(5, 2)], 64), TOKENIZER)
    assert run(engine, [request(1, [2, 3], 9)]) == [""]


def test_a_collapse_is_that_of_the_drafter_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trees of other drafters, and those of clients' predictions, do not count."""
    monkeypatch.setattr(acceptance_alarm, "NUM_TREES", 4)
    engine, executor = make_engine(default_drafter="fast")
    predicted = [replace(request(seed, [2, 3], 20), predicted_token_ids=[4, 5]) for seed in range(3)]
    executor.accept(5, 0)
    run(engine, predicted)
    assert not any(engine.stats.labelled[acceptance_alarm.COLLAPSED].values())
    run(engine, [replace(request(3, [2, 3], 20), drafter="slow")])
    executor.accept(5, 2)
    run(engine, [request(4, [2, 3], 40)])
    assert engine.stats.labelled[acceptance_alarm.COLLAPSED] == {"slow": 1, "fast": 0}


def test_a_running_request_keeps_its_drafter_when_the_drafters_change() -> None:
    engine, executor = make_engine(default_drafter="slow")
    executor.max_lengths[1] = 32
    engine.add_request(request(1, [2, 3], 30))
    engine.step()
    group = engine.config.speculative.model_dump(exclude_defaults=True) | {"drafters": [FAST], "default_drafter": None}
    engine.drafter.replace(type(engine.config.speculative).model_validate(group), 5)
    assert {output.usage.drafter for output in run_to_end(engine)} == {"slow"}
    assert run(engine, [request(2, [2, 3], 9)]) == ["fast"]
    assert len(executor.chosen) == 2


def test_what_a_dropped_drafters_requests_take_is_that_of_the_one_that_took_over() -> None:
    """Its time is shared by all that it drafts for, and its trees are its own."""
    engine, executor = make_engine(default_drafter="slow")
    executor.max_lengths[1] = 32
    engine.add_request(request(1, [2, 3], 30))
    engine.step()
    engine.step()
    group = engine.config.speculative.model_dump(exclude_defaults=True) | {"drafters": [FAST], "default_drafter": None}
    engine.drafter.replace(type(engine.config.speculative).model_validate(group), 5)
    steps = engine.stats.labelled["specray_drafter_verify_steps_total"]
    before = dict(steps)
    run_to_end(engine)
    assert steps["slow"] == before["slow"]
    assert steps["fast"] > before["fast"]


def test_the_step_of_the_first_token_verifies_nothing() -> None:
    """It computes one token if all but the last one of a prompt were cached, as a step of decoding does."""
    engine, executor = make_engine(default_drafter="fast")
    executor.max_lengths[1] = 31
    engine.add_request(request(1, [2], 30))
    last = run_to_end(engine)[-1]
    steps = engine.stats.labelled["specray_drafter_verify_steps_total"]["fast"]
    assert 0 < steps <= last.usage.num_verify_steps


def test_another_model_under_the_same_name_starts_without_experience(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = make_engine({"slow": 1.0})
    forgotten: list[str] = []
    monkeypatch.setattr(DrafterBandit, "forget", lambda _, name: forgotten.append(name))
    group = engine.config.speculative.model_dump(exclude_defaults=True)
    for drafters, default in (([FAST, SLOW], "fast"), ([FAST, SLOW | {"num_draft_tokens": 9}], None)):
        group |= {"drafters": drafters, "default_drafter": default}
        engine.drafter.replace(type(engine.config.speculative).model_validate(group), 5)
    assert forgotten == ["slow"]


def test_kinds_are_those_of_the_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = make_engine()
    kinds: list[TextKind] = []
    selector = engine.drafter.selector
    assert selector is not None
    monkeypatch.setattr(selector._bandit, "start", lambda _, kind, __: kinds.append(kind))
    run(engine, [request(1, [2, 3, 4, 5], 3), request(2, [2, 3, 4, 5] * 5, 3)])
    assert kinds == [TextKind.CHAT, TextKind.COPY]


def test_steps_of_requests_with_limits_of_their_own_do_not_count() -> None:
    """The shadow's trees do not count there either, and both accept lengths are compared."""
    engine, _ = make_engine(default_drafter="fast")
    counts = engine.stats.labelled["specray_drafter_verify_steps_total"]
    run(engine, [replace(request(1, [2, 3], 9), draft_limit=DraftLimit(0, 0))])
    run(engine, [replace(request(2, [2, 3], 9), predicted_token_ids=[4, 5, 6])])
    run(engine, [replace(request(3, [2, 3], 9), draft_limit=DraftLimit(1, 1))])  # smaller trees than its drafter's
    assert counts["fast"] == 0
    run(engine, [request(4, [2, 3], 9)])
    assert counts["fast"] > 0
