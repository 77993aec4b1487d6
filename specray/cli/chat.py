"""`specray chat`: chat with a running server over OpenAI's API, in a terminal or through a pipe."""

import argparse
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from specray.cli.arguments import KEY_VARIABLE, add_api_key, add_url
from specray.errors import SpecRayError

if TYPE_CHECKING:
    from openai import OpenAI

HELP = "Type a message. /reset clears the conversation, /exit or Ctrl-D exits, Ctrl-C stops an answer."


class ServerError(SpecRayError):
    """The server could not be reached or returned an error."""


@dataclass(slots=True)
class StreamedAnswer:
    """One streamed answer. `usage` is empty until the stream ends."""

    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0  # time from the request to the last piece of text
    is_cut: bool = False  # whether max_tokens or the end of the context ended it

    @property
    def num_tokens(self) -> int:
        return int(self.usage.get("completion_tokens", 0))

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds if self.seconds else 0.0

    @property
    def accept_length(self) -> float | None:
        """Tokens per verify step, with the bonus token; None if the server does not report it."""
        value = self._speculative.get("accept_length")
        return None if value is None else float(value)

    @property
    def undrafted_reason(self) -> str:
        """The usual reason, if most steps had no drafts; else empty."""
        reasons = self._speculative.get("undrafted_steps") or {}
        is_most = 2 * sum(reasons.values()) > self._speculative["verify_steps"] if reasons else False
        return max(reasons, key=reasons.__getitem__) if is_most else ""

    @property
    def _speculative(self) -> dict[str, Any]:
        return self.usage.get("speculative") or {}

    def summary(self) -> str:
        parts = [f"{self.num_tokens} tokens", f"{self.tokens_per_s:.1f} tokens/s"]
        if self.accept_length is not None:
            parts.append(f"accept length {self.accept_length:.2f}")
        if self.undrafted_reason:
            parts.append(f"most steps without drafts ({self.undrafted_reason})")
        if self.is_cut:
            parts.append("cut at its limit, which --max-tokens sets")
        return ", ".join(parts)


def connect(url: str, api_key: str | None = None) -> "OpenAI":
    """A client of the server at `url`. SpecRayError if the package openai is missing."""
    try:
        from openai import DefaultHttpxClient, OpenAI
    except ImportError:
        raise SpecRayError("the package openai is not installed; run: pip install openai") from None
    is_local = urlsplit(url).hostname in ("127.0.0.1", "::1", "localhost")  # ignore proxies from the environment
    http = DefaultHttpxClient(trust_env=not is_local)
    key = api_key or "none"  # the package requires one
    return OpenAI(base_url=f"{url.rstrip('/')}/v1", api_key=key, max_retries=0, http_client=http)


def first_model(client: "OpenAI") -> str:
    """Name of the first model that the server lists. Raises ServerError."""
    with _server_errors(client):
        return client.models.list().data[0].id


def stream_answer(client: "OpenAI", answer: StreamedAnswer, **request: Any) -> Iterator[str]:
    """Send a request and yield its text as it arrives; `answer` is filled meanwhile. Raises ServerError."""
    start = time.perf_counter()
    with (
        _server_errors(client),
        client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **request) as stream,
    ):
        for chunk in stream:
            if chunk.usage is not None:
                answer.usage = chunk.usage.model_dump()
            if chunk.choices:
                answer.is_cut = chunk.choices[0].finish_reason == "length"
            piece = chunk.choices[0].delta.content if chunk.choices else None
            if piece:
                answer.text += piece
                answer.seconds = time.perf_counter() - start
                yield piece


class Chat:
    """A conversation: its messages, and the options of every request."""

    def __init__(self, client: "OpenAI", system: str | None, options: dict[str, Any]) -> None:
        self._client = client
        self._options = options
        self._start = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._start)

    def reset(self) -> None:
        self._messages = list(self._start)

    def ask(self, text: str) -> None:
        """Print the answer to `text` as it arrives. A failed question is removed, a stopped answer kept."""
        self._messages.append({"role": "user", "content": text})
        answer = StreamedAnswer()
        try:
            for piece in stream_answer(self._client, answer, messages=self._messages, **self._options):
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            print(" [stopped]", end="")
        except ServerError:
            self._messages.pop()
            raise
        self._messages.append({"role": "assistant", "content": answer.text})
        print()
        if answer.usage:
            print(f"[{answer.summary()}]", file=sys.stderr, flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_url(parser)
    add_api_key(parser)
    parser.add_argument("--model", help="model name (default: the first one that the server lists)")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument(
        "--temperature", type=float, help="sampling temperature; 0 decodes greedily (default: the server's)"
    )
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="maximum length of an answer (default: the server's)"
    )
    parser.add_argument("--seed", type=int, help="seed of the sampling (default: a new one per request)")


def run(options: argparse.Namespace) -> int:
    """Run the command. Returns 1 if a piped question failed; in a terminal, errors are only printed."""
    client = connect(options.url, options.api_key)
    chosen = {name: getattr(options, name) for name in ("temperature", "max_tokens", "seed")}
    request = {name: value for name, value in chosen.items() if value is not None}
    chat = Chat(client, options.system, {"model": options.model or first_model(client), **request})
    interactive = sys.stdin.isatty()
    if interactive:
        print(HELP)
    failed = False
    for line in _lines(interactive):
        if line == "/exit":
            break
        failed |= not _answer_line(chat, line)
    return int(failed and not interactive)


def _answer_line(chat: Chat, line: str) -> bool:
    if line == "/reset":
        chat.reset()
    elif line:
        try:
            chat.ask(line)
        except ServerError as error:
            print(f"error: {error}", file=sys.stderr)
            return False
    return True


def _lines(interactive: bool) -> Iterator[str]:
    """Lines typed by the user or read from a pipe."""
    yield from (line.strip() for line in (_typed() if interactive else sys.stdin))


def _typed() -> Iterable[str]:
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return


@contextmanager
def _server_errors(client: "OpenAI") -> Iterator[None]:
    """Turn exceptions of the openai package into ServerError."""
    from openai import APIConnectionError, APIError, APIStatusError, AuthenticationError

    try:
        yield
    except AuthenticationError:
        raise ServerError(
            f"{client.base_url} refuses the API key; set {KEY_VARIABLE} or --api-key to a valid one"
        ) from None
    except APIStatusError as error:
        raise ServerError(f"{client.base_url} answered {error.status_code}: {error.message}") from None
    except APIConnectionError as error:
        raise ServerError(
            f"no server answers at {client.base_url} ({error.__cause__ or error}); start one with "
            "`specray serve configs/eagle3.yaml`, or set --url"
        ) from None
    except APIError as error:  # an error event inside a stream
        raise ServerError(f"{client.base_url} ended the stream with an error: {error.message}") from None
