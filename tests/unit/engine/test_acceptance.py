"""The alarm for low acceptance: when it starts and ends, and that it logs once."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specray.config import SpeculativeConfig
from specray.engine.acceptance_alarm import (
    COLLAPSED,
    COLLAPSED_BELOW,
    NUM_TREES,
    RECOVERED_FROM,
    AcceptanceAlarm,
    is_collapsed,
)
from specray.engine.engine_request import EngineRequest
from specray.engine.recorder import StatsRecorder
from specray.engine.request import Emitted, Request
from specray.engine.stats import EngineStats
from specray.grammar import GrammarSpec, make_grammar
from specray.sampling_params import SamplingParams
from specray.step import DraftLimit, RequestResult
from tests.support.drafters import ScriptedDrafter, draw_wrong
from tests.support.engine import make_llm
from tests.support.json_toy import write_json_toy

GREEDY = SamplingParams(temperature=0.0, seed=0)


class AlarmHarness:
    """An alarm with the statistics that it writes."""

    def __init__(self) -> None:
        self.stats = EngineStats("EAGLE3")
        self.alarm = AcceptanceAlarm(self.stats)

    def verify(self, num_trees: int, num_accepted: int, drafter: str = "EAGLE3", *, has_grammar: bool = False) -> bool:
        """Count `num_trees` trees with `num_accepted` accepted tokens each. Returns whether the alarm is on."""
        for _ in range(num_trees):
            self.alarm.count_tree(drafter, num_accepted, has_grammar)
        return bool(self.stats.labelled[COLLAPSED].get(drafter))


@pytest.mark.parametrize(
    ("accept_length", "was_collapsed", "expected"),
    [
        (1.0, False, True),
        (COLLAPSED_BELOW, False, False),
        (COLLAPSED_BELOW, True, True),
        (RECOVERED_FROM, True, False),
        (3.0, False, False),
    ],
)
def test_a_short_accept_length_is_a_collapse(accept_length: float, was_collapsed: bool, expected: bool) -> None:
    assert is_collapsed(accept_length, was_collapsed) is expected


def test_the_alarm_starts_and_ends_after_enough_trees(caplog: pytest.LogCaptureFixture) -> None:
    harness = AlarmHarness()
    with caplog.at_level(logging.WARNING):
        assert not harness.verify(NUM_TREES, 2)
        assert not harness.verify(NUM_TREES - 1, 0)
        assert harness.verify(3 * NUM_TREES, 0)
        assert not harness.verify(NUM_TREES + 1, 2)
    assert ["hardly ever accepted" in message for message in caplog.messages] == [True, False]


def test_each_drafter_has_its_own_alarm() -> None:
    harness = AlarmHarness()
    for _ in range(NUM_TREES):
        harness.verify(1, 0, "bad")
        harness.verify(1, 1, "good")
    assert harness.stats.labelled[COLLAPSED] == {"bad": 1, "good": 0}


def test_requests_with_grammars_count_where_all_have_one() -> None:
    alone, beside = AlarmHarness(), AlarmHarness()
    assert not alone.verify(NUM_TREES - 1, 0, has_grammar=True)
    assert alone.verify(1, 0, has_grammar=True)
    for _ in range(2):
        beside.verify(NUM_TREES - 1, 0, has_grammar=True)
        beside.verify(1, 2)
    assert beside.stats.labelled[COLLAPSED] == {}
    beside.verify(NUM_TREES - 2, 2)
    assert beside.stats.labelled[COLLAPSED] == {"EAGLE3": 0}


def test_reset_starts_a_new_window() -> None:
    harness = AlarmHarness()
    assert harness.verify(2 * NUM_TREES - 1, 0)
    harness.alarm.reset()
    assert not harness.verify(NUM_TREES - 1, 0)
    assert harness.verify(1, 0)


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        ({}, True),
        ({"params": replace(GREEDY, grammar=GrammarSpec("regex", "a+"))}, True),
        ({"draft_limit": DraftLimit(1, 1)}, False),
        ({"predicted_token_ids": [4]}, False),
        ({"is_probe": True}, False),
    ],
)
def test_trees_count_that_are_the_drafters_alone(options: dict[str, Any], counts: bool) -> None:
    """So an application whose requests all have a grammar has an alarm."""
    stats = EngineStats("EAGLE3")
    recorder = StatsRecorder(stats, SpeculativeConfig(), lacks_cpu_kernels=False)
    request = Request(EngineRequest("r", [1, 2], **({"params": GREEDY} | options)), 9, 0.0, [1, 2], 2)
    request.last_token = 0.0
    step = Emitted(request, 1, RequestResult(0, [5], 4, None, None), "")
    for _ in range(NUM_TREES):
        recorder.emitted(step, 1, 4, "EAGLE3")
    assert stats.labelled[COLLAPSED] == ({"EAGLE3": 1} if counts else {})


def test_tokens_that_a_grammar_forces_are_not_the_drafters(tmp_path: Path) -> None:
    """JSON's punctuation is accepted without a drafter, whose drafts are all wrong here."""
    kinds = {f"key{place}": {"type": "string", "maxLength": 6} for place in range(3)}
    grammar = make_grammar("json_schema", {"type": "object", "properties": kinds, "required": list(kinds)})
    params = replace(greedy(60), grammar=grammar)
    toy, prompts = write_json_toy(tmp_path), [[5, 6, seed] for seed in range(32)]
    with make_llm(toy) as llm:
        done = llm.generate(prompts, params)
    texts = [[*generation.prompt_token_ids, *generation.choices[0].token_ids] for generation in done]
    with make_llm(toy, ScriptedDrafter(draw_wrong, texts)) as llm:
        llm.generate(prompts, params)
        assert list(llm.engine.stats.labelled[COLLAPSED].values()) == [1]
        counts = llm.engine.stats.values
        assert counts["specray_spec_decode_num_accepted_tokens_total"] > counts["specray_verify_steps_total"] / 4


def test_a_new_drafter_resets_the_alarm(toy: Path) -> None:
    prompts = [[5, 6, seed] for seed in range(10)]
    with make_llm(toy) as llm:
        done = llm.generate(prompts, greedy(40))
    assert not any(llm.engine.stats.labelled[COLLAPSED].values()), "plain decoding is no collapse"
    texts = [[*generation.prompt_token_ids, *generation.choices[0].token_ids] for generation in done]
    with make_llm(toy, ScriptedDrafter(draw_wrong, texts)) as llm:
        llm.generate(prompts, greedy(40))
        assert list(llm.engine.stats.labelled[COLLAPSED].values()) == [1]
        llm.engine.drafter.replace(SpeculativeConfig(algorithm="NGRAM"), max_draft_tokens=3)
        assert not any(llm.engine.stats.labelled[COLLAPSED].values())
        assert llm.engine.scheduler.drafts.max_draft_tokens == 3
