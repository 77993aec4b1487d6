"""Options of `specray bench`. Imports no torch, so that `--help` is quick."""

import argparse
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from specray.cli.arguments import positive
from specray.config import EMBEDDED_MODEL, EngineConfig, with_values
from specray.errors import ConfigError
from specray.yaml_file import read_mapping

HELP = "Compare drafting methods on this machine: variants take turns in one process, over the same weights."
IMPORT_PATH = "cluster.app:build"
DEFAULT_DRAFTER = "eagle3"  # of `specray tune`, unless --method is given
POOL_TOKENS = 8192  # a variant's KV tokens for each running request, unless the configuration sets max_total_tokens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--arms",
        dest="variants",
        type=variant_names,
        metavar="A,B",
        help="variants: plain, transformers, corpus:NAME (n-grams, also of a corpus of --config or a file) or "
        "METHOD[@HEAD][+MAP][:TREE]. METHOD is any drafting method, HEAD a draft head or model (embedded name, folder, "
        "hub name), MAP a token map (.pt or .json), TREE the number of nodes N, or STEPS-TOPK-N, or STEPS-TOPK-N+M "
        "merged with n-grams into M nodes. HEAD, MAP and TREE default to those of --config if it has the same method, "
        "then to the head that comes with the embedded model. Example: plain,ngram:8,eagle3:5-4-16,eagle2+map.json "
        "(default: plain and the method of --config; without one, plain,ngram,eagle3 for the embedded model and "
        "plain,ngram for others)",
    )
    add("--prompts", type=Path, metavar="FILE", help="JSON Lines with id, category, turns (default: a built-in set)")
    add("--limit", type=positive, metavar="N", help="use N prompts only, taken from each category in turn")
    add("--turns", type=positive, default=1, metavar="N", help="turns per conversation (default: %(default)s)")
    add("--concurrency", type=positive, default=1, metavar="N", help="concurrent requests (default: %(default)s)")
    add("--ignore-eos", action="store_true", help="ignore end tokens: every answer has --max-tokens tokens")
    add("--repeats", type=positive, default=1, metavar="N", help="passes over all prompts (default: %(default)s)")
    add("--config", type=Path, metavar="FILE", help="Serve configuration, or YAML with engine options, to start from")
    add_target_and_sampling(parser, max_tokens=128)
    add("--json", type=Path, metavar="FILE", help="also write figures, machine, versions and settings to FILE")


def add_target_and_sampling(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    """Add what `bench` and `tune` have in common; `max_tokens` is the default."""
    add = parser.add_argument
    add("--model", help="target model, overrides --config: embedded name, folder, .gguf file or hub name")
    add("--dtype", choices=("auto", "float32", "bfloat16", "float16"), help="data type, overrides --config")
    length = "maximum length of an answer (default: %(default)s)"
    add("--max-tokens", type=positive, default=max_tokens, metavar="N", help=length)
    add("--temperature", type=float, default=0.0, help="sampling temperature; 0 is greedy (default: %(default)s)")
    seeds = "seed of the first request, plus one for each further request (default: %(default)s)"
    add("--seed", type=int, default=0, help=seeds)


def run(options: argparse.Namespace) -> int:
    config = engine_config(options.config, options.concurrency, model=options.model, dtype=options.dtype)
    options.variants = options.variants or default_variants(config)
    from specray.bench.session import run_and_report  # imports torch, which takes seconds

    run_and_report(options, config)
    return 0


def default_variants(config: EngineConfig) -> list[str]:
    """Plain decoding and the configured method; without one, the methods that need no head from the user."""
    algorithm = config.speculative.algorithm
    if algorithm is not None and ":" not in algorithm:  # an import path cannot name a variant
        return ["plain", algorithm.lower()]
    return ["plain", "ngram", *["eagle3"] * (config.model == EMBEDDED_MODEL)]


def variant_names(text: str) -> list[str]:
    stripped = [name.strip() for name in text.split(",")]
    # File names keep their case.
    names = [name if {"@", "+"} & set(name) or name.startswith("corpus:") else name.lower() for name in stripped]
    if len(set(names)) != len(names) or "" in names:
        raise argparse.ArgumentTypeError(f"{text!r} names a variant twice or an empty one; separate names by commas")
    return names


def engine_config(
    path: Path | None, concurrency: int, pool_tokens: int = POOL_TOKENS, **over: str | int | None
) -> EngineConfig:
    """The engine options of a file (None: defaults), overridden by those in `over` that are not None.

    `pool_tokens` is the KV capacity for each running request if neither sets max_total_tokens. Raises ConfigError.
    """
    fields = {**_engine_fields(path), **{name: value for name, value in over.items() if value is not None}}
    try:
        config = EngineConfig.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{path or 'the options'}: {place}={first['input']!r}: {first['msg']}") from None
    if config.max_total_tokens is None:
        config = with_values(config, max_total_tokens=pool_tokens * concurrency)
    if config.max_running_requests < concurrency:
        raise ConfigError(
            f"concurrency={concurrency} is more than max_running_requests={config.max_running_requests}; "
            "lower the former or raise the latter in --config"
        )
    return config


def _engine_fields(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    document = read_mapping(path, "a Serve configuration or engine options")
    if "applications" not in document:
        return document
    for app in document["applications"] or []:
        if app.get("import_path") == IMPORT_PATH:
            return {name: value for name, value in (app.get("args") or {}).items() if name != "server"}
    raise ConfigError(f"{path}: no application has import_path {IMPORT_PATH}; give one that has, or engine options")
