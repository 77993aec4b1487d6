"""What a part of `python -m benchmarks.gpu` is given, and what it finds: a table, and those figures that are kept."""

import signal
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

T = TypeVar("T")


class OutOfTime(SystemExit):
    """The time of a part is over."""


class TimeLimit:
    """SIGTERM ends the measuring of this process's part, but not the printing and saving of what it has measured."""

    def __init__(self) -> None:
        self.is_over = False
        self._is_measuring = True  # or is loading what it measures

    def watch(self) -> None:
        signal.signal(signal.SIGTERM, self._end)

    def in_time(self, found: Iterable[T]) -> Iterator[T]:
        """What a part finds until its time is over."""
        with suppress(OutOfTime):
            self._is_measuring = True
            for each in found:
                self._is_measuring = False
                yield each
                if self.is_over:
                    return
                self._is_measuring = True
            self._is_measuring = False

    def _end(self, number: int, _: object) -> None:
        signal.signal(number, signal.SIG_IGN)
        self.is_over = True
        if self._is_measuring:
            raise OutOfTime(128 + number)


class Checkpoints(NamedTuple):
    """Published or local models that are measured on real prompts; a head that is None is left out."""

    target: str
    eagle2: str | None
    eagle3: str | None
    prompts: Path | None  # JSON Lines, MT-bench's; None: the built-in ones


class Order(NamedTuple):
    """What to measure, and where."""

    part: str
    device: torch.device
    is_tiny: bool  # a small model and few steps, to test the program
    folder: Path  # for files that several parts read
    time_limit: TimeLimit
    checkpoints: Checkpoints | None = None


class Cell(NamedTuple):
    """A figure of the documentation, see `benchmarks.results.Result`."""

    table: str
    row: str
    column: str
    value: float
    form: str = "{:.2f}"
    goal: float | None = None
    at_most: bool = False  # the goal is an upper bound

    @property
    def is_reached(self) -> bool:
        """Whether the goal, if there is one, is reached."""
        return self.goal is None or (self.value <= self.goal if self.at_most else self.value >= self.goal)


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
