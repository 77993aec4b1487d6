"""The process behind `specray serve`: run Ray, Serve and the applications of one configuration until a signal.

Started by `supervise` in the environment that `serve` prepares.
"""

import argparse
import logging
import os
import re
import select
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import NoReturn
from urllib.error import URLError
from urllib.request import HTTPSHandler, ProxyHandler, build_opener

import ray
from ray import serve
from ray.exceptions import AuthenticationError, RayError
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ServeDeploySchema

from cluster.app import application
from cluster.cli.check import check_document, load, summary
from cluster.cli.supervise import SERVING
from cluster.config import AppConfig
from cluster.engine.node_resources import check_node_resources
from cluster.http_port import check_http_port
from cluster.process_settings import ONE_LOOP, most_verbose, set_log_level
from specray.cli.local_server import reachable
from specray.errors import ConfigError, SpecRayError
from specray.private_folders import own

POLL_S = 0.3
READY_S = 60.0  # until a running ingress answers: it connects to the engines and reads the tokenizer
DRAIN_SLACK_S = 15.0  # to start and end a drain
DRAIN_POLL_S = 0.6  # longer than a heartbeat interval: by the second poll every ingress is draining and counted
PROBE_S = 30.0
LEAVE_S = 8.0  # to remove applications from a cluster that continues
STOPPED = 3  # exit status of a stop before the server was ready
ASK_S = 5.0


