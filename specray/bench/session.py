"""A benchmark in this process: loads the models, runs the comparison, prints and writes its figures."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specray.bench import machine
from specray.bench.measure import Record, Settings, compare
from specray.bench.prompts import Prompt, load_prompts
from specray.bench.report import Summary, depth_table, summarise, to_json, to_table
from specray.bench.variants import PLAIN, TRANSFORMERS, EngineVariant, Variant, parse_method, target_of
from specray.config import EngineConfig, SpeculativeConfig, with_values
from specray.engine.draft_budget import budget_kind
from specray.errors import ConfigError
from specray.llm import LLM
from specray.models.files import target_folder
from specray.models.target_model import TargetModel


class Session:
    """One loaded target, and variants over it, which are made on first use."""

    def __init__(self, config: EngineConfig, progress: bool = False) -> None:
        self._config = config
        self._llm = LLM(with_values(config, speculative=SpeculativeConfig()), progress=progress)
        self._variants: dict[str, Variant] = {}
        self._defined: dict[str, SpeculativeConfig] = {}

    def define(self, name: str, speculative: SpeculativeConfig) -> None:
        """Define a variant by name, instead of by `parse_method`."""
        self._defined[name] = speculative

    def variant(self, name: str) -> Variant:
        """The variant of that name. Raises ConfigError if there is no such method."""
        if name not in self._variants:
            self._variants[name] = self._make(name)
        return self._variants[name]

    @property
    def target(self) -> TargetModel:
        return target_of(self._llm)

    def served_budget(self, speculative: SpeculativeConfig) -> str:
        """The budget of a server on this machine with these options: see `budget_kind`."""
        capacity = self._llm.engine.capacity
        is_cpu = self.target.embedding.weight.device.type == "cpu"
        return budget_kind(speculative, capacity._replace(learns_budget=is_cpu or capacity.has_graphs))

    def drop(self, name: str) -> None:
        """Free a variant, its head and its KV pool."""
        self._variants.pop(name, None)

    def compare(
        self,
        names: Sequence[str],
        prompts: Sequence[Prompt],
        settings: Settings,
        progress: bool = False,
        title: str = "measuring",
    ) -> list[Record]:
        variants = [self.variant(name) for name in names]
        return compare(variants, prompts, self._llm.tokenizer, settings, progress, title)

    def _make(self, name: str) -> Variant:
        if name == TRANSFORMERS:
            return self._transformers_variant()
        method = self._defined.get(name) or parse_method(name, self._config)
        return EngineVariant(name, self._llm if name == PLAIN else self._llm.with_speculative(method))

    def _transformers_variant(self) -> Variant:
        from specray.bench.transformers_variant import TransformersVariant  # imports that take seconds

        config, weight = self._config, target_of(self._llm).embedding.weight
        folder = target_folder(config, progress=False)
        return TransformersVariant(folder, weight.dtype, weight.device, self._llm.engine.capacity.eos_token_ids)


def run_and_report(options: argparse.Namespace, config: EngineConfig) -> None:
    """Run the command: load, measure, print, write."""
    names = ("concurrency", "max_tokens", "temperature", "turns", "repeats", "seed", "ignore_eos")
    settings = Settings(**{name: getattr(options, name) for name in names})
    for name in options.variants:
        _check_variant(name, settings, config)
    prompts = load_prompts(options.prompts, options.limit)
    session = Session(config, progress=sys.stderr.isatty())
    summaries = summarise(session.compare(options.variants, prompts, settings, progress=True))
    print(to_table(summaries))
    if depths := depth_table(summaries):
        print(f"\n{depths}")
    print(f"\n{machine.one_line()}")
    if options.json is not None:
        write_json(options.json, summaries, config, settings)


def write_json(
    path: Path,
    summaries: dict[str, dict[str, Summary]],
    config: EngineConfig,
    settings: Settings,
) -> None:
    document: dict[str, Any] = {
        "arms": to_json(summaries),
        "machine": machine.describe_machine(),
        "versions": machine.versions(),
        "settings": {**asdict(settings), "engine": config.model_dump()},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _check_variant(name: str, settings: Settings, config: EngineConfig) -> None:
    """ConfigError for what cannot be measured, before anything is loaded."""
    if name != TRANSFORMERS:
        parse_method(name, config)
    elif settings.concurrency != 1 or settings.temperature > 0:
        raise ConfigError(
            f"{TRANSFORMERS} answers one prompt at a time, greedily, but concurrency={settings.concurrency} "
            f"and temperature={settings.temperature}; use --concurrency 1 --temperature 0 or leave it out"
        )
