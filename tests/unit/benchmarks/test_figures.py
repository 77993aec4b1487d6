"""The rows of the table of figures, with scripted sessions."""

from pathlib import Path

import pytest

from benchmarks import __main__ as figures
from benchmarks import budget, drafters, eagle, quantised, results
from benchmarks.figure import QUICK, Effort, Figure, Section, mt_bench_prompts
from specray.bench.measure import Settings
from specray.config import EMBEDDED_MODEL, SpeculativeConfig
from specray.errors import ConfigError
from specray.outputs import RequestUsage
from tests.unit.bench.scripted import ScriptedSession

SPEEDS = {"plain": 10.0, "eagle3": 20.0, "eagle2": 15.0, "eagle2-frspec": 18.0}


@pytest.fixture(autouse=True)
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {"num_steps": 5, "eagle_topk": 4, "num_draft_tokens": 16}
    options = SpeculativeConfig.model_validate({"algorithm": "EAGLE3", "draft_model_path": "head", **tree})
    monkeypatch.setattr(eagle, "served", lambda _: options)


def script(session: ScriptedSession, monkeypatch: pytest.MonkeyPatch) -> ScriptedSession:
    monkeypatch.setattr(eagle, "_session", lambda *_: session)
    return session


def eagle_session(monkeypatch: pytest.MonkeyPatch) -> ScriptedSession:
    def usage(variant: str, settings: Settings) -> RequestUsage:
        num_accepted = {"eagle3": 20, "eagle2": 14, "eagle2-frspec": 14}.get(variant, 0) - int(2 * settings.temperature)
        return RequestUsage(1, 0, 10 + num_accepted, 10, 99, num_accepted, 0)

    return script(ScriptedSession(lambda variant, _: SPEEDS[variant.split()[0]], usage=usage), monkeypatch)


def measure(wanted: set[str], effort: Effort = QUICK) -> list[Figure]:
    return list(eagle.on_mt_bench(effort, wanted))


def test_row_names_are_unique() -> None:
    assert len(set(figures.ROWS)) == len(figures.ROWS)


def test_the_automatic_budget_is_compared_with_the_best_fixed_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = {"plain": 10.0, "1-1-2": 11.0, "3-2-4": 14.0, "4-3-6": 16.0, "5-4-10": 15.0, "auto": 20.0}
    with_32 = speeds | {"3-2-4": 32.0}
    session = ScriptedSession(lambda variant, concurrency: (with_32 if concurrency == 32 else speeds)[variant])
    monkeypatch.setattr(budget, "_session", lambda: session)
    monkeypatch.setattr(budget, "served", eagle.served)
    rows = list(budget.measure(QUICK, {"budget"}))
    *of_loads, auto_over_32, over_32, auto_at_both, best_of_each = rows
    assert [row.measured for row in of_loads] == pytest.approx([1.25, 2.0] * (len(budget.LOADS) - 1))
    assert all("(4-3-6)" in row.what for row in of_loads[::2])
    assert "(3-2-4)" in auto_over_32.what
    assert (auto_over_32.measured, over_32.measured) == pytest.approx((20 / 32, 2.0))
    best_for_both = 2 / (1 / 16 + 1 / 16), 2 / (1 / 14 + 1 / 32)
    assert max(best_for_both) == best_for_both[1]
    assert auto_at_both.measured == pytest.approx(20 / best_for_both[1])
    assert best_of_each.measured == pytest.approx(2 / (1 / 16 + 1 / 32) / best_for_both[1])


def test_the_bandit_is_compared_with_the_better_drafter_of_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    several = SpeculativeConfig.model_validate(
        {"drafters": [{"name": name, "algorithm": "NGRAM"} for name in ("eagle3", "ngram")]}
    )
    speeds = {"eagle3": 20.0, "ngram": 10.0, "bandit": 16.0}
    speeds |= {"alone": 20.0, "a quarter shadowed": 18.0, "all shadowed": 16.0}
    session = ScriptedSession(lambda variant, _: speeds[variant])
    monkeypatch.setattr(drafters, "_session", lambda: session)
    head = {"algorithm": "NGRAM", "max_step_draft_tokens": 16}
    monkeypatch.setattr(drafters, "served", lambda name: several if "several" in name else SpeculativeConfig(**head))
    rows = list(drafters.measure(QUICK, {"drafters"}))
    of_any = (1 - 0.95**8) / (1 - 0.75**8)  # chances that one of eight requests is shadowed
    assert [row.measured for row in rows] == pytest.approx([0.8] * 4 + [0.05 * 0.2, of_any * 0.1])
    assert [row.is_reached for row in rows] == [None, None, None, False, True, False]
    assert session.defined["a quarter shadowed"].shadow.share == 0.25
    assert session.defined["alone"].shadow.drafter is None


