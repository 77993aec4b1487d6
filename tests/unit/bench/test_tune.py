"""What the tuner selects and writes, with scripted speeds."""

import json
from pathlib import Path

import pytest
import yaml

from specray.bench import tune
from specray.bench.measure import Settings
from specray.bench.prompts import Prompt
from specray.bench.tune import SearchResult, best_half, make_candidates, output, prompts_of_round, search, yaml_block
from specray.bench.variants import PLAIN
from specray.config import EngineConfig, SpeculativeConfig
from specray.errors import ConfigError
from tests.unit.bench.scripted import ScriptedSession

METHOD = SpeculativeConfig(algorithm="EAGLE3", draft_model_path="head")
PROMPTS = [Prompt(id=i, turns=(f"question {i}",)) for i in range(20)]
# tokens/s at batch 1 and 8; plain makes 10 and 40
SPEEDS = {"3-1-4": (12, 52), "4-2-8": (16, 50), "5-4-8": (18, 48), "5-4-16": (22, 36), "6-8-16": (15, 32)}


def speed(variant: str, concurrency: int) -> float:
    return dict(SPEEDS, plain=(10, 40))[variant][concurrency > 1]


def outcome_of(session: ScriptedSession, num_rounds: int = 3) -> SearchResult:
    candidates = make_candidates(METHOD, list(SPEEDS))
    return search(session, candidates, PROMPTS, Settings(max_tokens=6), [1, 8], num_rounds, num_prompts=4)


def test_the_slower_half_is_dropped_except_the_best_of_a_batch_size() -> None:
    ratios = {tree: {1: one / 10, 8: many / 40} for tree, (one, many) in SPEEDS.items()}
    assert best_half(ratios) == {"5-4-8", "4-2-8", "5-4-16", "3-1-4"}  # three by mean, one by batch size 8
    assert best_half({"a": {1: 1.0}, "b": {1: 2.0}}) == {"b"}
    assert best_half({"a": {1: 1.0}}) == {"a"}


def test_rounds_narrow_down_to_the_best_mean() -> None:
    session = ScriptedSession(speed)
    outcome = outcome_of(session)
    assert outcome.best.tree == "5-4-8"
    assert outcome.best.score == pytest.approx((1.8 * 1.2) ** 0.5)
    assert outcome.best.ratio(8) == pytest.approx(1.2)
    assert outcome.plain_tokens_per_s == {1: 10, 8: 40}
    assert [names[0] for names, _, _ in session.calls] == [PLAIN] * 6
    assert [len(names) for names, _, _ in session.calls] == [6, 6, 5, 5, 5, 5]  # two by mean, two lead at a size
    assert session.dropped == ["6-8-16"]
    assert [candidate.num_rounds for candidate in outcome.ranking] == [3, 3, 3, 3, 1]


def test_rounds_and_batch_sizes_use_different_prompts_and_empty_caches() -> None:
    session = ScriptedSession(speed)
    outcome_of(session, num_rounds=2)
    asked = [[prompt.id for prompt in prompts] for _, prompts, _ in session.calls]
    assert (asked[0], asked[2]) == ([0, 1, 2, 3], [4, 5, 6, 7])
    assert [settings.concurrency for _, _, settings in session.calls] == [1, 8, 1, 8]
    assert len(asked[1]) == 16  # two for each of 8 requests
    assert len({settings.cache_salt for _, _, settings in session.calls}) == 4


def test_rounds_take_prompts_in_turn() -> None:
    assert [p.id for p in prompts_of_round(PROMPTS, 3, 8)] == [*range(16, 20), *range(4)]
    assert [p.id for p in prompts_of_round(PROMPTS[:3], 2, 8)] == [0, 1, 2]


