"""`specray check FILE`: can this Serve configuration start, and what would it take? `serve run` does not say.

A wrong option makes `serve run` answer 404 for ever; here it is named, with the fix, and the exit status is 2.
Not here: the rules themselves (`cluster.config`, `specray.config` and Ray's schema own them), and starting anything.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from textwrap import shorten
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from ray.serve.schema import HTTPOptionsSchema, ServeApplicationSchema, ServeDeploySchema

from cluster.cli.flags import flags
from cluster.cli.plan import plan_text
from cluster.config import AppConfig
from specray.errors import ConfigError
from specray.models.files import resolve_draft, resolve_model, resolve_token_map
from specray.spec_decode import check_speculative

IMPORT_PATH = "cluster.app:build"
# Of each deployment, what `server` calls the number of its replicas.
SCALED = {"Router": "num_replicas", "OpenAIIngress": "num_ingress_replicas"}

Json = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    try:
        apps = check_file(options.file)
        for name, app in apps.items():
            if options.model:
                find_files(app)
            print(f"{options.file}: application {name!r} is valid: {summary(app)}")
            print(plan_text(app))
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def check_file(path: Path) -> dict[str, AppConfig]:
    """Our applications in a Serve configuration, by name. Raises ConfigError with every problem found, or OSError."""
    return check_document(load(path), str(path))


def check_document(document: Json, source: str) -> dict[str, AppConfig]:
    """The same of what a file holds; `source` is where it came from, for the error's text."""
    try:
        deploy = ServeDeploySchema.model_validate(document)
    except ValidationError as error:
        raise ConfigError(_describe(source, "", error)) from None
    _refuse_unknown(source, document)
    ours = {app.name: app for app in deploy.applications if app.import_path == IMPORT_PATH}
    if not ours:
        seen = ", ".join(app.import_path for app in deploy.applications) or "no application"
        raise ConfigError(f"{source}: has {seen}; set applications[0].import_path to {IMPORT_PATH}")
    return {name: _scaled(source, app, _check_args(source, name, app.args)) for name, app in ours.items()}


def find_files(app: AppConfig) -> None:
    """Find, fetch or convert all that the application loads."""
    resolve_model(app.model, app.revision, app.load_format, progress=True)
    if app.speculative.draft_model_path is not None:
        resolve_draft(app.speculative, progress=True)
    if app.speculative.token_map is not None:
        resolve_token_map(app.speculative.token_map)


def load(path: Path) -> Json:
    """What a YAML file holds, which has to be a mapping. Raises ConfigError or OSError."""
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is not YAML: {error}") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: holds {shorten(repr(document), 80)}; it must be a mapping with `applications`")
    return document


def summary(app: AppConfig) -> str:
    """What an application serves, in a few words."""
    drafts = app.speculative.algorithm or "no speculation"
    return f"{app.model}, {app.dtype}, {drafts}, tensor parallel {app.tp_size}"


def suggestion(name: str, options: Iterable[str]) -> str:
    """The end of an error about a name that there is not."""
    close = get_close_matches(name, options, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _refuse_unknown(source: str, document: Json) -> None:
    """Ray's schema drops keys it does not know, and with them what they were meant to say."""
    parts: list[tuple[str, Json, type[BaseModel]]] = [
        ("", document, ServeDeploySchema),
        ("http_options.", document.get("http_options") or {}, HTTPOptionsSchema),
    ]
    parts += [(f"applications.{i}.", app, ServeApplicationSchema) for i, app in enumerate(document["applications"])]
    problems = [
        f"{source}: {prefix}{key}: there is no such option{suggestion(str(key), schema.model_fields)}"
        for prefix, part, schema in parts
        for key in part
        if key not in schema.model_fields
    ]
    if problems:
        raise ConfigError("; ".join(problems))


def _check_args(source: str, name: str, args: Json) -> AppConfig:
    try:
        config = AppConfig.model_validate(args)
        check_speculative(config.speculative)
    except ValidationError as error:
        raise ConfigError(_describe(source, f"{name}.args.", error)) from None
    except ConfigError as error:
        raise ConfigError(f"{source}: {name}.args: {error}") from None
    return config


def _scaled(source: str, app: ServeApplicationSchema, config: AppConfig) -> AppConfig:
    """With the numbers of replicas under Serve's `deployments`, which it changes without replacing what runs."""
    numbers = {}
    for deployment in app.deployments:
        if deployment.name not in SCALED:
            known = ", ".join(SCALED)
            raise ConfigError(f"{source}: {app.name}.deployments: there is no {deployment.name!r}, only {known}")
        if isinstance(deployment.num_replicas, int):
            numbers[SCALED[deployment.name]] = deployment.num_replicas
    return config.model_copy(update={"server": config.server.model_copy(update=numbers)})


def _describe(source: str, prefix: str, error: ValidationError) -> str:
    return "; ".join(f"{source}: {prefix}{_problem(problem)}" for problem in error.errors())


def _problem(problem: ErrorDetails) -> str:
    place = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"{place}: there is no such option{suggestion(str(problem['loc'][-1]), _option_names())}"
    if problem["type"] == "value_error":  # one of our own checks, which names the values itself
        return f"{place}: {problem['ctx']['error']}"
    return f"{place}={shorten(repr(problem['input']), 80)}: {problem['msg']}"


def _option_names() -> list[str]:
    """Options and groups of the whole tree, each by its own name."""
    return list(dict.fromkeys(name for flag in flags(AppConfig) for name in flag.path))


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "specray check",
        description="Name every mistake in a Serve configuration; if there is none, print what it takes.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="a YAML file for `serve run`: configs/eagle3.yaml")
    parser.add_argument(
        "--model", action="store_true", help="also find the model's files, downloading or converting them if need be"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
