"""`specray serve [FILE] [flags]`: one checked configuration out of a file and flags, handed to the launcher.

Whatever is wrong is said here, before Ray starts. Not here: what the flags are (`flags` makes them from the
configuration tree), what is right (`check`), and starting anything (`launcher`, which takes this process's place).
"""

import argparse
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any, NoReturn

import yaml

from cluster.cli.check import IMPORT_PATH, Json, check_document, find_files, load, suggestion
from cluster.cli.flags import add_flags, flags, given, overridden
from cluster.cli.sglang_environment import check_sglang_environment
from cluster.config import AppConfig
from specray.cli.local_server import refuse_port_in_use
from specray.errors import ConfigError, SpecRayError

DESCRIPTION = """\
Start Ray and serve a model, until Ctrl-C or SIGTERM. FILE is a configuration as `serve run` takes it; flags override
it, and without it they are all there is. Who may reach the API is --host's choice; Ray's ports ask for a token."""
DEFAULTS: Json = {
    "proxy_location": "HeadOnly",
    "http_options": {"host": "127.0.0.1", "port": 8000},
    "applications": [{"name": "specray", "route_prefix": "/", "import_path": IMPORT_PATH, "args": {}}],
}
# What of Serve's own configuration the launcher passes on.
PASSED_ON = {"proxy_location", "http_options", "applications"}
PASSED_ON_OF_APPLICATION = {"name", "route_prefix", "import_path", "args"}
LOOPBACK = ("127.0.0.1", "::1", "localhost")
DASHBOARD_PORT = 8265
TEMPORARY = Path("/tmp")  # short, because Ray puts unix sockets below it and their paths end at 107 characters
FOLDER_PREFIX = "specray-"
PID_FILE = "pid"  # in a launcher's folder, while the launcher lives
# What Ray has other defaults for, unless the operator says otherwise.
RAY_OPTIONS = {
    # Serve replaces a proxy that was not up within three times so long: with its 5 s not beside two busy processes.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "20",
    # Ray's 15 gives an engine the time that nobody else wants: beside those two it did not start in 5 minutes.
    "RAY_worker_niceness": "0",
    # Half the proxy's work for each token. Not for ingresses on other machines: one that vanished would be waited for.
    "RAY_SERVE_PROXY_USE_GRPC": "1",
}


def main(argv: Sequence[str] | None = None) -> int:
    options, unknown = parser().parse_known_args(argv)
    try:
        _refuse_unknown(unknown)
        document = configuration(options)
        apps = check_document(document, str(options.file or "command line"))
        warnings = [*check_sglang_environment(os.environ, list(apps.values()))]
        if options.print_config:
            print(yaml.safe_dump(document, sort_keys=False), end="")
            _print_warnings(warnings)
            return 0
        _refuse_what_only_serve_run_does(document, options.file)
        if options.address is None:  # elsewhere, other machines have the port and the files
            refuse_port_in_use(document["http_options"]["host"], document["http_options"]["port"])
            for app in apps.values():
                find_files(app)
    except (SpecRayError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if warning := exposure(document["http_options"]["host"], apps):
        warnings.append(warning)
    _print_warnings(warnings)
    return _become_launcher(document, options)


def _print_warnings(warnings: Sequence[str]) -> None:
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)


def parser() -> argparse.ArgumentParser:
    """Flags of the whole configuration tree, after those of the command itself."""
    parser = argparse.ArgumentParser(
        "specray serve", usage="specray serve [FILE] [flags]", description=DESCRIPTION, allow_abbrev=False
    )
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE", help="a YAML file such as configs/eagle3.yaml")
    add = parser.add_argument
    add("--host", help="address on which the API listens (default: the file's, 127.0.0.1)")
    add("--port", type=int, help="its port (default: the file's, 8000)")
    add("--print-config", action="store_true", help="print what would be started, as a file for `serve run`, and end")
    ray = parser.add_argument_group("Ray")
    add = ray.add_argument
    add("--address", metavar="HOST:PORT", help="join this cluster; without it, one is started here and ends with us")
    add(
        "--insecure",
        action="store_true",
        help="no token for Ray's ports: whoever reaches one of them, and some are open to other machines, can run code "
        "as you",
    )
    add(
        "--dashboard",
        type=int,
        nargs="?",
        const=DASHBOARD_PORT,
        metavar="PORT",
        help=f"start Ray's dashboard, too, on loopback (default: off; without PORT: {DASHBOARD_PORT})",
    )
    add_flags(parser, AppConfig)
    return parser