def test_merged_trees_are_compared_with_the_better_source_of_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = {"eagle3-ngram": 22.0, "eagle3": 20.0, "ngram": 10.0}
    session = ScriptedSession(
        lambda variant, _: speeds[variant], usage=lambda variant, _: RequestUsage(1, 0, 30, 10, 99, len(variant), 0)
    )
    monkeypatch.setattr(drafters, "_session", lambda: session)
    monkeypatch.setattr(drafters, "served", eagle.served)
    rows = list(drafters.merged(QUICK, {"merged"}))
    assert len({row.what for row in rows}) == len(rows)
    ratios, lengths = ([row for row in rows if row.what.startswith(start)] for start in ("merged", "accept"))
    assert [row.measured for row in ratios] == pytest.approx([1.1] * len(ratios))
    assert [row.bound for row in ratios[:4]] == [1.0, 1.0, 1.0, 1.05]
    assert [row.measured for row in lengths[:3]] == pytest.approx([2.2, 1.6, 1.5])
    assert {config.budget for config in session.defined.values()} == {"auto"}


def test_wanted_rows_share_one_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    session = eagle_session(monkeypatch)
    rows = measure({"eagle3-accept", "eagle3-speed", "frspec", "eagle2-accept"})
    assert [set(names) for names, _, _ in session.calls] == [{"plain", "eagle3", "eagle2", "eagle2-frspec"}]
    measured = {row.what.split(", 2 built-in")[0]: row.measured for row in rows}
    assert measured == pytest.approx(
        {
            "accept length, EAGLE-3 5-4-16, T = 0": 3.0,
            "accept length, EAGLE-2 5-4-16, T = 0": 2.4,
            "EAGLE-3 5-4-16 / plain, one request, bfloat16": 2.0,
            "EAGLE-2 5-4-16, token map / full head, tokens/s": 1.2,
            "EAGLE-2 5-4-16, token map / full head, accept length": 1.0,
        }
    )


def test_a_row_measures_only_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    session = eagle_session(monkeypatch)
    (row,) = measure({"eagle3-accept-t1"})
    assert [(names, settings.temperature) for names, _, settings in session.calls] == [(["eagle3"], 0), (["eagle3"], 1)]
    assert row.measured == pytest.approx(2.8 / 3.0)
    assert row.is_reached


def test_concurrent_requests_are_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    session = eagle_session(monkeypatch)
    rows = measure({"eagle3-concurrent"})
    (names, prompts, settings) = session.calls[0]
    assert names == ["plain", "eagle3", "eagle3 with budget: auto"]
    assert (settings.concurrency, {prompt.category for prompt in prompts}) == (8, {"all"})
    assert session.defined[names[2]].budget == "auto"
    assert [row.measured for row in rows] == [2.0, 2.0]


def test_accept_lengths_can_have_another_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    session = eagle_session(monkeypatch)
    rows = measure({"eagle3-accept", "eagle3-speed"}, QUICK._replace(accept_tree="7-8-32"))
    assert set(session.calls[0][0]) == {"plain", "eagle3", "eagle3 7-8-32"}
    assert session.defined["eagle3 7-8-32"].num_draft_tokens == 32
    assert rows[0].what.startswith("accept length, EAGLE-3 7-8-32")
    assert rows[1].what.startswith("EAGLE-3 5-4-16 / plain")


def test_exactness_compares_every_pass_with_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(variant: str, settings: Settings) -> list[int]:
        wrong = variant == "eagle3 5-1-6" and settings.temperature == 1 and settings.concurrency == 1
        return [9] if wrong else [int(settings.temperature), 2, 3]

    session = script(ScriptedSession(answer=answer), monkeypatch)
    third, second = eagle.exactness(QUICK, {"exact-eagle3", "exact-eagle2"})
    assert third.measured == pytest.approx(1 - 1 / 12)  # 2 variants x 2 temperatures x 3 passes
    assert (second.measured, third.is_reached, second.is_reached) == (1.0, False, True)
    assert "24 answers" in third.what
    assert sum("plain" in names for names, _, _ in session.calls) == 2
    salts = [(settings.concurrency, settings.cache_salt) for _, _, settings in session.calls]
    assert salts[2][1] == salts[3][1]  # the second pass finds the first one's prompts in the cache
    assert len({salt for _, salt in salts}) == 4


