"""The search for the fastest draft tree, by successive halving, or by a replay of logged requests.

In every round plain decoding and the remaining trees take turns on the same prompts. Then the slower half is dropped.
Trees are measured under the limit and the budget that a server with the same options would have. A replay (`replay`)
compares whole trees, all in one round.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import yaml

from specray.bench import machine
from specray.bench.command import DEFAULT_DRAFTER
from specray.bench.measure import Record, Settings
from specray.bench.plots import save_tree_plot
from specray.bench.prompts import Prompt, by_category, load_prompts
from specray.bench.replay import evaluate, print_left_out
from specray.bench.report import ALL, speed_ratios, summarise
from specray.bench.session import Session
from specray.bench.variants import PLAIN, parse_method, tree_name, with_tree
from specray.config import EngineConfig, SpeculativeConfig, with_values
from specray.engine.request_log import LoggedRequest, read_logs
from specray.errors import ConfigError
from specray.spec_decode import method_of
from specray.tables import format_table

# From a short chain for busy machines to trees that pay only where many rows cost as much as one.
TREES = (
    "2-1-3",
    "3-1-4",
    "5-1-6",
    "3-2-6",
    "4-2-8",
    "5-4-8",
    "5-4-12",
    "5-4-16",
    "6-8-16",
    "6-8-24",
    "7-8-32",
)
NUM_PROMPTS = 6  # of a round
NODES = ("4", "6", "8", "12", "16", "24")  # for methods without other tree options


@dataclass(slots=True)
class Candidate:
    """One tree and its measurements by batch size; a run is some prompts answered at that size."""

    tree: str
    speculative: SpeculativeConfig
    ratios: dict[int, list[float]] = field(default_factory=dict)  # each run's tokens/s over plain decoding's
    tokens_per_s: dict[int, list[float]] = field(default_factory=dict)  # median of each round
    accept_lengths: list[float] = field(default_factory=list)
    num_rounds: int = 0

    def ratio(self, batch_size: int) -> float:
        return median(self.ratios[batch_size])

    @property
    def score(self) -> float:
        """The geometric mean of the ratios over the batch sizes."""
        return geometric_mean(self.ratio(size) for size in self.ratios)

    @property
    def options(self) -> dict[str, Any]:
        """The options that differ from the defaults, and those that decide how many drafts a step has."""
        limits = {"max_step_draft_tokens", "budget"}
        return self.speculative.model_dump(exclude_defaults=True) | self.speculative.model_dump(include=limits)

    def note(self, batch_size: int, records: Sequence[Record]) -> None:
        summary = summarise(records)[self.tree][ALL]
        self.ratios.setdefault(batch_size, []).extend(speed_ratios(records, self.tree, PLAIN))
        self.tokens_per_s.setdefault(batch_size, []).append(summary.output_tokens_per_s)
        if summary.accept_length is not None:
            self.accept_lengths.append(summary.accept_length)


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Candidates, best first. Those dropped early are last and were measured less."""

    ranking: list[Candidate]
    plain_tokens_per_s: dict[int, float]

    @property
    def best(self) -> Candidate:
        return self.ranking[0]


def run_and_report(options: argparse.Namespace, config: EngineConfig) -> None:
    """Run the command: load, search, print, write."""
    method = options.method or (None if config.speculative.algorithm else DEFAULT_DRAFTER)
    speculative = parse_method(method, config) if method else config.speculative
    contenders = make_candidates(speculative, options.candidates)
    settings = Settings(max_tokens=options.max_tokens, temperature=options.temperature, seed=options.seed)
    if options.replay:
        requests = list(islice(read_logs(options.replay), options.limit))
        outcome = by_replay(contenders, config, requests, options.batch_sizes)
    else:
        prompts = _prompts(options.prompts, max(options.batch_sizes))
        session = Session(config, progress=sys.stderr.isatty())
        budget = session.served_budget(speculative)
        for candidate in contenders:
            candidate.speculative = with_values(candidate.speculative, budget=budget)
        limit = options.limit or NUM_PROMPTS
        outcome = search(session, contenders, prompts, settings, options.batch_sizes, options.rounds, limit)
    block = yaml_block(outcome.best)
    print(f"{to_table(outcome)}\n\n{output(outcome)}\n\n{block}\n{machine.one_line()}")
    write_files(options.out, outcome, config, settings, block)


