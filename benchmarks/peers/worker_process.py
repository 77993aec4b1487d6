"""A worker's process, seen from the runner: start it, ask it, end it. The protocol is in `workers.protocol`."""

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Timer
from types import TracebackType
from typing import Any, Self

from benchmarks.peers.workers.protocol import Answer

LOAD_TIMEOUT_S = 900  # vLLM compiles its model
ANSWER_TIMEOUT_S = 600
END_TIMEOUT_S = 10


class WorkerError(Exception):
    """A worker failed; the message is one line and says why."""


class WorkerProcess:
    """A running worker. Every method raises WorkerError if the worker dies, answers wrongly or takes too long."""

    def __init__(self, command: Sequence[str], cwd: Path, log: Path, environment: Mapping[str, str]) -> None:
        """Start the worker and wait until its model is loaded. `log` takes its standard error."""
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                command,
                cwd=cwd,
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                encoding="utf-8",
            )
        try:
            ready = self._receive(LOAD_TIMEOUT_S)
        except WorkerError:
            self.close()
            raise
        self.version = str(ready["version"])
        self.notes = str(ready["notes"])

    def ask(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Answer:
        """Answers of `max_tokens` tokens to all prompts at once."""
        self._send({"prompts": prompts, "max_tokens": max_tokens})
        answer = Answer(**self._receive(ANSWER_TIMEOUT_S))
        wanted, got = [max_tokens] * len(prompts), [len(tokens) for tokens in answer.tokens]
        if got != wanted:
            raise WorkerError(f"answers have {got} tokens instead of {wanted}")
        return answer

    def close(self) -> None:
        """End the worker, whatever its state."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(END_TIMEOUT_S)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._death() from None

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        watchdog = Timer(timeout_s, self._process.kill)
        watchdog.start()
        line = self._process.stdout.readline()
        in_time = watchdog.is_alive()
        watchdog.cancel()
        if not line:
            raise self._death() if in_time else WorkerError(f"no reply within {timeout_s} s")
        try:
            reply = json.loads(line)
        except json.JSONDecodeError:
            raise WorkerError(f"reply is not JSON: {line.strip()[:80]!r}") from None
        if "error" in reply:
            raise WorkerError(str(reply["error"]).partition("\n")[0])
        return dict(reply)

    def _death(self) -> WorkerError:
        code = self._process.wait()
        lines = [line for line in self._log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        return WorkerError(f"ended with exit code {code}: {lines[-1].strip()[:200] if lines else 'no message'}")
