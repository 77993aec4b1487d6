"""`make bench-peers`: installs the peers, measures all engines in turn, prints tables and draws the chart."""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import date
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from benchmarks.figure import prompts_of
from benchmarks.peers import environments
from benchmarks.peers.engines import BY_NAME, ENGINES, Engine, command
from benchmarks.peers.measure import Sample, Workload, measure, num_turns, workloads
from benchmarks.peers.report import Outcome, results, save_chart, to_json, to_markdown
from benchmarks.peers.worker_process import WorkerError, WorkerProcess
from benchmarks.results import ROOT, commit_here, save
from specray.bench.machine import describe_machine
from specray.bench.prompts import load_prompts
from specray.cli.arguments import positive
from specray.config import EMBEDDED_MODEL
from specray.cores import num_cores
from specray.models.files import embedded_gguf, resolve_model
from specray.models.tokenizer import load_tokenizer, render_chat

BUILD = ROOT / "build" / "peers"
CHART = ROOT / "docs" / "images" / "peers.svg"
MODEL_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
NUM_PREFILLS = 4


class Effort(NamedTuple):
    num_prompts: int
    max_tokens: int
    num_rounds: int


FULL = Effort(num_prompts=8, max_tokens=128, num_rounds=3)
QUICK = Effort(num_prompts=2, max_tokens=32, num_rounds=1)


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    effort = _effort(options)
    plan = _workloads(options.prompts, effort)
    failures: dict[str, str] = {}
    with ExitStack() as stack:
        workers = _start(options.engines, shlex.split(options.torch_args), failures, stack)
        samples = _measure(workers, plan, effort.num_rounds, failures)
        versions = _versions(workers)
    outcome = Outcome(samples, failures, versions, _machine(), date.today(), _settings(effort, options.prompts))
    print(to_markdown(outcome))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(to_json(outcome), indent=2) + "\n", encoding="utf-8")
    if not options.quick and outcome.samples:
        save(options.machine, results(outcome, commit_here()), versions)
    save_chart(options.image or (BUILD / CHART.name if options.quick else CHART), outcome)
    return int(bool(failures))


def _start(
    names: Sequence[str], torch_args: Sequence[str], failures: dict[str, str], stack: ExitStack
) -> dict[str, WorkerProcess]:
    """Workers of the engines, one after the other; those that cannot run go to `failures` with the reason."""
    model, gguf, threads = _model_folder(), embedded_gguf(), num_cores()
    workers = {}
    for name in names:
        engine = BY_NAME[name]
        try:
            python = environments.python_of(engine.peer, BUILD, torch_args, _say)
            _say(f"loading {name}")
            line = command(engine, python, model, gguf, threads)
            log = BUILD / "logs" / f"{name}.log"
            workers[name] = stack.enter_context(WorkerProcess(line, ROOT, log, _environment(threads)))
        except environments.InstallError as error:
            _fail(failures, name, f"could not be installed: {error}")
        except WorkerError as error:
            _fail(failures, name, str(error))
    return workers


def _measure(
    workers: Mapping[str, WorkerProcess], plan: Sequence[Workload], num_rounds: int, failures: dict[str, str]
) -> list[Sample]:
    sizes = {name: BY_NAME[name].max_batch for name in workers}
    with tqdm(total=num_turns(sizes, plan, num_rounds), desc="measuring", unit="turn") as bar:

        def advance(name: str, workload: str) -> None:
            bar.set_postfix_str(f"{workload} {name}", refresh=False)
            bar.update()

        return measure(workers, sizes, plan, num_rounds, lambda name, reason: _fail(failures, name, reason), advance)


def _fail(failures: dict[str, str], name: str, reason: str) -> None:
    failures[name] = reason
    _say(f"{name}: {reason}")


def _workloads(prompts: Path | None, effort: Effort) -> list[Workload]:
    tokenizer = load_tokenizer(resolve_model(EMBEDDED_MODEL, None, "auto", progress=True))
    chat = load_prompts(prompts, effort.num_prompts) if prompts else prompts_of("chat", effort.num_prompts)
    ids, copying = (
        [render_chat(tokenizer, [{"role": "user", "content": prompt.turns[0]}]) for prompt in kind]
        for kind in (chat, prompts_of("copy", effort.num_prompts))
    )
    return workloads(ids, copying, effort.max_tokens, min(NUM_PREFILLS, effort.num_prompts))


def _model_folder() -> Path:
    """The model's folder without our own copy of the GGUF blocks, which other engines would load as weights."""
    source, view = resolve_model(EMBEDDED_MODEL, None, "auto", progress=True), BUILD / "model"
    view.mkdir(parents=True, exist_ok=True)
    for name in MODEL_FILES:
        (view / name).unlink(missing_ok=True)
        (view / name).symlink_to(source / name)
    return view


def _environment(threads: int) -> dict[str, str]:
    """Environment variables of all workers: the same number of threads, and no network."""
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}


def _versions(workers: Mapping[str, WorkerProcess]) -> dict[str, str]:
    versions = {}
    for name, worker in workers.items():
        versions[BY_NAME[name].peer.name] = worker.version + (f" ({worker.notes})" if worker.notes else "")
    return versions


def _machine() -> str:
    facts = describe_machine()
    return f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_gib']} GiB"


def _settings(effort: Effort, prompts: Path | None) -> dict[str, str | int]:
    return {**effort._asdict(), "prompts": prompts.name if prompts else "built-in"}


def _effort(options: argparse.Namespace) -> Effort:
    base = QUICK if options.quick else FULL
    changed = {name: getattr(options, name) for name in Effort._fields if getattr(options, name) is not None}
    return base._replace(**changed)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _engines(text: str) -> list[str]:
    """Names of engines, or of peers for all of theirs."""
    wanted = text.split(",")
    unknown = [name for name in wanted if not any(_matching(name))]
    if unknown:
        raise argparse.ArgumentTypeError(f"there is no engine {', '.join(unknown)}; choose from {', '.join(BY_NAME)}")
    return [engine.name for engine in ENGINES if any(engine in _matching(name) for name in wanted)]


def _matching(name: str) -> list[Engine]:
    return [engine for engine in ENGINES if name in (engine.name, engine.peer.name)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmarks.peers", description="Compare SpecRay with other engines.")
    add = parser.add_argument
    add("--quick", action="store_true", help="a few tokens of everything, to test the benchmark itself")
    add("--engines", type=_engines, default=list(BY_NAME), metavar="A,B", help=f"only these of {', '.join(BY_NAME)}")
    add("--prompts", type=Path, metavar="FILE", help="JSON Lines with turns (default: built-in chat prompts)")
    add("--num-prompts", type=positive, metavar="N", help="prompts of each kind (default: 8)")
    add("--num-rounds", type=positive, metavar="N", help="passes over the prompts (default: 3)")
    add("--max-tokens", type=positive, metavar="N", help="tokens of an answer (default: 128)")
    add("--torch-args", default="", metavar="ARGS", help="further arguments of `pip install torch`")
    add("--json", type=Path, default=BUILD / "figures.json", metavar="FILE", help="where the figures go")
    add("--machine", metavar="NAME", help="name in benchmarks/results (default: the processor and its cores)")
    add("--image", type=Path, metavar="FILE", help="where the chart goes (default: docs/images/peers.svg)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
