"""What a part of `python -m benchmarks.gpu` has found: a table to print, and the figures of it that are kept."""

from typing import NamedTuple


class Cell(NamedTuple):
    """A figure of the documentation, see `benchmarks.results.Result`."""

    table: str
    row: str
    column: str
    value: float
    form: str = "{:.2f}"
    goal: float | None = None
    at_most: bool = False  # the goal is an upper bound


class Report(NamedTuple):
    headers: list[str]
    rows: list[list[str]]
    num_text_columns: int
    note: str  # printed below the table
    cells: list[Cell]
    num_failed: int = 0  # checks


def requests(count: int) -> str:
    """The column of a batch size."""
    return f"{count} request{'' if count == 1 else 's'}"
