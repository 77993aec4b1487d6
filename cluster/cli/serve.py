"""`specray serve` and `specray check`: merge a file and flags into one configuration and validate it.

`serve` then starts the launcher, and `check` prints the resources that the configuration needs.

Errors in the configuration are reported here, before Ray starts. `flags` generates the flags from the configuration,
`check` validates it, and `launcher` replaces this process to start Ray. `supervise` runs both.
"""

import argparse
import os
import re
import secrets
import signal
import ssl
import sys
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from math import inf
from pathlib import Path
from typing import Any, NoReturn

import yaml

from cluster import proxy
from cluster.app import absent_models
from cluster.cli.check import (
    IMPORT_PATH,
    Json,
    check_document,
    check_keys,
    check_paths,
    find_files,
    load,
    summary,
)
from cluster.cli.flags import SEVERAL, add_flags, given, overridden
from cluster.cli.plan import plan_text
from cluster.cli.supervise import FOLDER
from cluster.config import AppConfig, DraftConfig
from cluster.engine.node_resources import refuse_impossible
from cluster.process_settings import LARGE_MESSAGES, ONE_LOOP
from specray.cli.engine_flags import answer, check_sglang_environment
from specray.cli.local_server import refuse_port_in_use
from specray.cores import num_cores
from specray.errors import ConfigError, SpecRayError, did_you_mean
from specray.server.monitoring.tracing import check_exporter

DESCRIPTION = """\
Start Ray and serve a model until Ctrl-C or SIGTERM. FILE is a configuration for `serve run`; flags override it. The
API listens on --host. Ray's ports require a token."""
DEFAULTS: Json = {
    "proxy_location": "HeadOnly",
    "http_options": {"host": "127.0.0.1", "port": 8000},
    "applications": [{"name": "specray", "route_prefix": "/", "import_path": IMPORT_PATH, "args": {}}],
}
# Keys of Serve's configuration that the launcher supports.
PASSED_ON = {"proxy_location", "http_options", "applications"}
PASSED_ON_OF_APPLICATION = {"name", "route_prefix", "import_path", "args"}
HTTP_FLAGS = ("host", "port", "ssl_keyfile", "ssl_certfile")  # of http_options
LOOPBACK = ("127.0.0.1", "::1", "localhost")
DASHBOARD_PORT = 8265
# Defaults that differ from Ray's; variables set by the operator take precedence.
RAY_OPTIONS = {
    # Serve replaces a proxy that is not ready after three of these timeouts. Ray's 5 s are too short on a busy machine.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "20",
    # With Ray's 15, an engine on a busy machine did not start within 5 minutes.
    "RAY_worker_niceness": "0",
    # Halves the proxy's CPU time per token. Not for ingresses on other machines: requests to a lost one would hang.
    "RAY_SERVE_PROXY_USE_GRPC": "1",
    **LARGE_MESSAGES,
    # Serve's proxy calls this when it starts. Ray has no option for it in a configuration.
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": proxy.IMPORT_PATH,
}


def main(argv: Sequence[str] | None = None) -> int:
    """The command `serve`."""
    try:
        options = _options(parser(), argv)
        document = configuration(options)
        apps = check_document(document, _source(options))
        warnings = [*check_sglang_environment(os.environ, list(apps.values()))]
        if options.print_config:
            print(yaml.safe_dump(document, sort_keys=False), end="")
            _print_warnings(warnings)
            return 0
        _refuse_what_only_serve_run_does(document, _source(options))
        if options.address is None:  # elsewhere, other machines have the port and the files
            refuse_port_in_use(document["http_options"]["host"], document["http_options"]["port"])
            check_certificate(document["http_options"])
            for app in apps.values():
                check_keys(app)
                check_exporter(app.server.otlp_traces_endpoint)
                find_files(app)
    except (SpecRayError, OSError) as error:
        return _failed(error)
    if warning := exposure(document["http_options"]["host"], apps):
        warnings.append(warning)
    _print_warnings(warnings)
    return _become_launcher(document, options)


def check(argv: Sequence[str] | None = None) -> int:
    """The command `check`."""
    try:
        options = _options(check_parser(), argv)
        apps = check_document(configuration(options), _source(options))
        for name, app in apps.items():
            check_keys(app)
            check_exporter(app.server.otlp_traces_endpoint)
            check_paths(app)
            absent = [] if options.fetch else absent_models(app)
            if not absent:
                find_files(app)
            print(f"{_source(options)}: application {name!r} is valid: {summary(app)}")
            if absent:
                print(
                    f"  not checked, because not on this machine: {', '.join(absent)} (--fetch fetches and checks them)"
                )
            print(plan_text(app))
        problems = [*_excess(list(apps.values())), *map(_for_gpus, apps.values())]
        _print_warnings([f"on this machine alone: {problem}" for problem in problems if problem])
    except (SpecRayError, OSError) as error:
        return _failed(error)
    return 0