class StartError(SpecRayError):
    """The application did not start."""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Exit status: 0 stopped, 1 the application failed, 2 the cluster cannot be used, 3 stopped while starting."""
    options = _parser().parse_args(argv)
    own(options.folder)
    status = _run(options, Stop())
    sys.stdout.flush()
    os._exit(status)  # a thread may still be starting applications


class Stop:
    """The request to stop: the end of standard input, which closes when the supervisor asks for it, or dies.

    It is read in a thread, because library code may swallow exceptions of signal handlers. The process then exits in
    the middle of its work, unless `undo_within` was called because something has to be undone first.
    """

    def __init__(self) -> None:
        self._undo_s: float | None = None
        self.events: SimpleQueue[BaseException | None] = SimpleQueue()  # None: stop; an exception: the start failed
        threading.Thread(target=self._watch, daemon=True).start()

    def undo_within(self, seconds: float) -> None:
        """From now on `events` has the request, and the process exits only when undoing takes longer than this."""
        self._undo_s = seconds

    def _watch(self) -> None:
        _wait_for_end_of_input()
        self.events.put(None)
        if self._undo_s is None:
            os._exit(STOPPED)
        time.sleep(self._undo_s)
        os._exit(1)


def _run(options: argparse.Namespace, stop: Stop) -> int:
    document = load(options.folder / "serve.yaml")
    deploy = ServeDeploySchema.model_validate(document)
    apps = check_document(document, "serve.yaml")
    try:
        _start_ray(options.address, options.dashboard)
        check_node_resources(list(apps.values()))
        signal.signal(signal.SIGTERM, lambda *_: None)  # instead of Ray's handler: the end of standard input tells it
        return _serve(deploy, apps, stop, options)
    except (ConfigError, ConnectionError, AuthenticationError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except StartError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        ray.shutdown()


def _serve(deploy: ServeDeploySchema, apps: dict[str, AppConfig], stop: Stop, options: argparse.Namespace) -> int:
    """Start the applications in a thread, so that a stop interrupts any library code, and run until a stop."""
    is_joined = options.address is not None
    if is_joined:
        stop.undo_within(LEAVE_S)
    starting = threading.Thread(target=_start, args=(deploy, apps, stop, options.folder), daemon=True)
    starting.start()
    try:
        failure = stop.events.get()
        if failure is not None:
            raise failure
        is_ready = not starting.is_alive()
        if is_ready:
            print("stopping after running requests finish; press Ctrl-C again to stop at once", flush=True)
        return 0 if is_ready else STOPPED
    finally:
        for name, app in apps.items():
            _drain(name, app.server.drain_s + DRAIN_SLACK_S)
        # A cluster of our own ends as a whole. If Serve ended first, Ray would report its pending calls as errors.
        if is_joined and not serve.status().applications:
            serve.shutdown()  # type: ignore[no-untyped-call]


def _start(deploy: ServeDeploySchema, apps: dict[str, AppConfig], stop: Stop, folder: Path) -> None:
    """Start the applications and print a line for each."""
    begin = time.monotonic()
    try:
        for line in _start_applications(deploy, apps):
            print(f"{line} ({time.monotonic() - begin:.0f} s)", flush=True)
        (folder / SERVING).touch()
        stop.undo_within(sum(app.server.drain_s + DRAIN_SLACK_S for app in apps.values()) + LEAVE_S)
    except BaseException as failure:
        stop.events.put(failure)


def _wait_for_end_of_input() -> None:
    """Block until standard input ends. If the reader of standard output or error goes away, send it to /dev/null."""
    poll = select.poll()
    for fd in range(3):
        poll.register(fd, select.POLLIN if fd == 0 else 0)
    while True:
        for fd, _ in poll.poll():
            if fd == 0 and not os.read(fd, 1):
                return
            if fd != 0:
                poll.unregister(fd)
                os.dup2(os.open(os.devnull, os.O_WRONLY), fd)


def _start_ray(address: str | None, dashboard_port: int | None) -> None:
    """Join a cluster, or start one on this machine."""
    if address is not None:
        if os.environ["RAY_AUTH_MODE"] == "token" and answers_without_token(address):
            raise ConfigError(
                f"--address {address}: this cluster requires no token, so anyone who reaches it can run code on it; "
                "start it with RAY_AUTH_MODE=token, or set --insecure"
            )
        ray.init(address=address, namespace="serve", logging_level=logging.WARNING)
        return
    has_dashboard = dashboard_port is not None
    for name, value in ONE_LOOP.items():  # for Serve's proxy; this process has imported Serve before
        os.environ.setdefault(name, value)
    ray.init(
        address="local",
        namespace="serve",
        logging_level=logging.WARNING,
        include_dashboard=has_dashboard,
        dashboard_host="127.0.0.1",
        dashboard_port=dashboard_port,
    )
    if dashboard_port is not None:
        token = os.environ["RAY_AUTH_TOKEN_PATH"]
        exporters = Path(os.environ["RAY_TMPDIR"], "ray/prom_metrics_service_discovery.json")
        print(f"Ray's dashboard: http://127.0.0.1:{dashboard_port}, with the token in {token}", flush=True)
        print(f"for `serve deploy`: export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={token}", flush=True)
        print(f"exporters for Prometheus: {exporters}", flush=True)


def answers_without_token(address: str) -> bool:
    """Whether a cluster answers a client without a token. ConfigError if it does not answer at all."""
    command = [str(Path(sys.executable).parent / "ray"), "status", "--address", address]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH_")}
    without_token = environment | {"RAY_AUTH_MODE": "disabled"}
    try:
        asked = subprocess.run(command, env=without_token, capture_output=True, timeout=PROBE_S, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"--address {address}: no Ray cluster answers there within {PROBE_S:g} s") from None
    return asked.returncode == 0


def _start_applications(deploy: ServeDeploySchema, apps: dict[str, AppConfig]) -> Iterator[str]:
    """Start the applications one by one; yields a message for each that is ready. Raises StartError."""
    http = deploy.http_options
    level = _level_of_serve(apps.values())
    set_log_level(level)
    try:
        serve.start(
            proxy_location=deploy.proxy_location,
            http_options=http.model_dump(),
            logging_config={"log_level": level.upper()},
        )
    except RayError as error:
        reason = error_line(str(error)).splitlines()[0]
        raise StartError(
            f"Serve's HTTP proxy did not start ({reason}); check whether the machine is overloaded"
        ) from None
    check_http_port()  # two servers that start together both pass the check before Ray starts
    prefixes = {app.name: (app.route_prefix or "/").rstrip("/") for app in deploy.applications}
    for name, config in apps.items():
        try:
            serve.run(application(config), name=name, route_prefix=prefixes[name] or "/")
        except RuntimeError as error:  # how Serve reports DEPLOY_FAILED
            raise StartError(f"{error} {_reasons(name)}") from None
        url = f"{'https' if http.ssl_certfile else 'http'}://{reachable(http.host)}:{http.port}{prefixes[name]}"
        _wait_until_ready(url)
        yield _announcement(url, config, serve.get_app_handle(name).dtype.remote().result(timeout_s=ASK_S))


def _level_of_serve(apps: Iterable[AppConfig]) -> str:
    """The log level of Serve's own processes and of this one. Serve's messages at `info` are for Serve's developers."""
    level = most_verbose(app.server.log_level for app in apps)
    return "warning" if level == "info" else level


