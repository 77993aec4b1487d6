"""The log of finished requests, which `specray replay` reads: one JSON object a line.

One seed gives one text whatever drafts it, so a prompt, its options and its text are all that the target contributes:
what another drafter would have had accepted follows from them. Texts of clients are private, so only tenants that the
operator names are logged, into files that only the server's user can read.
"""

import fcntl
import json
import logging
import os
import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from queue import Full, Queue
from typing import Annotated, Any, TextIO

from pydantic import Field, TypeAdapter, ValidationError

from specray.engine.request import Request
from specray.errors import ConfigError
from specray.outputs import FinishReason
from specray.sampling_params import SamplingParams

EVERY_TENANT = "*"
MAX_ENGINES = 1024  # that write to one folder
MAX_UNWRITTEN = 1024  # requests; those that finish while a slow disk keeps so many waiting are not logged
_PIECE = 65_536  # bytes that are read at once to find the end of the last line
TEXTS = {"prompt_token_ids", "output_token_ids", "predicted_token_ids", "cache_salt", "plain_token_ids"}
# Options that contain text of the client.
TEXT_OPTIONS = ("stop", "logit_bias", "banned_sequences", "allowed_token_ids", "grammar", "logprob_token_ids")

logger = logging.getLogger(__name__)

TokenId = Annotated[int, Field(ge=0, lt=2**31)]


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """One line. A redacted log has no TEXTS and no TEXT_OPTIONS."""

    request_id: str
    tenant: str
    drafter: str  # as in `specray_drafter_info`; "none" for plain decoding
    finish_reason: FinishReason
    params: SamplingParams
    num_prompt_tokens: int
    num_output_tokens: int
    num_drafts: list[int]  # drafts verified in each step after the one that generated the first token
    num_accepted: list[int]  # how many of them the output has
    is_lossy: bool = False  # the text depends on the drafts, so no other drafter can be replayed
    prompt_token_ids: list[TokenId] = field(default_factory=list)
    output_token_ids: list[TokenId] = field(default_factory=list)
    predicted_token_ids: Sequence[TokenId] = ()
    cache_salt: str = ""  # n-grams of texts with another one are not shared
    plain_token_ids: list[TokenId] | None = None  # set if an audit found another text without drafts: this one

    @classmethod
    def of(cls, request: Request, drafter: str, plain_token_ids: list[int] | None = None) -> "LoggedRequest":
        """A request that has finished."""
        assert request.finish_reason is not None
        spec, num_prompt = request.spec, request.num_prompt_tokens
        return cls(
            spec.request_id,
            spec.tenant,
            request.drafter.name if request.drafter is not None else drafter,
            request.finish_reason,
            spec.params,
            num_prompt,
            request.num_output_tokens,
            [drafts for drafts, _ in request.verified],
            [accepted for _, accepted in request.verified],
            request.is_lossy,
            request.token_ids[:num_prompt],
            request.token_ids[num_prompt:],
            spec.predicted_token_ids,
            spec.cache_salt,
            plain_token_ids,
        )

    @property
    def is_redacted(self) -> bool:
        return not self.prompt_token_ids

    def redacted(self) -> dict[str, Any]:
        """The line without anything that a client wrote or read."""
        line = self.to_json()
        for name in TEXTS & line.keys():
            del line[name]
        line["params"] = {name: value for name, value in line["params"].items() if name not in TEXT_OPTIONS}
        return line

    def to_json(self) -> dict[str, Any]:
        line: dict[str, Any] = _LINE.dump_python(self, mode="json")
        line["params"] = _PARAMS.dump_python(self.params, mode="json", exclude_defaults=True)
        if self.plain_token_ids is None:
            del line["plain_token_ids"]
        return line


_LINE = TypeAdapter(LoggedRequest)
_PARAMS = TypeAdapter(SamplingParams)


def read_logs(paths: Sequence[Path]) -> Iterator[LoggedRequest]:
    """The requests of logs, one after another. Errors as for `read_log`, and ConfigError if there are none."""
    is_empty = True
    for logged in chain.from_iterable(map(read_log, paths)):
        is_empty = False
        yield logged
    if is_empty:
        raise ConfigError(
            f"{', '.join(map(str, paths))}: no request is logged there; name the engine-N.jsonl of a server with "
            "server.request_log that has finished requests of server.request_log_tenants"
        )