def _failed(error: Exception) -> int:
    if isinstance(error, OSError) and error.filename is not None:
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
    else:
        print(f"error: {error}", file=sys.stderr)
    return 2


def _excess(apps: Sequence[AppConfig]) -> Iterator[str]:
    """The resources that the applications reserve and this machine does not have, as one error; none if it has them."""
    machine = {"CPU": float(num_cores()), "GPU": float(_num_gpus())}
    custom = {name: inf for app in apps for name in app.placement.rank_resources}
    try:
        refuse_impossible(apps, [custom | machine], [app.device == "cuda" for app in apps])
    except ConfigError as error:
        yield str(error)


def _for_gpus(app: AppConfig) -> str:
    """The options of a drafter that an application without GPUs sets for nothing; empty if there are none."""
    if app.device == "cuda" or (app.device == "auto" and _num_gpus()):
        return ""
    options, defaults = app.draft.model_dump(), DraftConfig().model_dump()
    without = [f"draft.{name}" for name in ("cuda_ipc", "gpu_share", "mps") if options[name] != defaults[name]]
    return f"{' and '.join(without)} have no effect without a GPU; leave them out" if without else ""


def _num_gpus() -> int:
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def _print_warnings(warnings: Sequence[str]) -> None:
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)


def parser() -> argparse.ArgumentParser:
    """Flags of `serve`."""
    parser = _parser("specray serve", DESCRIPTION)
    add = parser.add_argument
    add("--print-config", action="store_true", help="print the configuration as a file for `serve run` and exit")
    ray = parser.add_argument_group("Ray")
    add = ray.add_argument
    add("--address", metavar="HOST:PORT", help="join this Ray cluster (default: start one and stop it on exit)")
    add(
        "--insecure",
        action="store_true",
        help="require no token for Ray's ports; anyone who reaches one, even from another machine, can run code "
        "as this user",
    )
    add(
        "--dashboard",
        type=int,
        nargs="?",
        const=DASHBOARD_PORT,
        metavar="PORT",
        help=f"start Ray's dashboard on loopback, on PORT or {DASHBOARD_PORT} (default: off)",
    )
    add_flags(parser, AppConfig)
    return parser


def check_parser() -> argparse.ArgumentParser:
    """Flags of `check`."""
    parser = _parser(
        "specray check", "Report all errors in a configuration, or print the resources that it needs. Starts nothing."
    )
    parser.add_argument(
        "--fetch",
        action="store_true",
        help="check the models' files even if they have to be downloaded first; local ones are always checked",
    )
    add_flags(parser, AppConfig)
    return parser


def _parser(name: str, description: str) -> argparse.ArgumentParser:
    """A parser of FILE | MODEL and the HTTP flags; `add_flags` adds those of the configuration."""
    parser = argparse.ArgumentParser(
        name, usage=f"{name} [FILE | MODEL] [flags]", description=description, allow_abbrev=False
    )
    add = parser.add_argument
    add(
        "what",
        nargs="?",
        metavar="FILE | MODEL",
        help="YAML file such as configs/eagle3.yaml; any other name is that of a model, like --model",
    )
    add("--host", help="address of the API (default: from FILE, else 127.0.0.1)")
    add("--port", type=int, help="port of the API (default: from FILE, else 8000)")
    add("--ssl-keyfile", metavar="FILE", help="private key of --ssl-certfile, in PEM")
    add("--ssl-certfile", metavar="FILE", help="certificate and its chain, in PEM: serve HTTPS (default: from FILE)")
    return parser


