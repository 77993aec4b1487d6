"""Figures as data, and the pages that are made of them."""

from collections.abc import Callable
from datetime import date
from pathlib import Path

import pytest

from benchmarks import report, results
from benchmarks.results import Result, ResultFile


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    return tmp_path


def result(row: str, value: float, **fields: object) -> Result:
    return Result.model_validate({"table": "T", "row": row, "column": "c", "value": value, "commit": "a", **fields})


def test_a_figure_that_is_measured_again_replaces_the_earlier_one(folder: Path) -> None:
    results.save("A B", [result("one", 1.0), result("two", 2.0, samples=(1.0, 2.0, 3.0))])
    path = results.save("A B", [result("one", 3.0)], {"vllm": "1"})
    assert [path] == list(folder.glob("*/*.json"))
    [file] = results.load()["A B"]
    assert {each.row: each.value for each in file.results} == {"two": 2.0, "one": 3.0}
    assert file.results[0].samples == (1.0, 2.0, 3.0)
    assert (file.day, file.versions["vllm"]) == (date.today(), "1")


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("fields", [{"goal": 2.0}, {"goal": 0.5, "at_most": True}])
def test_a_figure_that_misses_its_goal_is_bold(fields: dict[str, object]) -> None:
    results.save("A", [result("one", 1.0, **fields), result("two", 4.0, column="d")])
    text = report.machine_sections(results.load())
    assert "**1.00**" in text
    assert "**4.00**" not in text


def test_a_table_has_the_newest_figures_and_their_days(folder: Path) -> None:
    for day, value in ((date(2026, 1, 2), 1.0), (date(2026, 1, 5), 2.0)):
        file = ResultFile(machine="A", day=day, facts={}, versions={"torch": "2"}, results=(result("one", value),))
        (folder / f"{day}.json").parent.mkdir(exist_ok=True)
        path = folder / "a" / f"{day}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(file.model_dump_json())
    text = report.machine_sections(results.load())
    assert "| one |" in text
    assert "2.00" in text
    assert "1.00" not in text
    assert "A; 5 January 2026; torch 2." in text


@pytest.mark.parametrize("page", report.PAGES, ids=lambda page: page.name)
def test_the_pages_are_what_the_results_say(page: Path) -> None:
    assert report.BLOCK.search(page.read_text(encoding="utf-8")) is not None
    assert report.filled(page) == page.read_text(encoding="utf-8"), "run python -m benchmarks.report"


def test_a_page_that_differs_from_the_results_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- results: machines -->\nby hand\n<!-- end of results -->\nb\n")
    monkeypatch.setattr(report, "PAGES", (page,))
    monkeypatch.setattr(report, "ROOT", tmp_path)
    main: Callable[[list[str]], int] = report.main
    assert main(["--check"]) == 1
    assert "page.md differs from results" in capsys.readouterr().out
    assert main([]) == 0
    assert "by hand" not in page.read_text()
    assert page.read_text().startswith("a\n")
    assert page.read_text().endswith("\nb\n")
    assert main(["--check"]) == 0
