"""Runs a client's scenarios in its environment, and the examples of docs/clients.md with it."""

import json
import os
import re
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from specray.config import EMBEDDED_MODEL
from specray.models.files import resolve_model
from tests.clients.environments import Client, Environment

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
SERVER, NO_KEY = "http://127.0.0.1:8000", '"none"'  # in the page's examples
TIMEOUT_S = 300.0  # of a script, where the server is not slow
PROBE = {"messages": [{"role": "user", "content": "Count."}], "max_tokens": 64, "ignore_eos": True}
PROBE_S = 2.0  # a server that answers PROBE later is slow: other work keeps the machine busy
PROBE_TIMEOUT_S = 60.0  # a server that is slower has a fault
LANGUAGES = {"python": ".py", "javascript": ".mjs", "bash": ".sh"}


class Outcome(NamedTuple):
    """One scenario or example. `error` is None if it passed."""

    name: str
    error: str | None


class Report(NamedTuple):
    version: str
    outcomes: list[Outcome]

    @property
    def failures(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.error is not None]


def slowness(url: str, key: str) -> float:
    """How many times PROBE_S the server takes now, or 1: what time limits are multiplied by."""
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(PROBE).encode(), headers)
    start = time.monotonic()
    with urllib.request.urlopen(request, timeout=PROBE_TIMEOUT_S) as reply:
        reply.read()
    return max(1.0, (time.monotonic() - start) / PROBE_S)


def use(client: Client, environment: Environment, url: str, key: str, slowness: float = 1.0) -> Report:
    """Run everything that uses a client against the server at `url`."""
    timeout_s = TIMEOUT_S * slowness
    variables = {"SPECRAY_URL": url, "SPECRAY_KEY": key, "OPENAI_API_KEY": key, "ANTHROPIC_API_KEY": key}
    variables["SPECRAY_TOKENIZER"] = str(resolve_model(EMBEDDED_MODEL, None, "auto", progress=False))
    variables["SPECRAY_TIMEOUT_S"] = f"{timeout_s:g}"
    variables |= {"HF_HUB_OFFLINE": "1"} if client.is_offline else {}
    finished = _start(environment, client.path, variables, timeout_s)
    version, outcomes = parsed(finished.stdout)
    if finished.returncode:
        outcomes.append(Outcome("the script itself", finished.stderr[-4000:] or f"status {finished.returncode}"))
    for name, script in examples(PAGE.read_text(encoding="utf-8"), client.name):
        path = environment.folder / f"example{script.suffix}"
        path.write_text(script.text.replace(SERVER, url).replace(NO_KEY, json.dumps(key)), encoding="utf-8")
        ended = _start(environment, path, variables, timeout_s)
        outcomes.append(Outcome(name, (ended.stdout + ended.stderr)[-4000:] if ended.returncode else None))
    return Report(version, outcomes)


def parsed(output: str) -> tuple[str, list[Outcome]]:
    """The version and the outcomes that a script has printed. Lines of the client's own are skipped."""
    version, outcomes = "?", []
    for line in output.splitlines():
        if line.startswith('{"version"'):
            version = json.loads(line)["version"]
        elif line.startswith('{"scenario"'):
            fields = json.loads(line)
            outcomes.append(Outcome(fields["scenario"], fields["error"]))
    return version, outcomes


class Script(NamedTuple):
    suffix: str
    text: str


def examples(page: str, client: str) -> Iterator[tuple[str, Script]]:
    """The programs in the section of a client: its heading is the client's name."""
    section = re.search(rf"^## {re.escape(client)}\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE)
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", section[1] if section else "", re.DOTALL | re.MULTILINE)
    programs = [Script(LANGUAGES[language], text) for language, text in blocks if language in LANGUAGES]
    for number, program in enumerate(programs, 1):
        yield f"example {number} of docs/clients.md", program


def _start(
    environment: Environment, script: Path, variables: Mapping[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    names = ("PATH", "LANG", "TMPDIR", "SSL_CERT_FILE")
    own = {name: os.environ[name] for name in names if name in os.environ} | {"HOME": str(environment.folder)}
    if environment.commands is not None:
        own["PATH"] = f"{environment.commands}{os.pathsep}{own['PATH']}"
    command = ["bash", "-e", str(script)] if script.suffix == ".sh" else [str(environment.program), str(script)]
    try:
        return subprocess.run(
            command,
            cwd=environment.folder,
            env=own | dict(variables),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        return subprocess.CompletedProcess(command, 1, output, f"not finished after {timeout_s:g} s")
