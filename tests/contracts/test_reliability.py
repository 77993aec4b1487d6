"""The page of promises: every row is there, and names tests that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/reliability.md").read_text(encoding="utf-8")
ROWS = [f"S{n}" for n in range(1, 17)] + [f"Q{n}" for n in range(1, 5)] + [f"C{n}" for n in range(1, 6)] + ["R1", "F11"]
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)` `(\w+)`", PAGE)))


@pytest.mark.parametrize("row", ROWS)
def test_a_row_has_a_promise_and_a_test_or_what_is_missing(row: str) -> None:
    [line] = re.findall(rf"^\| {row} \|(.*)\|$", PAGE, re.MULTILINE)
    promise, tests, figure, missing = (cell.strip() for cell in line.split("|"))
    assert promise
    assert (tests and figure) or missing


def test_the_page_names_tests() -> None:
    assert len(NAMED) > len(ROWS)


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_named_tests_exist(file: str, name: str) -> None:
    source = (ROOT / file).read_text(encoding="utf-8")
    assert re.search(rf"^(async )?def {name}\(", source, re.MULTILINE), f"{file} has no {name}"