def configuration(options: argparse.Namespace) -> Json:
    """A document for `serve run`: the file's or the defaults, and over it what the command line says."""
    document = deepcopy(DEFAULTS) if options.file is None else load(options.file)
    said = {name: value for name in ("host", "port") if (value := getattr(options, name)) is not None}
    document["http_options"] = DEFAULTS["http_options"] | (document.get("http_options") or {}) | said
    if values := given(options, AppConfig):
        _only_application(document)["args"] = overridden(_only_application(document).get("args") or {}, values)
    return document


def exposure(host: str, apps: Mapping[str, AppConfig]) -> str | None:
    """What to warn of: a server that strangers may use."""
    if host in LOOPBACK or all(app.server.api_key_file for app in apps.values()):
        return None
    return f"the API listens on {host} and asks for no key; set --server-api-key-file, or --host 127.0.0.1"


def ray_environment(folder: Path, is_local: bool, insecure: bool, environment: Mapping[str, str]) -> dict[str, str]:
    """Environment of the launcher and, from there, of all that Ray starts; most of it is read as Ray is imported.

    A cluster of our own has its own token, and keeps files and sockets in `folder`, which is closed to other users, or
    where RAY_TMPDIR says. Ray has no option that puts a node on loopback, it resolves 127.0.0.1 to an outer address;
    but where clusters of several nodes are off, the default on macOS and Windows, its ports are there. All but one of
    each Serve replica, which listens everywhere whatever one says, and asks for the token.
    """
    kept = {name: value for name, value in environment.items() if name != "RAY_ADDRESS"}
    kept |= {"RAY_AUTH_MODE": "disabled" if insecure else "token", "RAY_USAGE_STATS_ENABLED": "0"}
    if not is_local:
        return kept
    kept.pop("RAY_AUTH_TOKEN", None)
    own = {"RAY_AUTH_TOKEN_PATH": str(folder / "token"), "TMPDIR": str(folder)}
    return {"RAY_TMPDIR": str(folder)} | RAY_OPTIONS | kept | own | {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


def _refuse_unknown(arguments: Sequence[str]) -> None:
    if arguments:
        names = [name for flag in flags(AppConfig) for name in flag.names]
        seen = arguments[0].partition("=")[0]
        raise ConfigError(f"{seen}: there is no such flag{suggestion(seen, names)}")


def _refuse_what_only_serve_run_does(document: Json, file: Path | None) -> None:
    applications = document["applications"]
    others = sorted(document.keys() - PASSED_ON) + [
        f"applications.{number}.{name}"
        for number, application in enumerate(applications)
        for name in sorted(application.keys() - PASSED_ON_OF_APPLICATION)
    ]
    others += [str(app["import_path"]) for app in applications if app["import_path"] != IMPORT_PATH]
    if others:
        raise ConfigError(f"{file}: {', '.join(others)}: not for `specray serve`; remove it or use `serve run`")


def _only_application(document: Json) -> Json:
    applications: Any = document.get("applications")
    if not isinstance(applications, list) or len(applications) != 1 or not isinstance(applications[0], dict):
        raise ConfigError("flags are for a file with one application, and this one has another number; edit the file")
    application: Json = applications[0]
    return application


def remove_leftovers(parent: Path) -> None:
    """Remove folders of launchers that were killed. One that ended by itself took its folder or its PID_FILE away."""
    for file in parent.glob(f"{FOLDER_PREFIX}*/{PID_FILE}"):
        with suppress(PermissionError):  # another user's
            try:
                os.kill(int(file.read_text(encoding="utf-8")), 0)
            except (ProcessLookupError, ValueError):
                shutil.rmtree(file.parent, ignore_errors=True)


def _become_launcher(document: Json, options: argparse.Namespace) -> NoReturn:
    """Replace this program: signals meant for us find the launcher, with nobody in between."""
    remove_leftovers(TEMPORARY)
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=TEMPORARY))  # mode 0700
    (folder / "serve.yaml").write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    (folder / "token").write_text(secrets.token_hex(32), encoding="utf-8")
    (folder / PID_FILE).write_text(str(os.getpid()), encoding="utf-8")
    arguments = ["-m", "cluster.cli.launcher", str(folder)]
    arguments += [f"--address={options.address}"] if options.address else []
    arguments += [f"--dashboard={options.dashboard}"] if options.dashboard else []
    environment = ray_environment(folder, options.address is None, options.insecure, os.environ)
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *arguments], environment)


if __name__ == "__main__":
    sys.exit(main())
