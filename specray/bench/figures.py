"""`make bench`: the README's figures on this machine, as one table. Each row: what, measured, to reach.

Rows are measured with the parts of `specray bench`, arms interleaved. Takes minutes; wants an idle machine.
"""

import argparse
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from specray.bench import machine
from specray.bench.arms import PLAIN, TRANSFORMERS
from specray.bench.command import engine_config
from specray.bench.measure import Settings
from specray.bench.prompts import Prompt, by_category, load_prompts
from specray.bench.report import identical_share, summarise
from specray.bench.session import Session
from specray.bench.tables import format_table
from specray.chat import Answer, connect, first_model, stream_answer
from specray.errors import SpecRayError
from specray.local_server import LocalServer

ROOT = Path(__file__).parents[2]
NGRAM = "ngram"
CONCURRENCY = 8
STEP_PATH = (
    "step", "engine/request", "engine/block_pool", "engine/radix_cache", "engine/scheduler", "engine/engine",
    "worker/worker", "worker/model_runner", "worker/input_batch", "worker/request_state", "spec_decode/draft_tree",
    "spec_decode/verifier",
)  # fmt: skip
PHASE_LINE = re.compile(r'^specray_step_seconds_total\{[^}]*phase="(\w+)"[^}]*\} (\S+)', re.MULTILINE)


class Figure(NamedTuple):
    what: str
    measured: float
    bound: float | None  # None: for information
    form: str = "{:.2f}"
    at_most: bool = False

    def row(self) -> list[str]:
        if self.bound is None:
            return [self.what, "-", self.form.format(self.measured), "-"]
        reached = self.measured <= self.bound if self.at_most else self.measured >= self.bound
        sign = "<=" if self.at_most else ">="
        bound = f"{sign} {self.form.format(self.bound)}"
        return [self.what, "yes" if reached else "no", self.form.format(self.measured), bound]


class Effort(NamedTuple):
    """How much to measure; `quick` only shows that everything runs."""

    num_exact: int
    num_chat: int
    num_copy: int
    max_tokens: int
    rounds: int