def read_log(path: Path) -> Iterator[LoggedRequest]:
    """The requests of a log. Raises ConfigError, which names the line, or OSError.

    A last line without its end is left out: a server that was killed may have written a part of it. The next one that
    writes the file cuts it off.
    """
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield _LINE.validate_json(line)
            except ValidationError as error:
                if not line.endswith("\n"):
                    return
                first = error.errors()[0]
                place = ".".join(map(str, first["loc"])) or "the line"
                raise ConfigError(
                    f"{path}, line {number}: {place}: {first['msg']}; name a file that server.request_log has written"
                ) from None


class RequestLog:
    """Files in a folder, written by a thread of their own: `engine-N.jsonl`, and `engine-N.1.jsonl` of older requests.

    N is the first number that no other engine on this machine writes. Both files together have at most `max_bytes`.
    """

    def __init__(self, folder: Path, tenants: Collection[str], max_bytes: int, is_redacted: bool) -> None:
        """Raises ConfigError if the folder cannot be written."""
        self._tenants = frozenset(tenants)
        self._max_file_bytes = max_bytes // 2
        self._is_redacted = is_redacted
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock, self.path = _lock(folder)
            self._file = self._open()
        except OSError as error:
            raise ConfigError(
                f"server.request_log={folder} cannot be written: {error.strerror}; name another folder"
            ) from None
        self._unwritten: Queue[LoggedRequest | None] = Queue(MAX_UNWRITTEN)
        self._has_failed = False
        self._thread = threading.Thread(target=self._write_all, name="specray-request-log", daemon=True)
        self._thread.start()

    def add(self, request: Request, drafter: str, plain_token_ids: list[int] | None = None) -> None:
        """Log a request that has ended, if its text is complete and its tenant has agreed. Never waits for the disk."""
        agreed = EVERY_TENANT in self._tenants or request.spec.tenant in self._tenants
        assert request.finish_reason is not None
        if not agreed or request.spec.is_probe or not request.finish_reason.is_complete:
            return
        try:
            self._unwritten.put_nowait(LoggedRequest.of(request, drafter, plain_token_ids))
        except Full:
            self._warn("the disk is too slow")

    def close(self) -> None:
        """Write what waits, and let another engine use the file."""
        self._unwritten.put(None)
        self._thread.join()
        self._file.close()
        os.close(self._lock)

    def _open(self) -> TextIO:
        if self.path.exists():
            _drop_unfinished_line(self.path)
        return open(self.path, "a", encoding="utf-8", opener=lambda path, flags: os.open(path, flags, 0o600))

    def _write_all(self) -> None:
        while (request := self._unwritten.get()) is not None:
            try:
                if self._file.closed:  # an earlier attempt to begin a new file failed
                    self._file = self._open()
                self._write(request)
            except Exception as error:  # the next ones may be written
                self._warn(repr(error))

    def _write(self, request: LoggedRequest) -> None:
        line = json.dumps(request.redacted() if self._is_redacted else request.to_json(), separators=(",", ":")) + "\n"
        if len(line) > self._max_file_bytes:
            return
        if self._file.tell() + len(line) > self._max_file_bytes:  # JSON is ASCII
            self._file.close()
            self.path.replace(self.path.with_suffix(".1.jsonl"))
            self._file = self._open()
        self._file.write(line)
        self._file.flush()

    def _warn(self, reason: str) -> None:
        if not self._has_failed:
            logger.warning("requests are missing in %s: %s", self.path, reason)
        self._has_failed = True


def _drop_unfinished_line(path: Path) -> None:
    """A server that was killed, or had no room on the disk, may have written a part of a line."""
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - _PIECE)
            file.seek(start)
            if newline := file.read(end - start).rfind(b"\n") + 1:
                end = start + newline
                break
            end = start
        file.truncate(end)


def _lock(folder: Path) -> tuple[int, Path]:
    """(a file descriptor that holds the lock while this process lives, the log file that it is for)."""
    for number in range(MAX_ENGINES):
        descriptor = os.open(folder / f"engine-{number}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
        else:
            return descriptor, folder / f"engine-{number}.jsonl"
    raise ConfigError(f"server.request_log={folder}: {MAX_ENGINES} engines write there; name another folder")