def make_candidates(speculative: SpeculativeConfig, trees: Sequence[str] | None = None) -> list[Candidate]:
    """The trees to try with a method, including the configured one. Raises ConfigError.

    Of the usual ones, those with more drafts than `max_step_draft_tokens` are left out: it would cut them.
    """
    if speculative.algorithm is None:
        raise ConfigError("plain decoding has no draft tree to tune; choose a drafting method with --method")
    most = speculative.max_step_draft_tokens
    usual = TREES if "eagle_topk" in method_of(speculative.algorithm).options else NODES
    uncut = [name for name in usual if most is None or int(name.rpartition("-")[2]) <= most + 1]
    names = list(trees or uncut or usual[:1])
    found = [with_tree(speculative, name) for name in names]
    if tree_name(speculative) != "auto":
        found.append(speculative)
    # By their whole names: two names give one tree where the options that they leave out are configured.
    by_name = {tree_name(each): with_values(each, max_step_draft_tokens=most) for each in found}
    return [Candidate(*each) for each in by_name.items()]


def search(
    session: Session,
    candidates: Sequence[Candidate],
    prompts: Sequence[Prompt],
    settings: Settings,
    batch_sizes: Sequence[int],
    num_rounds: int,
    num_prompts: int,
) -> SearchResult:
    """Measure in rounds, and drop the slower half after each but the last."""
    plain: dict[int, list[float]] = {size: [] for size in batch_sizes}
    for candidate in candidates:
        session.define(candidate.tree, candidate.speculative)
    left = list(candidates)
    gone: list[Candidate] = []
    for number in range(1, num_rounds + 1):
        for size in batch_sizes:
            asked = prompts_of_round(prompts, number, max(num_prompts, 2 * size))
            records = session.compare(
                [PLAIN, *(candidate.tree for candidate in left)],
                asked,
                _settings(settings, size, f"round-{number}-batch-{size}-"),
                progress=True,
                title=f"round {number}/{num_rounds}, {len(left)} trees, batch {size}",
            )
            plain[size].append(summarise(records)[PLAIN][ALL].output_tokens_per_s)
            for candidate in left:
                candidate.note(size, records)
        for candidate in left:
            candidate.num_rounds = number
        if number < num_rounds:
            kept = best_half({c.tree: {size: c.ratio(size) for size in batch_sizes} for c in left})
            leaving = [candidate for candidate in left if candidate.tree not in kept]
            gone, left = _ranked(leaving) + gone, [candidate for candidate in left if candidate.tree in kept]
            for candidate in leaving:
                session.drop(candidate.tree)
    return SearchResult(_ranked(left) + gone, {size: median(speeds) for size, speeds in plain.items()})


def by_replay(
    candidates: Sequence[Candidate],
    config: EngineConfig,
    requests: Sequence[LoggedRequest],
    batch_sizes: Sequence[int],
) -> SearchResult:
    """Predict the speeds of all candidates for logged requests. ConfigError if none of these can be replayed."""
    methods = {candidate.tree: candidate.speculative for candidate in candidates}
    (plain, *arms), left_out = evaluate(methods, config, requests, batch_sizes)
    print_left_out(left_out)
    for candidate, arm in zip(candidates, arms, strict=True):
        candidate.tokens_per_s = {size: [speed] for size, speed in arm.tokens_per_s.items()}
        candidate.ratios = {size: [speed / plain.tokens_per_s[size]] for size, speed in arm.tokens_per_s.items()}
        candidate.accept_lengths, candidate.num_rounds = [arm.replayed.accept_length], 1
    return SearchResult(_ranked(candidates), plain.tokens_per_s)


def prompts_of_round(prompts: Sequence[Prompt], number: int, count: int) -> list[Prompt]:
    """`count` prompts, or all if there are fewer; each round continues where the last one ended."""
    count = min(count, len(prompts))
    start = (number - 1) * count % len(prompts)
    return [*prompts[start:], *prompts[:start]][:count]


