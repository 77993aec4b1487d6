"""Figures of what a server in production tells about its drafts: the predictions of `specray replay`, and audits."""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.drafters import MERGED, mixed
from benchmarks.eagle import EAGLE3, served
from benchmarks.figure import CONCURRENCY, Effort, Figure, Section, mt_bench_prompts
from specray.bench.command import engine_config
from specray.bench.measure import Record, Settings, compare
from specray.bench.prompts import Prompt
from specray.bench.replay import predicted_speeds, replay
from specray.bench.step_costs import measure_costs
from specray.bench.teacher_forcing import Replayed
from specray.bench.variants import PLAIN, EngineVariant, tree_name, with_tree
from specray.config import SpeculativeConfig
from specray.engine.audit import IDLE_S, MAX_PENDING, Auditor
from specray.engine.request_log import EVERY_TENANT, LoggedRequest, RequestLog, read_logs
from specray.llm import LLM

NGRAM = "ngram"
REPLAY = "Replay: predicted / measured tokens a second, whole trees"
LENGTHS = "Accept lengths of whole trees, by replay"
TREES = ("4-3-6", "6-3-8")
LOADS = (1, CONCURRENCY)
WITHOUT, AUDITED = "without", "audited"
AUDITED_SHARE = 0.01
LOG_BYTES = 2**26
PROMPTS_EACH, MOST_EACH, MOST_TOKENS = 3, 16, 64  # prompts of each kind, few and many, and tokens of an answer


def predictions(effort: Effort, wanted: set[str]) -> Iterator[Figure]:
    """Plain decoding writes a log, which is replayed with drafters that then generate the same texts.

    There are several times as many prompts as run at once: while few do, those whose drafts are right have the share of
    steps that they would have alone, and a server that is always full gives them fewer.
    """
    del wanted
    plain, prompts = _plain(), _many_prompts(effort)
    engines = {PLAIN: plain} | {name: plain.with_speculative(method) for name, method in _methods().items()}
    variants = [EngineVariant(name, llm) for name, llm in engines.items()]
    settings = Settings(max_tokens=min(effort.max_tokens, MOST_TOKENS), ignore_eos=True)
    logged = _logged(plain, prompts, settings)
    replayed = {PLAIN: Replayed([0], [0])}
    replayed |= {name: _replayed(name, plain, method, logged) for name, method in _methods().items()}
    errors = []
    for load in LOADS:
        ratios: dict[str, list[float]] = defaultdict(list)
        for number in range(effort.rounds):
            own = replace(settings, concurrency=load, cache_salt=f"{number}-{load}-")  # n-grams know no earlier round
            costs = measure_costs(engines, logged, [load])
            records = compare(variants, prompts, plain.tokenizer, own)
            for name in engines:
                predicted = predicted_speeds(costs[name], replayed[name], [load])[load]
                ratios[name].append(predicted / _decode_speed(records, name))
        for name, values in ratios.items():
            yield Figure.of(f"{name}, {load} at once", values, None, (REPLAY, name, f"{load} at once"))
            errors.append(abs(median(values) - 1))
    what = "replay: largest error of the predicted tokens a second"
    yield Figure(what, max(errors), 0.05, "{:.1%}", at_most=True)


def accept_lengths(effort: Effort, wanted: set[str]) -> Iterator[Figure]:
    """Accept lengths of whole trees, which no load of the machine changes: replays of logged texts at T = 0 and 1."""
    del wanted
    plain, head, merged = _plain(), served(EAGLE3), served(MERGED)
    methods = {f"EAGLE-3 {tree}": with_tree(head, tree) for tree in TREES}
    methods |= {f"EAGLE-3 {tree_name(merged)}": merged, "n-grams": served(NGRAM)}
    mt_bench, data = mt_bench_prompts(effort)
    groups = {data: mt_bench, "copying, code and chat in turn": _prompts(effort)}
    for what, prompts in groups.items():
        for temperature in (0.0, 1.0):
            settings = Settings(CONCURRENCY, effort.max_tokens, temperature, cache_salt=f"{what}-{temperature}")
            logged = _logged(plain, prompts, settings)
            for name, method in methods.items():
                length = _replayed(name, plain, method, logged).accept_length
                where = f"T = {temperature:g}, {what}"
                cell = LENGTHS, name, where
                yield Figure(f"accept length of whole trees, {name}, {where}", length, None, cell=cell)


