"""Figures of several drafters: merged trees and the bandit against the better one of each kind, and a shadow's cost.

Prompts of all kinds come in turn, as in mixed traffic. Times are those of whole answers, prefill included.
"""

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from statistics import median

from benchmarks.budget import full_speed
from benchmarks.eagle import EAGLE3, served
from benchmarks.figure import CONCURRENCY, Effort, Figure, Section, prompts_of
from specray.bench.command import engine_config
from specray.bench.measure import Record, Settings
from specray.bench.prompts import Prompt
from specray.bench.report import ALL, speed_ratios
from specray.bench.session import Session
from specray.config import SpeculativeConfig

MERGED, SOURCES = "eagle3-ngram", ("eagle3", "ngram")  # files in configs/
MERGED_TABLE = "Merged trees, one request, `budget: auto`"
BANDIT, ALONE, SOME_SHADOWED, ALL_SHADOWED = "bandit", "alone", "a quarter shadowed", "all shadowed"
NUM_EACH = 6  # prompts of each kind
SHARE, LARGER_SHARE = 0.05, 0.25  # the second is measured, because the cost of the first is less than the noise
LEARNING_ROUNDS = 4  # of all prompts, before the bandit is measured


def measure(effort: Effort, wanted: set[str]) -> Iterator[Figure]:
    del wanted
    session = _session()
    prompts = mixed(effort)
    settings = Settings(1, effort.max_tokens, repeats=effort.rounds)
    yield from _bandit(session, prompts, Settings(1, effort.max_tokens, repeats=2 * effort.rounds))
    yield from _shadow(session, prompts, settings)


def merged(effort: Effort, wanted: set[str]) -> Iterator[Figure]:
    """Merged trees and their sources alone, at T = 0 and 1, all with the server's budget."""
    del wanted
    session, prompts = _session(), mixed(effort)
    for name in (MERGED, *SOURCES):
        session.define(name, served(name).model_copy(update={"budget": "auto"}))
    parts = [prompt for _, prompt in prompts]
    kinds = {kind: {n for n, (own, _) in enumerate(prompts) if own == kind} for kind, _ in prompts}
    for temperature in (0.0, 1.0):
        names, where = [MERGED, *SOURCES], f"T = {temperature:g}"
        learning = Settings(1, effort.max_tokens, temperature, cache_salt=f"first-{temperature}")
        session.compare(names, parts, learning, True, f"learning, {where}")
        settings = Settings(1, effort.max_tokens, temperature, repeats=2 * effort.rounds)
        records = session.compare(names, parts, settings, progress=True, title=f"merged trees, {where}")
        for kind, numbers in {**kinds, "all kinds in turn": set(range(len(parts)))}.items():
            seconds = {name: _seconds(records, name, numbers) for name in names}
            better, goal = min(SOURCES, key=lambda name: seconds[name]), 1.0 if kind in kinds else 1.05
            what, row = f"merged trees / {better}, the better source, {where}, {kind}", f"{kind}, {where}"
            cell = MERGED_TABLE, row, "speed / the better source's"
            yield Figure(what, seconds[better] / seconds[MERGED], goal, cell=cell)
            for name in names:
                length = _accept_length(records, name, numbers)
                cell = MERGED_TABLE, row, f"accept length, {name}"
                yield Figure(f"accept length, {name}, budget: auto, {where}, {kind}", length, None, cell=cell)


def mixed(effort: Effort, most_each: int = NUM_EACH) -> list[tuple[str, Prompt]]:
    """(kind, prompt) of all kinds in turn."""
    most = {"copy": effort.num_copy, "code": effort.num_code, "chat": effort.num_chat}
    groups = [[(kind, prompt) for prompt in prompts_of(kind, min(n, most_each))] for kind, n in most.items()]
    turns = [pair for turn in zip_longest(*groups) for pair in turn if pair is not None]
    return [(kind, prompt.model_copy(update={"category": ALL})) for kind, prompt in turns]


def _accept_length(records: Sequence[Record], variant: str, chunks: set[int]) -> float:
    """Tokens per verify step of a variant's answers to these prompts."""
    runs = [record.run for record in records if record.variant == variant and record.key.chunk in chunks]
    usages = [reply.usage for run in runs for reply in run.replies if reply.usage is not None]
    return 1 + sum(usage.num_accepted for usage in usages) / sum(usage.num_verify_steps for usage in usages)


