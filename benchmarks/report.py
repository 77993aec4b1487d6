"""`python -m benchmarks.report`: writes the measured tables of the README and docs/benchmarks.md from the results.

A table stands between `<!-- results: NAME -->` and `<!-- end of results -->`. A test fails if a page differs from what
this program would write.
"""

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import NamedTuple

from benchmarks.figure import FIGURES, MEASURED
from benchmarks.results import RESULTS, ROOT, Result, ResultFile, load
from specray.tables import format_table

PAGES = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md")
BLOCK = re.compile(r"(<!-- results: ([a-z-]+) -->\n).*?(<!-- end of results -->)", re.DOTALL)
PEERS_SPEED = "Tokens a second, beside peers"
# The first follows from tokens a second and a step; the others are for those who change kernels.
NOT_SHOWN = {
    "Milliseconds a step of one request",
    "Kernels",
    "Attention of one layer, bfloat16, in microseconds",
    "Time of a step / the rank's time in it",
    "Checks",
    "Replay: predicted / measured tokens a second, whole trees",  # the largest error is among the figures
}
README_MACHINE = "AMD EPYC (Zen 3), 2 cores"


class Shown(NamedTuple):
    """A row of the README's table."""

    title: str
    table: str
    row: str  # a pattern that one row matches
    column: str = MEASURED


README_ROWS = (
    Shown("plain decoding, one request, tokens/s", FIGURES, r"plain decoding, output tokens/s"),
    Shown(
        "EAGLE-3 / plain decoding, one request, in process", FIGURES, r"EAGLE-3 6-3-8 / plain, one request.* MT-bench.*"
    ),
    Shown(
        "EAGLE-3 / plain decoding, one request, over HTTP", FIGURES, r"EAGLE-3, colocated / plain, 1 at a .* MT-bench.*"
    ),
    Shown(
        "EAGLE-3 / plain decoding, 8 requests at once, over HTTP",
        FIGURES,
        r"EAGLE-3, colocated / plain, 8 at a .* MT-bench.*",
    ),
    Shown("tokens a step, EAGLE-3", FIGURES, r"accept length, EAGLE-3 6-3-8, T = 0, MT-bench.*"),
    Shown("`make demo`: EAGLE-3 / plain decoding over HTTP", FIGURES, r"make demo, EAGLE-3 / plain"),
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.report", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 if a page would change")
    options = parser.parse_args(argv)
    changed = [path for path in PAGES if filled(path) != path.read_text(encoding="utf-8")]
    for path in changed:
        if not options.check:
            path.write_text(filled(path), encoding="utf-8")
        print(f"{path.relative_to(ROOT)} {'differs from' if options.check else 'written from'} {RESULTS.name}")
    return int(options.check and bool(changed))


def filled(page: Path) -> str:
    """The page with its tables as the results have them."""
    files = load()

    def fill(block: re.Match[str]) -> str:
        return f"{block[1]}\n{BLOCKS[block[2]](files)}\n\n{block[3]}"

    return BLOCK.sub(fill, page.read_text(encoding="utf-8"))


def readme_table(files: Mapping[str, Sequence[ResultFile]]) -> str:
    """A few figures of one machine."""
    latest = _latest(files[README_MACHINE])
    rows, used = [], []
    for shown in README_ROWS:
        found = [
            result
            for result in latest
            if (result.table, result.column) == (shown.table, shown.column) and re.fullmatch(shown.row, result.row)
        ]
        if len(found) != 1:
            raise SystemExit(f"error: {len(found)} results of {README_MACHINE} match {shown.row!r}; one must")
        used += found
        rows.append([shown.title, found[0].form.format(found[0].value)])
    return f"{format_table(('figure', 'measured'), rows, 1)}\n\n{_caption(files[README_MACHINE], used)}"


def machine_sections(files: Mapping[str, Sequence[ResultFile]]) -> str:
    """The machines, and a table for each kind of figures, with all machines that have such figures."""
    latest = {machine: _latest(files[machine]) for machine in sorted(files)}
    tables: dict[str, dict[str, list[Result]]] = {}
    for machine, results in latest.items():
        for result in results:
            tables.setdefault(result.table, {}).setdefault(machine, []).append(result)
    captions = [f"- {_caption(files[machine], results)}" for machine, results in latest.items()]
    sections = ["## Machines and figures", "\n".join(captions)]
    for title, by_machine in tables.items():
        if title == PEERS_SPEED:  # absolute speeds do not compare; the ratios have a table with all machines
            last = max(by_machine, key=lambda machine: _last_day(files[machine], title))
            by_machine = {last: by_machine[last]}
        if title not in NOT_SHOWN:
            sections.append(_table_of_machines(title, by_machine))
    return "\n\n".join(sections)


def _last_day(files: Sequence[ResultFile], title: str) -> date:
    return max(file.day for file in files if any(result.table == title for result in file.results))


def _table_of_machines(title: str, machines: Mapping[str, Sequence[Result]]) -> str:
    """A table with the machines as columns or in front of the rows, whichever has fewer rows."""
    if len(machines) == 1:
        [(machine, results)] = machines.items()
        return _table(f"{title}: {_short(machine)}", results)
    several = len({result.column for results in machines.values() for result in results}) > 1
    flat, long = [], []
    for machine, results in machines.items():
        for result in results:
            row = f"{result.row}, {result.column}" if several else result.row
            flat.append(result.model_copy(update={"row": row, "column": _short(machine)}))
            long.append(result.model_copy(update={"row": f"{_short(machine)}: {result.row}"}))
    return _table(title, min(flat, long, key=lambda results: len({result.row for result in results})))


def _short(machine: str) -> str:
    """`Zen 4` of `AMD EPYC (Zen 4), 2 cores`, `H100` of `NVIDIA H100`."""
    found = re.search(r"\((.*?)\)", machine)
    return found[1] if found else machine.rpartition(" ")[2]


BLOCKS: dict[str, Callable[[Mapping[str, Sequence[ResultFile]]], str]] = {
    "readme": readme_table,
    "machines": machine_sections,
}


def _latest(files: Sequence[ResultFile]) -> list[Result]:
    """The last result of each cell, in the order in which they were first measured."""
    return list({result.key: result for file in files for result in file.results}.values())


def _table(title: str, results: Sequence[Result]) -> str:
    columns = list(dict.fromkeys(result.column for result in results))
    cells = {(result.row, result.column): result for result in results}
    rows = [
        [row, *(_cell(cells.get((row, column))) for column in columns)]
        for row in dict.fromkeys(result.row for result in results)
    ]
    return f"### {title}\n\n{format_table(('', *columns), rows, 1)}"


def _cell(result: Result | None) -> str:
    """A figure, in bold where it misses its goal."""
    if result is None:
        return ""
    text = result.form.format(result.value)
    return text if result.is_reached else f"**{text}**"


def _caption(files: Sequence[ResultFile], results: Sequence[Result]) -> str:
    """When, and with which versions, the machine measured these results."""
    shown = {id(result) for result in results}
    used = [file for file in files if any(id(result) in shown for result in file.results)]
    days = [f"{file.day.day} {file.day:%B %Y}" for file in used]
    when = days[0] if len(days) == 1 else f"{', '.join(days[:-1])} and {days[-1]}"
    versions = ", ".join(f"{name} {version}" for name, version in used[-1].versions.items())
    return f"{used[-1].machine}; {when}; {versions}."


if __name__ == "__main__":
    sys.exit(main())
