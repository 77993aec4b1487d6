"""Figures of EAGLE heads: identical output, accept lengths, speed relative to plain decoding.

Heads and trees are those of `configs/`.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarks.figure import CONCURRENCY, Effort, Figure, Section, mt_bench_prompts
from benchmarks.results import ROOT
from specray.bench.command import engine_config
from specray.bench.measure import Record, Settings
from specray.bench.prompts import Prompt, load_prompts
from specray.bench.report import ALL, speed_ratios, summarise
from specray.bench.session import Session
from specray.bench.variants import PLAIN, tree_name, with_tree
from specray.config import SpeculativeConfig

EAGLE3, EAGLE2, FRSPEC = "eagle3", "eagle2", "eagle2-frspec"  # variants, named like their files in configs/
TITLES = {EAGLE3: "EAGLE-3", EAGLE2: "EAGLE-2", FRSPEC: "EAGLE-2 with FR-Spec"}
CHAIN = "5-1-6"
# Tokens a step at T = 0 on MT-bench. Other trees have no goal.
ACCEPT_GOALS = {(EAGLE3, "4-3-6"): 2.8, (EAGLE3, "6-10-60"): 3.4, (EAGLE2, "6-10-60"): 2.7}
EXACT_TOKENS = 64
EXACT_CHUNK = 16  # short, so that prompts take several chunks
EXACT_ROWS = {"exact-eagle3": EAGLE3, "exact-eagle2": EAGLE2}
MT_BENCH_ROWS = (
    "eagle3-accept",
    "eagle3-accept-t1",
    "eagle2-accept",
    "eagle3-speed",
    "frspec",
    "eagle3-concurrent",
)


def exactness(effort: Effort, wanted: set[str]) -> Iterator[Figure]:
    """Trees and chains against plain decoding, in float32, greedy and seeded.

    With chunks of 16: one request at a time on an empty cache, and eight at a time on a warm one. With the default
    chunk size: eight at a time on an empty cache. Plain decoding runs once, and all answers must equal its answers.
    """
    prompts = load_prompts(limit=effort.num_exact)
    variants = {method: _tree_and_chain(method) for row, method in EXACT_ROWS.items() if row in wanted}
    names = [name for by_name in variants.values() for name in by_name]
    same: dict[str, list[bool]] = {name: [] for name in names}
    truths: dict[float, list[list[int]]] = {}
    for chunk, passes in ((None, [(CONCURRENCY, "a")]), (EXACT_CHUNK, [(1, "b"), (CONCURRENCY, "b")])):
        session = _session("float32", chunk)
        for by_name in variants.values():
            _define(session, by_name)
        for temperature in (0.0, 1.0):
            for concurrency, salt in passes:
                settings = Settings(concurrency, EXACT_TOKENS, temperature, cache_salt=f"{salt}{temperature}-")
                title = f"exactness, T = {temperature:g}, batch {concurrency}, chunk {chunk or 'default'}"
                baseline = [] if temperature in truths else [PLAIN]
                records = session.compare([*baseline, *names], prompts, settings, progress=True, title=title)
                truth = truths.setdefault(temperature, _answers(records, PLAIN))
                for name in names:
                    same[name] += [one == other for one, other in zip(_answers(records, name), truth, strict=True)]
    for method, by_name in variants.items():
        verify_outputs = [output for name in by_name for output in same[name]]
        yield Figure(
            f"{TITLES[method]} answers equal to plain, float32, T = 0 and 1, {' and '.join(by_name)}, batch 1 and "
            f"{CONCURRENCY}, cold and warm, {len(verify_outputs)} answers x {EXACT_TOKENS} tokens",
            sum(verify_outputs) / len(verify_outputs),
            1.0,
            "{:.0%}",
        )


def on_mt_bench(effort: Effort, wanted: set[str]) -> Iterator[Figure]:
    """Greedy rows with one request at a time share one comparison of the variants that they need."""
    prompts, data = mt_bench_prompts(effort)
    session, settings = _session("bfloat16"), Settings(max_tokens=effort.max_tokens)
    variants = {name: served(name) for name in TITLES}
    third, second = (_accept_variant(variants, method, effort) for method in (EAGLE3, EAGLE2))
    _define(session, variants)
    needs = {
        "eagle3-accept": (third,),
        "eagle3-accept-t1": (third,),
        "eagle2-accept": (second,),
        "eagle3-speed": (PLAIN, EAGLE3),
        "frspec": (EAGLE2, FRSPEC),
    }
    needed = list(dict.fromkeys(name for row, names in needs.items() if row in wanted for name in names))
    greedy = session.compare(needed, prompts, settings, progress=True, title=f"{data}, T = 0") if needed else []
    if "eagle3-accept" in wanted:
        yield _accept_figure(greedy, EAGLE3, third, tree_name(variants[third]), data)
    if "eagle3-accept-t1" in wanted:
        sampled = session.compare(
            [third], prompts, replace(settings, temperature=1.0), progress=True, title=f"{data}, T = 1"
        )
        length = _accept_length(sampled, third)
        what = f"the same at T = 1 ({length:.2f}) / at T = 0"
        yield Figure(what, length / _accept_length(greedy, third), 0.88)
    if "eagle2-accept" in wanted:
        yield _accept_figure(greedy, EAGLE2, second, tree_name(variants[second]), data)
    if "eagle3-speed" in wanted:
        what = f"EAGLE-3 {tree_name(variants[EAGLE3])} / plain, one request, bfloat16, {data}"
        yield Figure.of(what, speed_ratios(greedy, EAGLE3, PLAIN), 2.3)
    if "frspec" in wanted:
        yield from _frspec(greedy, variants)
    if "eagle3-concurrent" in wanted:
        yield from _concurrent(session, prompts, data, settings)


def _accept_variant(variants: dict[str, SpeculativeConfig], method: str, effort: Effort) -> str:
    """The variant whose accept length is shown: the served one, or one with the tree `effort.accept_tree`."""
    if effort.accept_tree is None:
        return method
    name = f"{method} {effort.accept_tree}"
    variants[name] = with_tree(variants[method], effort.accept_tree)
    return name


def _accept_figure(records: Sequence[Record], method: str, variant: str, tree: str, data: str) -> Figure:
    what = f"accept length, {TITLES[method]} {tree}, T = 0, {data}"
    return Figure(what, _accept_length(records, variant), ACCEPT_GOALS.get((method, tree)))


def _frspec(greedy: list[Record], variants: dict[str, SpeculativeConfig]) -> Iterator[Figure]:
    what = f"EAGLE-2 {tree_name(variants[FRSPEC])}, token map / full head"
    yield Figure.of(f"{what}, tokens/s", speed_ratios(greedy, FRSPEC, EAGLE2), 1.1)
    yield Figure(f"{what}, accept length", _accept_length(greedy, FRSPEC) / _accept_length(greedy, EAGLE2), 0.97)


def _concurrent(session: Session, prompts: Sequence[Prompt], data: str, settings: Settings) -> Iterator[Figure]:
    """Prompts of all categories mixed, so that the batch stays full; with fixed trees, and with `budget: auto`."""
    budgeted = f"{EAGLE3} with budget: auto"
    _define(session, {budgeted: served(EAGLE3).model_copy(update={"budget": "auto"})})
    mixed = [prompt.model_copy(update={"category": ALL}) for prompt in prompts]
    settings = replace(settings, concurrency=CONCURRENCY, cache_salt="concurrent-")
    names = [PLAIN, EAGLE3, budgeted]
    records = session.compare(names, mixed, settings, progress=True, title=f"{CONCURRENCY} concurrent")
    for name, title in ((EAGLE3, "EAGLE-3"), (budgeted, "EAGLE-3 with budget: auto")):
        what = f"{title} / plain, {CONCURRENCY} concurrent requests, output tokens/s, {data}"
        yield Figure.of(what, speed_ratios(records, name, PLAIN), 1.3)


def served(name: str) -> SpeculativeConfig:
    """The speculative options of a file in configs/."""
    return engine_config(ROOT / "configs" / f"{name}.yaml", 1).speculative


def _tree_and_chain(method: str) -> dict[str, SpeculativeConfig]:
    whole = with_tree(served(method), tree_name(served(method)))  # without a limit on a step's draft tokens
    return {f"{method} {tree_name(config)}": config for config in (whole, with_tree(whole, CHAIN))}


def _define(session: Session, variants: dict[str, SpeculativeConfig]) -> None:
    for name, speculative in variants.items():
        session.define(name, speculative)


def _session(dtype: str, chunk: int | None = None) -> Session:
    config = engine_config(None, CONCURRENCY, dtype=dtype, chunked_prefill_size=chunk)
    return Session(config, progress=sys.stderr.isatty())


def _answers(records: Sequence[Record], variant: str) -> list[list[int]]:
    """Every answer's tokens in the prompts' order, however they were batched."""
    mine = sorted((record for record in records if record.variant == variant), key=lambda record: record.key.chunk)
    return [reply.token_ids for record in mine for reply in record.run.replies]


def _accept_length(records: Sequence[Record], variant: str) -> float:
    length = summarise(records)[variant][ALL].accept_length
    assert length is not None, f"{variant} verifies"
    return length


SECTIONS = (Section(tuple(EXACT_ROWS), exactness), Section(MT_BENCH_ROWS, on_mt_bench))