def _options(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments; `file` is set if the first is a file. Raises ConfigError for an unknown flag."""
    options, unknown = parser.parse_known_args(argv)
    if problems := [_unknown(flag.partition("=")[0], parser) for flag in unknown if flag.startswith("-")]:
        raise ConfigError("; ".join(problems))
    if unknown:
        raise ConfigError(f"{unknown[0]}: unexpected argument; give one FILE or MODEL, and flags")
    options.file = None
    for name in SEVERAL & vars(options).keys():
        values = vars(options)[name]
        if options.what is None and len(values) > 1 and _is_configuration(Path(values[-1][0])):
            (options.what,) = values.pop()  # the file behind such a flag
    if options.what is not None and _is_configuration(Path(options.what)):
        options.file = Path(options.what)
    elif options.what is not None:
        if "model" in vars(options):
            raise ConfigError(f"{options.what} and --model {options.model} both name a model; give one of them")
        options.model = options.what
    return options


def _unknown(flag: str, parser: argparse.ArgumentParser) -> str:
    if instead := answer(flag):
        return f"{flag}: SpecRay does not have this flag of SGLang or vLLM; {instead}"
    names = re.findall(r"--[a-z0-9-]+", parser.format_help())
    return f"{flag}: unknown flag{did_you_mean(flag, names)}"


def _is_configuration(path: Path) -> bool:
    return path.suffix in (".yaml", ".yml", ".json") or (path.is_file() and path.suffix.lower() != ".gguf")


def _source(options: argparse.Namespace) -> str:
    """The configuration's name in errors."""
    return str(options.file or "command line")


def configuration(options: argparse.Namespace) -> Json:
    """The configuration for `serve run`: the file or the defaults, overridden by flags."""
    document = deepcopy(DEFAULTS) if options.file is None else load(options.file)
    http = {name: value for name in HTTP_FLAGS if (value := getattr(options, name)) is not None}
    document["http_options"] = DEFAULTS["http_options"] | (document.get("http_options") or {}) | http
    if values := given(options, AppConfig):
        application = _only_application(document, options.file)
        application["args"] = overridden(application.get("args") or {}, values)
    return document


def check_certificate(http: Mapping[str, Any]) -> None:
    """ConfigError unless `http_options` have no certificate, or one and its key."""
    key, certificate = http.get("ssl_keyfile"), http.get("ssl_certfile")
    if key is None and certificate is None:
        return
    if key is None or certificate is None:
        raise ConfigError("ssl_keyfile and ssl_certfile need each other; set both, or none")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, http.get("ssl_keyfile_password"))
    except OSError as error:  # an SSLError, too
        reason = error.strerror or str(error)
        raise ConfigError(f"ssl_certfile={certificate}, ssl_keyfile={key}: {reason}; name a PEM file of each") from None


def exposure(host: str, apps: Mapping[str, AppConfig]) -> str | None:
    """A warning if the API is reachable from other machines without a key."""
    if host in LOOPBACK or all(app.server.api_key_file for app in apps.values()):
        return None
    return f"the API listens on {host} and requires no key; set --server-api-key-file, or --host 127.0.0.1"


def ray_environment(folder: Path, is_local: bool, insecure: bool, environment: Mapping[str, str]) -> dict[str, str]:
    """Environment of the launcher and of all processes that Ray starts; Ray reads most of it on import.

    A local cluster gets its own token and keeps its files and sockets in `folder`, which other users cannot read,
    or in RAY_TMPDIR. Ray has no option to bind a node to loopback. It does so only where clusters of several nodes are
    disabled, which is its default on macOS and Windows. One port of each Serve replica still listens on all interfaces;
    it requires the token.

    The launcher itself has no event loop, so it does not take `ONE_LOOP`; it passes it on to a local cluster.
    """
    outer = environment.items()
    kept = {name: value for name, value in outer if name != "RAY_ADDRESS" and (name, value) not in ONE_LOOP.items()}
    kept |= {"RAY_AUTH_MODE": "disabled" if insecure else "token", "RAY_USAGE_STATS_ENABLED": "0"}
    kept["PYTHONSAFEPATH"] = "1"  # a json.py in the user's directory is not the module that a process imports
    if not is_local:
        return kept
    kept.pop("RAY_AUTH_TOKEN", None)
    own = {"RAY_AUTH_TOKEN_PATH": str(folder / "token"), "TMPDIR": str(folder)}
    return {"RAY_TMPDIR": str(folder)} | RAY_OPTIONS | kept | own | {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


def _refuse_what_only_serve_run_does(document: Json, source: str) -> None:
    applications = document["applications"]
    others = sorted(document.keys() - PASSED_ON) + [
        f"applications.{number}.{name}"
        for number, application in enumerate(applications)
        for name in sorted(application.keys() - PASSED_ON_OF_APPLICATION)
    ]
    others += [str(app["import_path"]) for app in applications if app["import_path"] != IMPORT_PATH]
    if others:
        raise ConfigError(
            f"{source}: {', '.join(others)}: not supported by `specray serve`; remove it or use `serve run`"
        )


def _only_application(document: Json, file: Path | None) -> Json:
    applications: list[Json] = document["applications"]
    if len(applications) != 1:
        raise ConfigError(
            f"{file} has {len(applications)} applications, but flags require exactly one; edit the file instead"
        )
    return applications[0]


def _become_launcher(document: Json, options: argparse.Namespace) -> NoReturn:
    """Replace this process with the launcher. `supervise` has made the folder."""
    folder = Path(os.environ[FOLDER])
    (folder / "serve.yaml").write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    (folder / "token").write_text(secrets.token_hex(32), encoding="utf-8")
    arguments = ["-P", "-m", "cluster.cli.launcher", str(folder)]
    arguments += [f"--address={options.address}"] if options.address else []
    arguments += [f"--dashboard={options.dashboard}"] if options.dashboard else []
    environment = ray_environment(folder, options.address is None, options.insecure, os.environ)
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *arguments], environment)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # a conversion removes its files
    sys.exit(main())