def test_the_configured_tree_is_a_candidate() -> None:
    configured = METHOD.model_copy(update={"num_steps": 7, "eagle_topk": 3, "num_draft_tokens": 11})
    trees = [candidate.tree for candidate in make_candidates(configured, ["3-1-4"])]
    assert trees == ["3-1-4", "7-3-11"]
    assert len({candidate.tree for candidate in make_candidates(METHOD)}) == len(tune.TREES)
    merged = configured.model_copy(update={"merged_draft_tokens": 16})
    assert [c.tree for c in make_candidates(merged, ["3-1-4", "7-3-11", "3-1-4+8"])] == [
        "3-1-4+16",
        "7-3-11+16",
        "3-1-4+8",
    ]
    assert {c.tree for c in make_candidates(SpeculativeConfig(algorithm="NGRAM"))} == set(tune.NODES)


def test_a_limit_on_the_drafts_of_a_step_is_kept_and_leaves_out_trees_that_it_would_cut() -> None:
    limited = METHOD.model_copy(update={"max_step_draft_tokens": 7})
    candidates = make_candidates(limited)
    assert [candidate.tree for candidate in candidates] == ["2-1-3", "3-1-4", "5-1-6", "3-2-6", "4-2-8", "5-4-8"]
    assert {candidate.speculative.max_step_draft_tokens for candidate in candidates} == {7}
    assert len(make_candidates(limited, ["6-8-16"])) == 1
    assert make_candidates(METHOD.model_copy(update={"max_step_draft_tokens": 1}))[0].tree == "2-1-3"


@pytest.mark.parametrize("tree", ["0-1-2", "3-1-1", "3-1-1000"])
def test_impossible_trees_are_refused_before_anything_is_loaded(tree: str) -> None:
    with pytest.raises(ConfigError, match=tree):
        make_candidates(METHOD, [tree])


def test_plain_decoding_cannot_be_tuned() -> None:
    with pytest.raises(ConfigError, match="no draft tree"):
        make_candidates(SpeculativeConfig())


def test_the_block_is_what_a_configuration_takes() -> None:
    block = yaml_block(outcome_of(ScriptedSession(speed)).best)
    assert block.startswith("# specray tune: 1.80 x plain at batch size 1, 1.20 x plain at batch size 8\n")
    config = EngineConfig.model_validate(yaml.safe_load(block))
    assert config.speculative == METHOD.model_copy(update={"num_steps": 5, "eagle_topk": 4, "num_draft_tokens": 8})
    assert {"max_step_draft_tokens", "budget"} <= yaml.safe_load(block)["speculative"].keys(), "also where null"


def test_the_result_names_a_better_tree_for_one_batch_size() -> None:
    text = output(outcome_of(ScriptedSession(speed)))
    assert text.startswith("Best: 5-4-8, 1.47 times plain decoding.")
    assert "At batch size 1 alone 5-4-16 is faster (2.20)." in text
    assert "At batch size 8 alone 3-1-4 is faster (1.30)." in text


def test_the_result_reports_that_speculation_does_not_pay() -> None:
    outcome = outcome_of(ScriptedSession(lambda variant, _: 10.0 if variant == PLAIN else 8.0))
    assert "No tree is faster than plain decoding here" in output(outcome)
    assert "0.80" in output(outcome)


def test_the_table_has_plain_first_then_the_ranking() -> None:
    lines = tune.to_table(outcome_of(ScriptedSession(speed))).splitlines()
    assert [line.split()[1] for line in lines[2:]] == ["plain", "5-4-8", "4-2-8", "5-4-16", "3-1-4", "6-8-16"]
    assert len({len(line) for line in lines}) == 1


@pytest.mark.parametrize("has_matplotlib", [True, False])
def test_files_have_all_measurements(has_matplotlib: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if has_matplotlib:
        pytest.importorskip("matplotlib")
    else:
        monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    outcome = outcome_of(ScriptedSession(speed))
    folder = tmp_path / "deep" / "tune"
    tune.write_files(folder, outcome, EngineConfig(speculative=METHOD), Settings(), yaml_block(outcome.best))
    document = json.loads((folder / "tune.json").read_text())
    assert document["best"]["num_draft_tokens"] == 8
    assert document["candidates"][0]["ratios"]["8"] == pytest.approx([1.2] * 48)
    assert {"machine", "versions", "settings", "plain_tokens_per_s"} <= set(document)
    assert (folder / "speculative.yaml").read_text().startswith("# specray tune")
    assert (folder / "tune.png").is_file() == has_matplotlib