def test_a_row_names_its_prompts(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text('{"id": 1, "category": "x", "turns": ["a"]}\n{"id": 2, "category": "x", "turns": ["b"]}\n')
    assert mt_bench_prompts(QUICK)[1] == "2 built-in chat prompts, not MT-bench"
    assert mt_bench_prompts(QUICK._replace(mt_bench=path, num_mt_bench=None))[1] == "MT-bench, 2 first turns"


def test_figures_measured_before_a_failure_are_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fails(*_: object):  # type: ignore[no-untyped-def]
        yield Figure("first", 1.0, 2.0)
        raise ConfigError("no head")

    def works(*_: object):  # type: ignore[no-untyped-def]
        yield Figure("second", 1.0, 2.0, at_most=True)

    monkeypatch.setattr(figures, "SECTIONS", (Section(("a",), fails), Section(("b",), works)))
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    assert figures.main(["--machine", "A CPU (new), 2 cores"]) == 1
    seen = capsys.readouterr()
    assert "error: a: no head" in seen.err
    assert "| first  | no" in seen.out
    assert "| second | yes" in seen.out
    [path] = tmp_path.glob("a-cpu-new-2-cores/*.json")
    [file] = results.load()["A CPU (new), 2 cores"]
    assert [(row.row, row.is_reached) for row in file.results] == [("first", False), ("second", True)]
    assert path.stem == file.day.isoformat()


def test_an_interruption_keeps_the_figures_before_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(*_: object):  # type: ignore[no-untyped-def]
        yield Figure("first", 1.0, 2.0)
        raise KeyboardInterrupt

    monkeypatch.setattr(figures, "SECTIONS", (Section(("a",), interrupted),))
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    with pytest.raises(KeyboardInterrupt):
        figures.main(["--machine", "A CPU"])
    [file] = results.load()["A CPU"]
    assert [row.row for row in file.results] == ["first"]


def test_only_known_rows_can_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        figures.main(["--only", "eagle3-accept,speed"])
    assert "there is no row speed; choose from" in capsys.readouterr().err


def test_int8_is_measured_in_rounds_beside_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = {
        None: ScriptedSession(lambda *_: 10.0),
        "int8": ScriptedSession(lambda variant, _: {"plain": 16.0, "eagle3": 28.0}[variant]),
    }
    monkeypatch.setattr(figures, "_session", lambda _, quantization=None: sessions[quantization])
    effort = QUICK._replace(num_mt_bench=6, rounds=3)
    plain, eagle3 = figures.int8(effort, {"int8"})
    assert (plain.measured, eagle3.measured) == (pytest.approx(1.6), pytest.approx(1.75))
    asked = [[prompt.id for prompt in prompts] for _, prompts, _ in sessions[None].calls]
    assert [len(part) for part in asked] == [2, 2, 2]
    assert asked == [[prompt.id for prompt in prompts] for _, prompts, _ in sessions["int8"].calls]


def test_quantised_checkpoints_are_measured_beside_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """All answer each prompt in turn, and drafts are compared with plain decoding of the same checkpoint."""
    speeds, sessions = {"plain": 10.0, "eagle3": 20.0, "ngram": 30.0}, []

    def session(model: str) -> ScriptedSession:
        factor = 1.0 if model == EMBEDDED_MODEL else 2.0
        sessions.append(ScriptedSession(lambda variant, _: factor * speeds[variant]))
        return sessions[-1]

    monkeypatch.setattr(quantised, "_session", session)
    monkeypatch.setattr(quantised, "_write", lambda _, folder: folder)
    rows = list(quantised.measure(QUICK, {"quantised"}))
    assert [row.measured for row in rows] == pytest.approx([2.0, 2.0, 3.0] * len(quantised.FORMATS))
    assert all(row.is_reached for row in rows)
    assert len({repr([call[1:] for call in each.calls]) for each in sessions}) == 1


def test_both_ngram_variants_are_measured_on_every_kind_of_text(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = {"plain": 10.0, "ngram": 20.0, "ngram-suffix": 30.0}
    session = ScriptedSession(lambda variant, _: speeds[variant])
    monkeypatch.setattr(figures, "_session", lambda _: session)
    rows = list(figures.in_process(QUICK, {"ngram"}))
    assert [row.measured for row in rows] == [pytest.approx(2.0)] * 3 + [pytest.approx(3.0)] * 3
    assert [row.bound for row in rows] == [1.8, 1.3, 0.97] * 2
    assert session.defined["ngram-suffix"].ngram_match_type == "SUFFIX"