def _reasons(name: str) -> str:
    """Error messages of the application's failed deployments, without their tracebacks."""
    deployments = serve.status().applications[name].deployments.items()
    return " ".join(f"{part}: {error_line(status.message)}" for part, status in deployments if status.message)


def error_line(message: str) -> str:
    """The last line of a message that has an exception in it; the whole message if there is none."""
    errors = re.findall(r"^\s*((?:\w+\.)*\w*(?:Error|Exception): .+)$", message, re.MULTILINE)
    return str(errors[-1]) if errors else message


def _wait_until_ready(url: str) -> None:
    give_up = time.monotonic() + READY_S
    while not _is_ready(url):
        if time.monotonic() > give_up:
            raise StartError(f"{url}/readyz did not answer 200 within {READY_S:g} s of the start; see the log above")
        time.sleep(POLL_S)


def _is_ready(url: str) -> bool:
    # The server is ours and local: no proxy from the environment, and any certificate.
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    try:
        with build_opener(ProxyHandler({}), HTTPSHandler(context=trusting)).open(f"{url}/readyz", timeout=5):
            return True
    except (URLError, OSError):
        return False


def _announcement(url: str, config: AppConfig, dtype: str | None) -> str:
    key = " -H 'Authorization: Bearer KEY'" if config.server.api_key_file else ""
    body = f'{{"model": "{config.model_name}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    curl = f"curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'"
    return f"ready: {summary(config, dtype)} at {url}; try: {curl}"


def _drain(name: str, longest_s: float) -> None:
    """Let an application finish its requests while new ones get 503, and delete it.

    Deleting it at once would finish its requests too, but new ones would get 404 from Serve's proxy.
    """
    give_up = time.monotonic() + longest_s
    _wait_until_idle(name, give_up)
    while name in serve.status().applications and time.monotonic() < give_up:
        try:
            serve.delete(name)
        except TimeoutError:  # Serve waits for one minute; a drain may take longer
            continue


def _wait_until_idle(name: str, give_up: float) -> None:
    """Wait until no request is unfinished; return at once for an application that did not start."""
    num_idle = 0
    while num_idle < 2 and time.monotonic() < give_up:
        try:
            num_unfinished = serve.get_app_handle(name).drain.remote().result(timeout_s=ASK_S)
        except (RayServeException, RayError, TimeoutError):
            return
        num_idle = 0 if num_unfinished else num_idle + 1
        time.sleep(DRAIN_POLL_S)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m cluster.cli.launcher", description="The process behind `specray serve`."
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="contains serve.yaml")
    parser.add_argument("--address", metavar="HOST:PORT", help="join this cluster")
    parser.add_argument("--dashboard", type=int, metavar="PORT", help="start Ray's dashboard on PORT")
    return parser


if __name__ == "__main__":
    main()