FULL = Effort(num_exact=32, num_chat=12, num_copy=16, max_tokens=128, rounds=3)
QUICK = Effort(num_exact=2, num_chat=1, num_copy=1, max_tokens=16, rounds=1)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m specray.bench.figures", description="Measure the README's figures.")
    parser.add_argument("--quick", action="store_true", help="a few tokens of everything, to try the bench itself")
    options = parser.parse_args(argv)
    effort = QUICK if options.quick else FULL
    try:
        figures = [figure for section in SECTIONS for figure in section(effort)]
    except (SpecRayError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    headers = ("figure", "reached", "measured", "to reach")
    print(f"\n{format_table(headers, [figure.row() for figure in figures])}\n\n{machine.one_line()}")
    return 0


def exactness(effort: Effort) -> Iterator[Figure]:
    session = _session("float32")
    arms = [TRANSFORMERS, PLAIN, NGRAM]
    records = session.compare(arms, load_prompts(limit=effort.num_exact), Settings(max_tokens=64), progress=True)
    for arm in (PLAIN, NGRAM):
        what = f"answers equal to transformers' in float32, {effort.num_exact} prompts x 64 tokens, {arm}"
        yield Figure(what, identical_share(records, arm, TRANSFORMERS), 1.0, "{:.0%}")


def in_process(effort: Effort) -> Iterator[Figure]:
    session = _session("bfloat16")
    yield from _against_transformers(session, effort)
    yield from _speculation(session, effort)
    yield _concurrency(session, effort)


def _against_transformers(session: Session, effort: Effort) -> Iterator[Figure]:
    floor = session.floor()
    prompts, settings = _prompts("chat", effort.num_chat), Settings(max_tokens=effort.max_tokens)
    summaries = summarise(session.compare([PLAIN, TRANSFORMERS], prompts, settings, floor, progress=True))
    plain, yardstick = summaries[PLAIN]["all"], summaries[TRANSFORMERS]["all"]
    assert plain.tpot_ms is not None, "answers have more than one token"
    assert plain.host_share is not None, "the engine has steps"
    assert yardstick.ratio_to_plain is not None, "plain was measured"
    yield Figure("plain decoding, output tokens/s", plain.output_tokens_per_s, None, "{:.1f}")
    yield Figure("plain decoding / transformers' generate", 1 / yardstick.ratio_to_plain, 1.5)
    yield Figure("weight matmuls alone / plain decoding, time of a token", floor.milliseconds / plain.tpot_ms, 0.75)
    yield Figure("the same with torch's F.linear for the matmuls", floor.linear_milliseconds / plain.tpot_ms, None)
    yield Figure("host share of a step, in process", plain.host_share, 0.08, "{:.1%}", at_most=True)


def _speculation(session: Session, effort: Effort) -> Iterator[Figure]:
    prompts = _prompts("copy", effort.num_copy) + _prompts("chat", effort.num_chat)
    settings = Settings(max_tokens=effort.max_tokens)
    ngram = summarise(session.compare([PLAIN, NGRAM], prompts, settings, progress=True))[NGRAM]
    for category, title, bound in (("copy", "copy-heavy prompts", 1.5), ("chat", "open chat", 0.95)):
        summary = ngram[category]
        assert summary.ratio_to_plain is not None, "plain was measured"
        what = f"NGRAM / plain, {title} (accept length {summary.accept_length:.2f})"
        yield Figure(what, summary.ratio_to_plain, bound)


def _concurrency(session: Session, effort: Effort) -> Figure:
    """Alternating, because the two cannot be arms of one comparison."""
    settings = Settings(max_tokens=effort.max_tokens, ignore_eos=True)
    many = Settings(concurrency=CONCURRENCY, max_tokens=effort.max_tokens, ignore_eos=True)
    prompts = _prompts("chat", 2 * CONCURRENCY)
    ratios = []
    for _ in range(effort.rounds):
        one = summarise(session.compare([PLAIN], prompts[:2], settings, progress=True))[PLAIN]["all"]
        all_ = summarise(session.compare([PLAIN], prompts, many, progress=True))[PLAIN]["all"]
        ratios.append(all_.output_tokens_per_s / one.output_tokens_per_s)
    return Figure(f"{CONCURRENCY} concurrent requests / 1, output tokens/s, plain", median(ratios), 5.0)


def through_the_router(effort: Effort) -> Iterator[Figure]:
    with LocalServer(ROOT / "configs" / "plain.yaml", _free_port()) as server:
        server.wait_until_ready()
        client = connect(server.url)
        request = {"model": first_model(client), "temperature": 0, "max_tokens": effort.max_tokens}
        before: dict[str, float] = {}
        for prompt in _prompts("chat", 1 + effort.num_chat):
            messages = [{"role": "user", "content": prompt.turns[0]}]
            list(stream_answer(client, Answer(), messages=messages, **request))
            before = before or _phases(server)  # the first question warms up
        spent = {phase: seconds - before[phase] for phase, seconds in _phases(server).items()}
    share = spent["host"] / sum(spent.values())
    yield Figure("host share of a step, through the router (mean)", share, 0.15, "{:.1%}", at_most=True)


def step_path(effort: Effort) -> Iterator[Figure]:
    del effort  # nothing to measure
    files = [ROOT / "specray" / f"{name}.py" for name in STEP_PATH]
    num_lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
    yield Figure(f"lines of the step path, {len(files)} files", num_lines, 1400, "{:.0f}", at_most=True)


SECTIONS: tuple[Callable[[Effort], Iterator[Figure]], ...] = (exactness, in_process, through_the_router, step_path)


def _session(dtype: str) -> Session:
    return Session(engine_config(None, CONCURRENCY, dtype=dtype), progress=sys.stderr.isatty())


def _prompts(category: str, count: int) -> list[Prompt]:
    return by_category(load_prompts())[category][:count]


def _phases(server: LocalServer) -> dict[str, float]:
    time.sleep(3)  # the server copies its counters out about once a second
    return {phase: float(seconds) for phase, seconds in PHASE_LINE.findall(server.get("/metrics"))}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


if __name__ == "__main__":
    sys.exit(main())
