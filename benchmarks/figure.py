"""A row of the table of figures, how much to measure for it, and its prompts."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.results import Result
from specray.bench.prompts import Prompt, by_category, load_prompts

CONCURRENCY = 8
FIGURES, MEASURED = "Figures", "measured"  # the table of these rows, and its column


class Figure(NamedTuple):
    what: str
    measured: float
    bound: float | None  # None: for information
    form: str = "{:.2f}"
    at_most: bool = False
    samples: tuple[float, ...] = ()
    cell: tuple[str, str, str] | None = None  # table, row and column, if not those of all figures

    @classmethod
    def of(
        cls, what: str, samples: Sequence[float], bound: float | None, cell: tuple[str, str, str] | None = None
    ) -> "Figure":
        """The median of the samples."""
        return cls(what, median(samples), bound, samples=tuple(samples), cell=cell)

    @property
    def is_reached(self) -> bool | None:
        if self.bound is None:
            return None
        return self.measured <= self.bound if self.at_most else self.measured >= self.bound

    def result(self, commit: str) -> Result:
        table, row, column = self.cell or (FIGURES, self.what, MEASURED)
        return Result(
            table=table,
            row=row,
            column=column,
            value=self.measured,
            form=self.form,
            goal=self.bound,
            at_most=self.at_most,
            samples=self.samples,
            commit=commit,
        )

    def row(self) -> list[str]:
        if self.bound is None:
            return [self.what, "-", self.form.format(self.measured), "-"]
        sign = "<=" if self.at_most else ">="
        bound = f"{sign} {self.form.format(self.bound)}"
        return [self.what, "yes" if self.is_reached else "no", self.form.format(self.measured), bound]


class Effort(NamedTuple):
    """How much to measure. QUICK only tests that everything runs."""

    num_exact: int
    num_chat: int
    num_copy: int
    num_code: int
    max_tokens: int
    rounds: int
    num_mt_bench: int | None = None  # None: all
    mt_bench: Path | None = None  # None: built-in chat prompts, which rows then name
    accept_tree: str | None = None  # for accept lengths; None: the served configurations' trees


FULL = Effort(num_exact=32, num_chat=12, num_copy=16, num_code=8, max_tokens=128, rounds=3)
QUICK = Effort(num_exact=2, num_chat=1, num_copy=1, num_code=1, max_tokens=16, rounds=1, num_mt_bench=2)


class Section(NamedTuple):
    """Rows that are measured together. `measure(effort, wanted)` yields those with names in `wanted`."""

    names: tuple[str, ...]
    measure: Callable[[Effort, set[str]], Iterator[Figure]]


def prompts_of(category: str, count: int) -> list[Prompt]:
    """Built-in prompts of a category."""
    return by_category(load_prompts())[category][:count]


def mt_bench_prompts(effort: Effort) -> tuple[list[Prompt], str]:
    """First turns to measure EAGLE with, and their description for a row."""
    if effort.mt_bench is None:
        prompts = prompts_of("chat", effort.num_mt_bench or effort.num_chat)
        return prompts, f"{len(prompts)} built-in chat prompts, not MT-bench"
    prompts = load_prompts(effort.mt_bench, effort.num_mt_bench)
    return prompts, f"MT-bench, {len(prompts)} first turns"
