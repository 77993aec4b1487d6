"""`make fuzz`: mutated requests against the whole server, hostile grammars, and mutated model files.

Prints what came back. Exit status 1 if anything did that should not. A finding names its request or mutant; the same
--seed makes the same ones.
"""

import argparse
import asyncio
import json
import logging
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from specray.cli.arguments import positive
from tests.fuzz.files import fuzz_files
from tests.fuzz.grammars import fuzz_grammars
from tests.fuzz.http import fuzz
from tests.support.toy import write_toy

SHOWN = 20  # problems that are printed


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    logging.getLogger("specray").setLevel(logging.ERROR)
    problems, figures = [], {}
    if options.only in (None, "http"):
        with tempfile.TemporaryDirectory(prefix="specray-fuzz-") as folder:
            http = asyncio.run(fuzz(write_toy(Path(folder)), options.requests, options.seed))
        problems += http.problems
        figures["http"] = _figures(http.statuses, http.problems, http.seconds, longest_stall_s=http.longest_stall_s)
    if options.only in (None, "grammars"):
        with tempfile.TemporaryDirectory(prefix="specray-fuzz-") as folder:
            grammars = asyncio.run(fuzz_grammars(Path(folder), options.grammars, options.seed))
        problems += grammars.problems
        times = {"slowest_s": grammars.slowest_s, "longest_stall_s": grammars.longest_stall_s}
        figures["grammars"] = _figures(grammars.outcomes, grammars.problems, grammars.seconds, **times)
    if options.only in (None, "files"):
        files = fuzz_files(options.files, options.seed)
        problems += files.problems
        cost = {"slowest_refusal_cpu_s": files.slowest_refusal_s, "memory_growth_mib": files.memory_growth / 2**20}
        figures["files"] = _figures(files.outcomes, files.problems, files.seconds, **cost)
    for name, figure in figures.items():
        print(f"{name}: {json.dumps(figure)}")
    for problem in problems[:SHOWN]:
        print(f"PROBLEM: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _figures(
    counts: Mapping[int, int] | Mapping[str, int], problems: list[str], seconds: float, **more: float
) -> dict[str, object]:
    by_name = {str(name): count for name, count in sorted(counts.items())}  # type: ignore[type-var]
    total = sum(by_name.values())
    rounded = {name: round(value, 3) for name, value in more.items()}
    return {"total": total, "by outcome": by_name, "problems": len(problems), "seconds": round(seconds, 1), **rounded}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m tests.fuzz", description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--requests", type=positive, default=100_000, metavar="N", help="HTTP requests (default: %(default)s)")
    add("--files", type=positive, default=10_000, metavar="N", help="mutants of model files (default: %(default)s)")
    add("--grammars", type=positive, default=300, metavar="N", help="hostile grammars (default: %(default)s)")
    add("--seed", type=int, default=0, help="of all mutations (default: %(default)s)")
    add("--only", choices=("http", "grammars", "files"), help="one of the parts")
    return parser


if __name__ == "__main__":
    sys.exit(main())