def best_half(ratios: Mapping[str, Mapping[int, float]]) -> set[str]:
    """Trees for the next round: the better half by mean ratio, and the best one at each batch size.

    `ratios` is tree -> batch size -> tokens/s over plain decoding's.
    """
    by_mean = sorted(ratios, key=lambda tree: geometric_mean(ratios[tree].values()), reverse=True)
    sizes = next(iter(ratios.values()))
    leaders = {max(ratios, key=lambda tree: ratios[tree][size]) for size in sizes}
    return leaders | set(by_mean[: -(-len(by_mean) // 2)])


def to_table(outcome: SearchResult) -> str:
    sizes = list(outcome.plain_tokens_per_s)
    by_size = [header for size in sizes for header in (f"tok/s, batch {size}", "x plain")]
    headers = ["tree", "rounds", *by_size, "mean x plain", "accept len"]
    plain = [cell for speed in outcome.plain_tokens_per_s.values() for cell in (f"{speed:.1f}", "1.00")]
    rows = [[PLAIN, str(outcome.best.num_rounds), *plain, "1.00", "1.00"]]
    for c in outcome.ranking:
        cells = [cell for size in sizes for cell in (f"{median(c.tokens_per_s[size]):.1f}", f"{c.ratio(size):.2f}")]
        accepted = f"{median(c.accept_lengths):.2f}" if c.accept_lengths else "-"
        rows.append([c.tree, str(c.num_rounds), *cells, f"{c.score:.2f}", accepted])
    return format_table(headers, rows, num_text_columns=1)


def output(outcome: SearchResult) -> str:
    best = outcome.best
    if best.score <= 1:
        return (
            f"No tree is faster than plain decoding here: {best.tree} comes closest with {best.score:.2f} times its "
            "speed. Leave speculation off."
        )
    lines = [f"Best: {best.tree}, {best.score:.2f} times plain decoding."]
    for size in outcome.plain_tokens_per_s:
        lead = max(outcome.ranking, key=lambda candidate: (candidate.num_rounds, candidate.ratio(size)))
        if lead is not best and lead.ratio(size) > best.ratio(size):
            lines.append(f"At batch size {size} alone {lead.tree} is faster ({lead.ratio(size):.2f}).")
    return " ".join(lines)


def yaml_block(best: Candidate) -> str:
    """The `speculative` options as YAML, with the measurement in the first line."""
    measured = ", ".join(f"{best.ratio(size):.2f} x plain at batch size {size}" for size in best.ratios)
    return f"# specray tune: {measured}\n{yaml.safe_dump({'speculative': best.options}, sort_keys=False)}"


def to_json(outcome: SearchResult) -> dict[str, Any]:
    """Everything measured, ready for JSON; `candidates` in the ranking's order."""
    candidates = [{**asdict(c), "speculative": c.speculative.model_dump(), "score": c.score} for c in outcome.ranking]
    return {"best": outcome.best.options, "plain_tokens_per_s": outcome.plain_tokens_per_s, "candidates": candidates}


def write_files(folder: Path, outcome: SearchResult, config: EngineConfig, settings: Settings, block: str) -> None:
    """Write tune.json, speculative.yaml and, if matplotlib is installed, tune.png."""
    folder.mkdir(parents=True, exist_ok=True)
    document = {
        **to_json(outcome),
        "machine": machine.describe_machine(),
        "versions": machine.versions(),
        "settings": {**asdict(settings), "engine": config.model_dump()},
    }
    (folder / "tune.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    (folder / "speculative.yaml").write_text(block, encoding="utf-8")
    written = ["tune.json", "speculative.yaml"]
    trees = {
        candidate.tree: {size: candidate.ratio(size) for size in candidate.ratios} for candidate in outcome.ranking
    }
    if save_tree_plot(folder / "tune.png", trees, f"{outcome.best.speculative.algorithm} / plain decoding"):
        written.append("tune.png")
    print(f"written to {folder}: {', '.join(written)}")


def _prompts(path: Path | None, batch_size: int) -> list[Prompt]:
    """Prompts in one category, so that batches mix all of them."""
    prompts = by_category(load_prompts())["chat"] if path is None else load_prompts(path)
    if len(prompts) < batch_size:
        raise ConfigError(
            f"batch size {batch_size} needs as many prompts, but {path or 'the built-in set'} has {len(prompts)}; "
            "name a longer file with --prompts or lower --batch-sizes"
        )
    return [with_values(prompt, category=ALL) for prompt in prompts]


def _settings(settings: Settings, batch_size: int, salt: str) -> Settings:
    return Settings(**{**asdict(settings), "concurrency": batch_size, "cache_salt": salt})


def _ranked(candidates: Sequence[Candidate]) -> list[Candidate]:
    return sorted(candidates, key=lambda candidate: candidate.score, reverse=True)
