"""The checks of a Serve configuration, and of the files that it names.

`serve run` does not report an invalid option but answers every request with 404. The rules are those of
`cluster.config`, `specray.config` and Ray's schema.
"""

import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from ray.serve.schema import HTTPOptionsSchema, ServeApplicationSchema, ServeDeploySchema

from cluster.cli.flags import flags
from cluster.config import AppConfig
from specray.config import with_values
from specray.engine.request_log import EVERY_TENANT
from specray.errors import ConfigError, did_you_mean
from specray.models.files import is_here, looks_local, resolve_model
from specray.server.access.keys import KeyRing
from specray.server.errors import short_repr
from specray.spec_decode import check_speculative
from specray.yaml_file import read_mapping

IMPORT_PATH = "cluster.app:build"
KEY_FILES = ("api_key_file", "admin_key_file")
# Deployment -> the option of `server` with its number of replicas.
SCALED = {"Router": "num_replicas", "OpenAIIngress": "num_ingress_replicas"}

Json = dict[str, Any]


def check_file(path: Path) -> dict[str, AppConfig]:
    """The SpecRay applications of a Serve configuration, by name. Raises ConfigError or OSError."""
    return check_document(load(path), str(path))


def check_document(document: Json, source: str) -> dict[str, AppConfig]:
    """The SpecRay applications of a parsed configuration, by name. ConfigError, whose message names `source`."""
    deploy = _parse(document, source)
    _refuse_unknown(source, document)
    ours = {app.name: app for app in deploy.applications if app.import_path == IMPORT_PATH}
    if not ours:
        seen = ", ".join(app.import_path for app in deploy.applications) or "no application"
        raise ConfigError(f"{source}: has {seen}; set applications[0].import_path to {IMPORT_PATH}")
    return {name: _scaled(source, app, _check_args(source, name, app.args)) for name, app in ours.items()}


def check_keys(app: AppConfig) -> None:
    """ConfigError if a key file cannot be used, or lacks a name that another option has."""
    rings = {
        option: KeyRing.read(path, f"server.{option}")
        for option in KEY_FILES
        if (path := getattr(app.server, option)) is not None
    }
    if (clients := rings.get("api_key_file")) is not None:
        named = {"server.request_log_tenants": set(app.server.request_log_tenants) - {EVERY_TENANT}}
        for drafter in (app.speculative, *app.speculative.drafters):
            named |= {f"speculative.corpora, {each.name}: tenants": set(each.tenants) for each in drafter.corpora}
        known = ", ".join(sorted(clients.names))
        for place, names in named.items():
            for name in sorted(names - clients.names):
                raise ConfigError(f"{place} has {name}, which is not a name in server.api_key_file; it has {known}")


def check_paths(app: AppConfig) -> None:
    """ConfigError if a model is named by a path at which nothing is, or the log's folder by one that cannot be one."""
    for option, model in (("model", app.model), ("speculative.draft_model_path", app.speculative.draft_model_path)):
        if model is not None and looks_local(model) and not is_here(model):
            resolve_model(model, None, "auto", progress=False, option=option)
    if app.server.request_log is not None:
        log = Path(app.server.request_log)
        nearest = next(path for path in (log, *log.parents) if path.exists())  # the rest is made at the start
        if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
            reason = "cannot be written" if nearest.is_dir() else "is not a folder"
            raise ConfigError(f"server.request_log={log}: {nearest} {reason}; name another folder")


def find_files(app: AppConfig) -> None:
    """Find the files that the application loads, and check them against each other; download or convert if necessary.

    The models' modules are imported here, because they load torch, which takes seconds.
    """
    from specray.spec_decode.model_files import check_model_files

    uses_defaults = app.server.generation_config == "auto"
    may_be_inline = app.device == "auto" and app.draft.placement == "auto"  # decided in the cluster
    has_draft_process = app.has_draft_actor and not may_be_inline
    check_model_files(
        app.engine, progress=True, uses_sampling_defaults=uses_defaults, has_draft_process=has_draft_process
    )


def load(path: Path) -> Json:
    """The Serve configuration in a file, which has the form of one. Raises ConfigError or OSError."""
    document = read_mapping(path, "`applications`")
    _parse(document, str(path))
    return document


def summary(app: AppConfig, dtype: str | None = None) -> str:
    """Model, type, drafting method and tensor parallelism of an application. `dtype` is what `auto` has become."""
    drafts = app.speculative.drafter_name or "no speculation"
    return f"{app.model}, {dtype or app.dtype}, {drafts}, tensor parallel {app.tp_size}"


def _parse(document: Json, source: str) -> ServeDeploySchema:
    try:
        return ServeDeploySchema.model_validate(document)
    except ValidationError as error:
        raise ConfigError(_describe(source, "", error)) from None


def _refuse_unknown(source: str, document: Json) -> None:
    """Refuse unknown keys, which Ray's schema drops silently."""
    parts: list[tuple[str, Json, type[BaseModel]]] = [
        ("", document, ServeDeploySchema),
        ("http_options.", document.get("http_options") or {}, HTTPOptionsSchema),
    ]
    parts += [(f"applications.{i}.", app, ServeApplicationSchema) for i, app in enumerate(document["applications"])]
    problems = [
        f"{source}: {prefix}{key}: unknown option{did_you_mean(str(key), schema.model_fields)}"
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
    """Apply the numbers of replicas in Serve's `deployments`, which change without restarting running replicas."""
    numbers = {}
    for deployment in app.deployments:
        if deployment.name not in SCALED:
            known = ", ".join(SCALED)
            raise ConfigError(f"{source}: {app.name}.deployments: unknown deployment {deployment.name!r}; use {known}")
        if isinstance(deployment.num_replicas, int):
            numbers[SCALED[deployment.name]] = deployment.num_replicas
    return with_values(config, server=with_values(config.server, **numbers))


def _describe(source: str, prefix: str, error: ValidationError) -> str:
    return "; ".join(f"{source}: {prefix}{_problem(problem)}" for problem in error.errors())


def _problem(problem: ErrorDetails) -> str:
    place = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"{place}: unknown option{did_you_mean(str(problem['loc'][-1]), _option_names())}"
    if problem["type"] == "value_error":  # our own validators; their messages name the values
        return f"{place}: {problem['ctx']['error']}"
    if problem["type"] == "missing":  # the value seen is all that surrounds it
        return f"{place}: {problem['msg']}"
    return f"{place}={short_repr(problem['input'])}: {problem['msg']}"


def _option_names() -> list[str]:
    """Names of all options and groups, without those of their groups."""
    return list(dict.fromkeys(name for flag in flags(AppConfig) for name in flag.path))