def audits(effort: Effort, wanted: set[str]) -> Iterator[Figure]:
    """CPU time with every request audited, and without audits, in turn: that of a smaller share follows."""
    del wanted
    plain, prompts = _plain(), _prompts(effort)
    assert len(prompts) < MAX_PENDING, "all are audited, and the one that warms up"
    engines = {name: plain.with_speculative(served(EAGLE3)) for name in (WITHOUT, AUDITED)}
    stats = engines[AUDITED].engine.stats
    engines[AUDITED].engine.requests.auditor = Auditor(1.0, stats, Random(0), lambda *_: None)
    busy: dict[str, list[float]] = defaultdict(list)
    whole: dict[str, list[float]] = defaultdict(list)
    for number in range(effort.rounds):
        settings = Settings(1, min(effort.max_tokens, MOST_TOKENS), temperature=0.7, cache_salt=f"{number}-")
        for name, llm in [*engines.items()][:: 1 if number % 2 else -1]:
            start = time.process_time()
            compare([EngineVariant(f"{name}-{number}", llm)], prompts, plain.tokenizer, settings)
            busy[name].append(time.process_time() - start)
            time.sleep(IDLE_S)
            while llm.engine.has_work:
                llm.engine.step()
            whole[name].append(time.process_time() - start)
    share = f"audits of {AUDITED_SHARE:.0%} of the requests, EAGLE-3"
    yield _audit_cost(f"{share}: more CPU time of the requests", busy)
    yield _audit_cost(f"{share}: more CPU time, that of the audits included", whole)
    found = sum(stats.labelled["specray_audit_mismatches_total"].values())
    num_audits = stats.values["specray_audit_requests_total"]
    yield Figure(f"mismatches of {num_audits:.0f} audits", found, 0.0, "{:.0f}", at_most=True)


def _audit_cost(what: str, seconds: dict[str, list[float]]) -> Figure:
    pairs = zip(seconds[AUDITED], seconds[WITHOUT], strict=True)
    samples = tuple(AUDITED_SHARE * (audited / without - 1) for audited, without in pairs)
    return Figure(what, median(samples), 0.015, "{:.2%}", True, samples)


def _plain() -> LLM:
    return LLM(engine_config(None, CONCURRENCY, dtype="bfloat16"))


def _prompts(effort: Effort) -> list[Prompt]:
    copy, code, chat = (min(PROMPTS_EACH, most) for most in (effort.num_copy, effort.num_code, effort.num_chat))
    return [prompt for _, prompt in mixed(effort._replace(num_copy=copy, num_code=code, num_chat=chat))]


def _many_prompts(effort: Effort) -> list[Prompt]:
    """All built-in ones, kinds in a random order, so that at each time as many of each kind run as are measured."""
    prompts = [prompt for _, prompt in mixed(effort, MOST_EACH)]
    Random(0).shuffle(prompts)
    return prompts


def _methods() -> dict[str, SpeculativeConfig]:
    """Whole trees at every load, as replays have them."""
    head = served(EAGLE3)
    return {EAGLE3: with_tree(head, tree_name(head)), NGRAM: served(NGRAM)}


def _logged(plain: LLM, prompts: Sequence[Prompt], settings: Settings) -> list[LoggedRequest]:
    """The request log of plain decoding."""
    with TemporaryDirectory() as folder:
        log = RequestLog(Path(folder), [EVERY_TENANT], LOG_BYTES, is_redacted=False)
        plain.engine.requests.on_finish = lambda request: log.add(request, plain.engine.drafter.name)
        compare([EngineVariant(PLAIN, plain)], prompts, plain.tokenizer, settings)
        plain.engine.requests.on_finish = None
        log.close()
        return list(read_logs([log.path]))[1:]  # the first one is the warm-up's


def _replayed(name: str, plain: LLM, method: SpeculativeConfig, logged: Sequence[LoggedRequest]) -> Replayed:
    """In an engine of its own, because it generates nothing afterwards."""
    return replay(name, plain.with_speculative(method), logged)


def _decode_speed(records: Sequence[Record], variant: str) -> float:
    """Tokens/s of the steps in which all requests of the load only decoded."""
    runs = [record.run for record in records if record.variant == variant]
    return sum(run.decode_tokens for run in runs) / sum(run.decode_seconds for run in runs)


SECTIONS = (
    Section(("replay",), predictions),
    Section(("accept-lengths",), accept_lengths),
    Section(("audits",), audits),
)