def _bandit(session: Session, prompts: Sequence[tuple[str, Prompt]], settings: Settings) -> Iterator[Figure]:
    several = served("several-drafters")
    session.define(BANDIT, several)
    names = list(several.members)
    for name, drafter in several.members.items():
        session.define(name, drafter)
    parts = [prompt for _, prompt in prompts]
    learning = Settings(1, settings.max_tokens, cache_salt="first-", repeats=LEARNING_ROUNDS)
    session.compare([BANDIT], parts, learning, True, "learning")
    records = session.compare([BANDIT, *names], parts, settings, progress=True, title="mixed traffic")
    best = needed = 0.0
    for kind in dict.fromkeys(kind for kind, _ in prompts):
        numbers = {number for number, (own, _) in enumerate(prompts) if own == kind}
        seconds = {name: _seconds(records, name, numbers) for name in (BANDIT, *names)}
        better = min(names, key=lambda name: seconds[name])
        yield Figure(f"bandit / {better}, the better drafter, {kind}", seconds[better] / seconds[BANDIT], None)
        best, needed = best + seconds[better], needed + seconds[BANDIT]
    num_seen = LEARNING_ROUNDS * len(prompts)
    what = (
        f"bandit over {' and '.join(names)} / the better one for each kind, copy, code, chat in turn, "
        f"after {num_seen} requests"
    )
    yield Figure(what, best / needed, 0.97)


def _shadow(session: Session, prompts: Sequence[tuple[str, Prompt]], settings: Settings) -> Iterator[Figure]:
    """A second copy of the EAGLE-3 head in the shadow of the first."""
    head = served(EAGLE3).model_dump(exclude_defaults=True)
    budget = head.pop("max_step_draft_tokens", None)
    drafters = [{"name": "head", **head}, {"name": "new", **head}]
    for name, share in ((ALONE, None), (SOME_SHADOWED, LARGER_SHARE), (ALL_SHADOWED, 1.0)):
        shadow = {} if share is None else {"shadow": {"drafter": "new", "share": share}}
        options = {"drafters": drafters, "default_drafter": "head", "max_step_draft_tokens": budget, **shadow}
        session.define(name, SpeculativeConfig.model_validate(options))
    parts = [prompt for _, prompt in prompts]
    records = session.compare([ALONE, ALL_SHADOWED], parts, settings, progress=True, title="one request, shadow")
    cost = 1 - _seconds(records, ALONE) / _seconds(records, ALL_SHADOWED)
    # Of one request at a time, one in twenty is shadowed.
    what = f"shadow drafter (EAGLE-3) at {SHARE:.0%} of the requests, cost in tokens/s, one request at a time"
    yield Figure(what, SHARE * cost, 0.02, "{:.1%}", at_most=True)
    many = Settings(CONCURRENCY, settings.max_tokens, repeats=3 * settings.repeats, cache_salt="many-", ignore_eos=True)
    records = session.compare([ALONE, SOME_SHADOWED], parts * 2, many, progress=True, title="eight at once, shadow")
    cost = 1 - median(speed_ratios(records, SOME_SHADOWED, ALONE, full_speed))
    # A step costs more if any of its requests is shadowed, and of those that are, more are with the larger share.
    any_of_all = (1 - (1 - SHARE) ** CONCURRENCY) / (1 - (1 - LARGER_SHARE) ** CONCURRENCY)
    what = what.replace("one request at a time", f"{CONCURRENCY} at once, at most")
    yield Figure(what, any_of_all * cost, 0.02, "{:.1%}", at_most=True)


def _session() -> Session:
    return Session(engine_config(None, CONCURRENCY, dtype="bfloat16"), progress=sys.stderr.isatty())


def _seconds(records: Sequence[Record], variant: str, chunks: set[int] | None = None) -> float:
    """Time of a variant's answers to these prompts; None: to all.

    Every answer counts, so a try of a slower drafter does. Of answers to one prompt by the same drafters the median
    counts for each, because the machine takes twice as long for some of them.
    """
    times: dict[tuple[int, tuple[str, ...]], list[float]] = defaultdict(list)
    for record in records:
        if record.variant == variant and (chunks is None or record.key.chunk in chunks):
            drafters = tuple("" if reply.usage is None else reply.usage.drafter for reply in record.run.replies)
            times[record.key.chunk, drafters].append(record.run.seconds)
    return sum(len(same) * median(same) for same in times.values())


SECTIONS = (Section(("drafters",), measure), Section(("merged",), merged))
