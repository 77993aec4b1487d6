"""`make chaos`: injects every fault into a running cluster under load, and checks how every request ends.

Prints a line per fault: how requests ended, the time to recover, and the longest gaps in the clients' streams; and a
line per request that ended in a way that its fault does not allow. With --out the same goes to a file per fault, with
machine and commit, to which each run adds itself. Exit status 1 if there was such a request, if an engine did not
release a finished request, or if the service did not recover.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from cluster.config import AppConfig
from tests.chaos.faults import FAULTS, Fault, FaultContext
from tests.chaos.figures import FaultReport, write_figures
from tests.chaos.ledger import Ending, Ledger, quantile
from tests.chaos.load import Load
from tests.chaos.questions import Question, make_questions
from tests.chaos.service import ENGINE_CPUS, Service, Setting, started
from tests.support.heads import write_random_head
from tests.support.stories import write_stories
from tests.support.toy import write_toy

NUM_ENGINES = 2
NUM_STREAMS = 8
NUM_STREAMS_QUICK = 2  # one for each engine: with more, the load takes the time in which lost processes start again
TRAFFIC_S = 0.5  # of traffic before and after a fault
FAILOVER_S = 90.0  # a request of death ends both engines, which start again on two cores
IDLE_S = 10.0  # in which engines must be idle after the last request
MODELS: dict[str, tuple[Callable[[Path], Path], int]] = {"toy": (write_toy, 150), "stories260K": (write_stories, 300)}


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    problems = []
    num_streams = NUM_STREAMS_QUICK if options.quick else NUM_STREAMS
    for model in options.models or list(MODELS)[-1 if options.quick else 0 :]:
        print(f"\n{model}: {NUM_ENGINES} engines on two nodes, {num_streams} streams, colocated drafters", flush=True)
        print(_line(("fault", "times", *Ending, "recov p50", "p99 s", "gap p99 s", "")), flush=True)
        for row in run(model, options, num_streams):
            print(_line(_cells(row)), flush=True)
            if options.out is not None:
                write_figures(options.out, model, row)
            problems += [f"{model}, {row.name}: {problem}" for problem in row.problems]
    for problem in problems:
        print(f"NOT ACCOUNTED FOR: {problem}", file=sys.stderr)
    return 1 if problems else 0


def run(model: str, options: argparse.Namespace, num_streams: int) -> Any:
    """Yields a FaultReport per fault."""
    write, max_tokens = MODELS[model]
    with tempfile.TemporaryDirectory(prefix="specray-chaos-") as folder:
        target = Path(folder, "target")
        target.mkdir()
        write(target)
        head = write_random_head(Path(folder, "head"), target, version=3)
        questions = make_questions(target, max_tokens)
        for setting in Setting:
            names = [name for name in options.faults if FAULTS[name].setting is setting]
            todo = {name: count for name in names if (count := _count(FAULTS[name], options))}
            if not todo:
                continue
            with started(_config(target, head), setting, Path(folder)) as service:
                for name, count in todo.items():
                    yield asyncio.run(_inject(name, FAULTS[name], count, service, questions, num_streams))


def _count(fault: Fault, options: argparse.Namespace) -> int:
    return int(options.count or (fault.few if options.quick else fault.many))


async def _inject(
    name: str, fault: Fault, count: int, service: Service, questions: Sequence[Question], num_streams: int
) -> FaultReport:
    ledger, recoveries, problems, num_shown = Ledger(), [], [], 0
    allowed = (Ending.COMPLETE, *fault.allowed_endings)
    context = FaultContext(service, questions, ledger, random.Random(name))
    async with Load(service.url, questions, num_streams, ledger):
        for _ in tqdm(range(count), desc=name, leave=False):
            await asyncio.sleep(TRAFFIC_S)
            start = time.monotonic()
            ledger.begin_injection()
            try:
                await fault.inject(context)
            except TimeoutError as error:
                problems.append(str(error))
                break
            recoveries.append(time.monotonic() - start)
            for request in ledger.unexpected(allowed)[num_shown:]:
                tqdm.write(f"  {request}")
                num_shown += 1
        await asyncio.sleep(TRAFFIC_S)
    if not await _becomes_idle(service):
        problems.append(
            f"{IDLE_S:g} s after the last request an engine still has running or waiting requests or used KV blocks"
        )
    if (gap := max(ledger.gaps, default=0.0)) > fault.max_gap_s:
        problems.append(f"a stream was silent for {gap:.1f} s; {fault.max_gap_s:g} s are allowed")
    problems += [f"{number} requests ended as {ending}" for ending, number in ledger.beyond(allowed).items()]
    return FaultReport(name, count, ledger, recoveries, problems, ledger.unexpected(allowed))


async def _becomes_idle(service: Service) -> bool:
    deadline = time.monotonic() + IDLE_S
    while not await service.is_idle():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.2)
    return True


def _config(target: Path, head: Path) -> AppConfig:
    return AppConfig.model_validate(
        {
            "model": str(target),
            "dtype": "float32",
            "device": "cpu",
            "num_threads": 1,
            "max_total_tokens": 8192,
            "max_running_requests": 8,
            "max_queued_requests": 16,
            "speculative": {"algorithm": "EAGLE3", "draft_model_path": str(head)},
            "draft": {"cpus": 0.1},
            "server": {
                "num_replicas": NUM_ENGINES,
                "num_ingress_replicas": 1,
                "router_cpus": 0.1,
                "rank_cpus": ENGINE_CPUS - 0.2,
                "step_timeout_s": 10.0,
                "failover_s": FAILOVER_S,
                "served_model_name": "chaos",
            },
        }
    )


def _cells(row: FaultReport) -> list[str]:
    back50, back99 = (quantile(row.recoveries, share) for share in (0.5, 0.99))
    gap = quantile(row.ledger.gaps, 0.99)
    figures = ["-" if value is None else f"{value:.1f}" for value in (back50, back99, gap)]
    endings = [str(row.ledger.endings[ending]) for ending in Ending]
    return [row.name, str(row.count), *endings, *figures, "FAIL" if row.problems else "ok"]


def _line(cells: Sequence[str]) -> str:
    first, *rest = cells
    return f"{first:20}" + " ".join(f"{cell:>9}" for cell in rest)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m tests.chaos", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="some faults, once or twice each, for CI")
    parser.add_argument("--count", type=int, help="number of times to inject each fault")
    parser.add_argument(
        "--faults",
        nargs="+",
        choices=FAULTS,
        default=list(FAULTS),
        metavar="NAME",
        help=f"only these of: {', '.join(FAULTS)}",
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="also write the figures to files in FOLDER")
    parser.add_argument("--models", nargs="+", choices=MODELS, help="(default: both; --quick: the last)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
