"""`specray replay`: logged requests under other drafters, their accept lengths, and the speeds that follow from them.

`teacher_forcing` replays the requests, and `step_costs` measures what a step costs on this machine.
"""

import json
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from statistics import geometric_mean
from typing import Any

import yaml
from tqdm import tqdm

from specray.bench import machine
from specray.bench.plots import save_tree_plot
from specray.bench.step_costs import measure_costs
from specray.bench.teacher_forcing import Replayed, Replayer, unusable
from specray.bench.variants import PLAIN, parse_method
from specray.config import EngineConfig, SpeculativeConfig, with_values
from specray.engine.draft_budget.costs import StepCosts, StepShape
from specray.engine.request_log import LoggedRequest, read_logs
from specray.errors import ConfigError
from specray.llm import LLM
from specray.outputs import acceptance_per_depth
from specray.tables import format_table


@dataclass(frozen=True, slots=True)
class Arm:
    """A drafting method and what it would have done."""

    name: str
    speculative: SpeculativeConfig
    replayed: Replayed
    tokens_per_s: dict[int, float]  # by batch size

    @property
    def score(self) -> float:
        """The mean predicted speed, by which arms are ranked."""
        return geometric_mean(self.tokens_per_s.values())


def run_and_report(options: Namespace, config: EngineConfig) -> None:
    """Run the command: read, measure, replay, print, write."""
    methods = {name: parse_method(name, config) for name in options.arms if name != PLAIN}
    if not methods:
        raise ConfigError("--arms has plain decoding only, which drafts nothing; name a drafting method, such as ngram")
    arms, left_out = evaluate(
        methods, config, list(islice(read_logs(options.logs), options.limit)), options.batch_sizes
    )
    plain = arms[0]
    arms.sort(key=lambda arm: -arm.score)
    print(to_table(arms, options.batch_sizes))
    print_left_out(left_out)
    print(f"\n{yaml_block(arms[0])}\n{machine.one_line()}")
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(to_json(arms, left_out, config), indent=2) + "\n", encoding="utf-8")
    if options.plot is not None:
        ratios = {
            arm.name: {size: speed / plain.tokens_per_s[size] for size, speed in arm.tokens_per_s.items()}
            for arm in arms
        }
        options.plot.parent.mkdir(parents=True, exist_ok=True)
        save_tree_plot(options.plot, ratios, "predicted / plain decoding")


def evaluate(
    methods: Mapping[str, SpeculativeConfig],
    config: EngineConfig,
    requests: Sequence[LoggedRequest],
    batch_sizes: Sequence[int],
) -> tuple[list[Arm], Counter[str]]:
    """(plain decoding and these methods, why requests are left out). ConfigError if all of them are.

    All draft whole trees: `budget: auto` cuts them to those that pay, so a server is at least as fast.
    """
    plain = LLM(with_values(config, speculative=SpeculativeConfig()), progress=sys.stderr.isatty())
    reasons = [unusable(request, plain.engine) for request in requests]
    left_out = Counter(reason for reason in reasons if reason is not None)
    usable = [request for request, reason in zip(requests, reasons, strict=True) if reason is None]
    if not any(request.num_output_tokens > 1 for request in usable):
        why = ", ".join(f"{count} {reason}" for reason, count in left_out.items()) or "they are too short"
        raise ConfigError(f"no step of {len(requests)} logged requests can be replayed: {why}")
    engines = {PLAIN: plain} | {name: plain.with_speculative(method) for name, method in methods.items()}
    costs = measure_costs(engines, usable, batch_sizes, progress=sys.stderr.isatty())
    arms = []
    for name, llm in engines.items():
        replayed = Replayed([0], [0]) if name == PLAIN else replay(name, llm, usable)
        speeds = predicted_speeds(costs[name], replayed, batch_sizes)
        arms.append(Arm(name, methods.get(name, SpeculativeConfig()), replayed, speeds))
    return arms, left_out


def replay(name: str, llm: LLM, requests: Sequence[LoggedRequest]) -> Replayed:
    """The steps of the engine's drafter on all requests; the engine generates nothing afterwards."""
    replayer, replayed = Replayer(llm), Replayed()
    for request in tqdm(requests, desc=name, unit="request", disable=not sys.stderr.isatty()):
        replayer.replay(request, replayed)
    return replayed


def predicted_speeds(costs: StepCosts, replayed: Replayed, batch_sizes: Sequence[int]) -> dict[int, float]:
    """Tokens/s by batch size, if all requests of a step draft whole trees; prompts take no time."""
    return {
        size: size * replayed.accept_length / _step_seconds(costs, replayed.num_drafts, size) for size in batch_sizes
    }


def _step_seconds(costs: StepCosts, num_drafts: Sequence[int], size: int) -> float:
    """Mean time of a step of `size` requests, whose trees are taken at equal distances from the replayed ones."""
    count = len(num_drafts)
    steps = ([num_drafts[(first + part * count // size) % count] for part in range(size)] for first in range(count))
    shapes = Counter(StepShape(size, sum(step), max(step)) for step in steps)
    return sum(times * costs.seconds(shape) for shape, times in shapes.items()) / count


def print_left_out(left_out: Counter[str]) -> None:
    for reason, count in left_out.items():
        print(f"{count} requests are left out: {reason}")


def to_table(arms: Sequence[Arm], batch_sizes: Sequence[int]) -> str:
    """The arms, best first."""
    headers = [
        "arm",
        "accept len",
        "drafts/step",
        "steps",
        "draft ms/step",
        *(f"tok/s, batch {n}" for n in batch_sizes),
    ]
    rows = []
    for arm in arms:
        steps, replayed = len(arm.replayed.num_drafts), arm.replayed
        cells = [f"{replayed.accept_length:.3f}", f"{sum(replayed.num_drafts) / steps:.1f}", str(steps)]
        cells += [f"{1000 * replayed.draft_seconds / steps:.1f}"]
        speeds = [f"{arm.tokens_per_s[size]:.1f}" for size in batch_sizes]
        rows.append([arm.name, *(["1.000", "0.0", "-", "-"] if arm.name == PLAIN else cells), *speeds])
    return format_table(headers, rows, num_text_columns=1)


def yaml_block(best: Arm) -> str:
    """The best arm's options as a configuration has them; the first line has the predicted speeds."""
    if best.name == PLAIN:
        return "# specray replay: no arm is faster than plain decoding\nspeculative: {}\n"
    speeds = ", ".join(f"{speed:.1f} tokens/s at batch size {size}" for size, speed in best.tokens_per_s.items())
    options = best.speculative.model_dump(exclude_defaults=True)
    block = yaml.safe_dump({"speculative": options}, sort_keys=False)
    return f"# specray replay: {best.name}: predicted {speeds}\n{block}"


def to_json(arms: Sequence[Arm], left_out: Counter[str], config: EngineConfig) -> dict[str, Any]:
    """All figures, the arms best first."""
    return {
        "arms": {
            arm.name: {
                "accept_length": arm.replayed.accept_length,
                "accept_histogram": arm.replayed.accept_histogram,
                "acceptance_per_depth": acceptance_per_depth(arm.replayed.accept_histogram),
                "tokens_per_s": arm.tokens_per_s,
                "speculative": arm.speculative.model_dump(),
                **asdict(arm.replayed),
            }
            for arm in arms
        },
        "left_out": dict(left_out),
        "machine": machine.describe_machine(),
        "versions": machine.versions(),
        "engine": config.model_dump(),
    }
