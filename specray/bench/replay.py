"""`specray replay`: logged requests under other drafters, their accept lengths, and the speeds that follow from them.

`teacher_forcing` replays the requests. Speeds follow from the costs of steps that a server has measured on this machine
(`engine.draft_budget`), so none is printed where no server has run.
"""

import json
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from statistics import geometric_mean
from typing import Any

import yaml
from tqdm import tqdm

from specray.bench import machine
from specray.bench.teacher_forcing import Replayed, Replayer
from specray.bench.variants import PLAIN, parse_method
from specray.config import EngineConfig, SpeculativeConfig, with_values
from specray.engine.draft_budget.costs import StepCosts, StepShape
from specray.engine.draft_budget.store import CostStore
from specray.engine.executor import Capacity
from specray.engine.request_log import LoggedRequest, read_log
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
    tokens_per_s: dict[int, float] = field(default_factory=dict)  # by batch size; empty without measured costs

    @property
    def score(self) -> float:
        """What arms are ranked by: the mean predicted speed, or without one the accept length."""
        return geometric_mean(self.tokens_per_s.values()) if self.tokens_per_s else self.replayed.accept_length


def run_and_report(options: Namespace, config: EngineConfig, served: EngineConfig) -> None:
    """Run the command: read, replay, print, write. `served` is the configuration of the server that measured costs."""
    methods = {name: parse_method(name, config) for name in options.arms if name != PLAIN}
    if not methods:
        raise ConfigError("--arms has plain decoding only, which drafts nothing; name a drafting method, such as ngram")
    requests = list(islice(chain.from_iterable(map(read_log, options.logs)), options.limit))
    llm = LLM(with_values(config, speculative=SpeculativeConfig()), progress=sys.stderr.isatty())
    unusable: Counter[str] = Counter()
    arms = []
    for name, speculative in methods.items():
        with_drafter = llm.with_speculative(speculative)
        replayed, unusable = replay(name, with_drafter, requests)
        costs = known_costs(served, speculative, with_drafter.engine.capacity)
        arms.append(Arm(name, speculative, replayed, predicted_speeds(costs, replayed, options.batch_sizes)))
        if PLAIN in options.arms and costs is not None and all(arm.name != PLAIN for arm in arms):
            plain = Replayed([0], [0])
            arms.append(Arm(PLAIN, SpeculativeConfig(), plain, predicted_speeds(costs, plain, options.batch_sizes)))
    arms.sort(key=lambda arm: (not arm.tokens_per_s, -arm.score))
    print(to_table(arms, options.batch_sizes))
    for reason, count in unusable.items():
        print(f"{count} of {len(requests)} requests are left out: {reason}")
    print(f"\n{yaml_block(arms[0])}\n{machine.one_line()}")
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(to_json(arms, unusable, config), indent=2) + "\n", encoding="utf-8")


def replay(name: str, llm: LLM, requests: Sequence[LoggedRequest]) -> tuple[Replayed, Counter[str]]:
    """(the steps of the engine's drafter on all requests, why others are left out). ConfigError if all of them are."""
    replayer, replayed = Replayer(llm), Replayed()
    unusable: Counter[str] = Counter()
    for request in tqdm(requests, desc=name, unit="request", disable=not sys.stderr.isatty()):
        if (reason := replayer.unusable(request)) is None:
            replayer.replay(request, replayed)
        else:
            unusable[reason] += 1
    if not replayed.num_drafts:
        reasons = ", ".join(f"{count} {reason}" for reason, count in unusable.items())
        raise ConfigError(
            f"no step of {len(requests)} logged requests can be replayed: {reasons or 'they are too short'}"
        )
    return replayed, unusable


def known_costs(served: EngineConfig, speculative: SpeculativeConfig, capacity: Capacity) -> StepCosts | None:
    """The costs that a server with these options has measured; or with another tree of the same drafter; or None."""
    own = CostStore.of(with_values(served, speculative=speculative), capacity)
    if own.path.exists():
        return own.load()
    is_same = all(
        getattr(served.speculative, name) == getattr(speculative, name) for name in ("algorithm", "draft_model_path")
    )
    other = CostStore.of(served, capacity)
    return other.load() if is_same and other.path.exists() else None


def predicted_speeds(costs: StepCosts | None, replayed: Replayed, batch_sizes: Sequence[int]) -> dict[int, float]:
    """Tokens/s by batch size, if all requests of a step draft whole trees; empty without costs."""
    if costs is None:
        return {}
    mean, most = sum(replayed.num_drafts) / len(replayed.num_drafts), max(replayed.num_drafts)
    shapes = {size: StepShape(size, round(size * mean), most) for size in batch_sizes}
    return {size: size * replayed.accept_length / costs.seconds(shape) for size, shape in shapes.items()}


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
        speeds = [f"{arm.tokens_per_s[size]:.1f}" if arm.tokens_per_s else "-" for size in batch_sizes]
        rows.append([arm.name, *(["1.000", "0.0", "-", "-"] if arm.name == PLAIN else cells), *speeds])
    return format_table(headers, rows, num_text_columns=1)


def yaml_block(best: Arm) -> str:
    """The best arm's options as a configuration has them; the first line says by which measure."""
    if best.name == PLAIN:
        return "# specray replay: no arm is faster than plain decoding\nspeculative: {}\n"
    if best.tokens_per_s:
        speeds = ", ".join(f"{speed:.1f} tokens/s at batch size {size}" for size, speed in best.tokens_per_s.items())
        reason = f"predicted {speeds}"
    else:
        reason = f"accept length {best.replayed.accept_length:.3f}, the longest; no costs are known, so not the speed"
    options = best.speculative.model_dump(exclude_defaults=True)
    return f"# specray replay: {best.name}: {reason}\n{yaml.safe_dump({'speculative': options}, sort_keys=False)}"


def to_json(arms: Sequence[Arm], unusable: Counter[str], config: EngineConfig) -> dict[str, Any]:
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
        "left_out": dict(unusable),
        "machine": machine.describe_machine(),
        "versions": machine.versions(),
        "engine": config.model_dump(),
    }
