"""Figures of `speculative.budget: auto`: against the best fixed tree and plain decoding, at several loads.

The best of several noisy figures is biased upwards, so the fixed tree is chosen in one comparison and judged in
another.

Speeds are those while all requests of a load run. Answers differ in length, as users' do. With equal lengths requests
of plain decoding all end together and the next prompts are read in one large step, while those with drafts end one by
one: with 8 at once that made plain decoding 3 % faster, and as much again because fewer of its steps count.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median

from benchmarks.eagle import EAGLE3, served
from benchmarks.figure import Effort, Figure, Section, mt_bench_prompts
from specray.bench.command import engine_config
from specray.bench.measure import Record, Settings
from specray.bench.report import ALL, speed_ratios
from specray.bench.session import Session
from specray.bench.variants import PLAIN, Run, with_tree

LOADS = (1, 2, 4, 8, 16, 32)
TREES = ("1-1-2", "3-2-4", "4-3-6", "5-4-10")  # fixed for every step and request
AUTO, AUTO_TREE = "auto", "5-4-12"
LEAST_PROMPTS = 16
SPREAD = 0.5  # answers have half to one and a half times the usual length
ANSWERS_EACH = 3  # one after the other, so that most of a turn has all its requests at once


def measure(effort: Effort, wanted: set[str]) -> Iterator[Figure]:
    """One comparison for each load."""
    del wanted
    prompts, data = mt_bench_prompts(effort)
    prompts = [prompt.model_copy(update={"category": ALL}) for prompt in prompts]
    session = _session()
    whole = served(EAGLE3)
    for tree in TREES:
        session.define(tree, with_tree(whole, tree))
    session.define(AUTO, with_tree(whole, AUTO_TREE).model_copy(update={"budget": "auto"}))
    speeds: dict[int, dict[str, float]] = {}
    for load in LOADS:
        part = (prompts * ANSWERS_EACH * load)[: max(ANSWERS_EACH * load, min(LEAST_PROMPTS, len(prompts)))]
        settings = Settings(load, effort.max_tokens, cache_salt=f"{load}-", ignore_eos=True, length_spread=SPREAD)
        session.compare([AUTO], part, settings, progress=True, title=f"{load} at once, learning")
        choosing = replace(settings, repeats=max(1, effort.rounds - 1))
        records = session.compare([PLAIN, *TREES], part, choosing, progress=True, title=f"{load} at once, fixed trees")
        to_plain = {name: median(speed_ratios(records, name, PLAIN, full_speed)) for name in TREES}
        best = max(to_plain, key=to_plain.__getitem__)
        if to_plain[best] < 1.0:
            best = PLAIN
        judging = replace(settings, repeats=3 * effort.rounds, cache_salt=f"{load}-again-")
        names = list(dict.fromkeys([PLAIN, best, AUTO]))
        judged = session.compare(names, part, judging, progress=True, title=f"{load} at once")
        to_plain |= {name: median(speed_ratios(judged, name, PLAIN, full_speed)) for name in names}
        yield Figure(
            f"budget auto / the best fixed tree ({best}), {load} at once, {data}",
            median(speed_ratios(judged, AUTO, best, full_speed)),
            0.97,
        )
        yield Figure(f"budget auto / plain, {load} at once, {data}", to_plain[AUTO], 0.98)
        plain = _tokens_per_s([*records, *judged], PLAIN)
        speeds[load] = {name: plain * ratio for name, ratio in to_plain.items()}
    loads = [speeds[load] for load in (LOADS[0], LOADS[-1])]
    fixed = [name for name in loads[0] if name != AUTO]
    auto = _speed_at_both(loads, AUTO, AUTO)
    best_for_both = max(_speed_at_both(loads, name, name) for name in fixed)
    best_of_each = max(_speed_at_both(loads, first, second) for first in fixed for second in fixed)
    where = f"as many tokens at {LOADS[0]} as at {LOADS[-1]} at once, {data}"
    yield Figure(f"budget auto / the best fixed tree, {where}", auto / best_for_both, 1.1)
    yield Figure(f"the best fixed tree of each load / the best for both, {where}", best_of_each / best_for_both, None)


def _speed_at_both(loads: Sequence[dict[str, float]], first: str, second: str) -> float:
    """Tokens per second over as many tokens at the first load, with the variant `first`, as at the second."""
    return 2 / (1 / loads[0][first] + 1 / loads[1][second])


def _session() -> Session:
    return Session(engine_config(None, max(LOADS), dtype="bfloat16"), progress=sys.stderr.isatty())


def full_speed(run: Run) -> float:
    """Tokens per second while all requests of a load run."""
    return run.full_tokens_per_s


def _tokens_per_s(records: list[Record], variant: str) -> float:
    return median(full_speed(record.run) for record in records if record.variant == variant)


SECTIONS = (Section(("budget",), measure),)
