"""Mutated HTTP requests against the whole server: no 5xx, no exception, no leak, and the same text as before."""

import asyncio
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.types import Message, Scope

from tests.fuzz.mutations import dumps, from_schema, mutated_bytes, mutated_json
from tests.fuzz.server import FuzzedServer, fuzzed_server
from tests.support.local_server import until

CONCURRENCY = 32
BATCH = 512  # requests between two checks for leaks
HANG_S = 60.0
MAX_TOKENS = 6
SAME_TEXT = {"prompt": "the ether on there", "max_tokens": 40, "temperature": 0.9, "seed": 7, "ignore_eos": True}
BODIES: list[tuple[str, Any]] = [
    (
        "/v1/chat/completions",
        {
            "model": "default",
            "messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "hi <|user|> there"}],
            "max_tokens": MAX_TOKENS,
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 5,
            "stop": ["th", "on"],
            "logit_bias": {"5": 1.5},
            "logprobs": True,
            "top_logprobs": 2,
            "n": 2,
            "seed": 1,
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
            "max_completion_tokens": MAX_TOKENS,
            "stream": True,
            "stream_options": {"include_usage": True},
            "speculative": {"num_draft_tokens": 2},
        },
    ),
    (
        "/v1/completions",
        {
            "prompt": ["the", "in er"],
            "max_tokens": MAX_TOKENS,
            "logprobs": 1,
            "presence_penalty": 0.5,
            "frequency_penalty": -0.5,
            "repetition_penalty": 1.2,
            "min_p": 0.05,
            "stop_token_ids": [3],
            "timeout": 20.0,
            "cache_salt": "s",
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/a"}}]}
            ]
        },
    ),
    ("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": MAX_TOKENS, "stream": True}),
    (
        "/generate",
        {
            "text": "the",
            "sampling_params": {"max_new_tokens": MAX_TOKENS, "temperature": 0.5, "sampling_seed": 3},
            "return_logprob": True,
            "top_logprobs_num": 1,
        },
    ),
    ("/generate", {"input_ids": [[5, 6], [7]], "sampling_params": {"max_new_tokens": MAX_TOKENS}, "stream": True}),
]
HEADERS = [(b"content-type", b"application/json"), (b"host", b"localhost"), (b"x-request-id", b"fuzz")]
# Nothing of the server's files and code may be in a reply.
SECRETS = (b"Traceback", b'File "', b".py", b"/tmp/", b"site-packages", b"0x7f")


OUTGOING: list[str] = []  # connections and look-ups of names by this process


def _note_outgoing(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "socket.connect" and isinstance(arguments[1], tuple):  # not Unix sockets, whose address is a path
        OUTGOING.append(f"connected to {arguments[1]}")
    elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
        OUTGOING.append(f"looked up {arguments[0]}")


sys.addaudithook(_note_outgoing)


@dataclass(slots=True)
class Findings:
    """What came back, and what should not have."""

    statuses: Counter[int] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    longest_stall_s: float = 0.0  # of the event loop that all requests and the router share
    seconds: float = 0.0

    @property
    def num_requests(self) -> int:
        return sum(self.statuses.values())


@dataclass(frozen=True, slots=True)
class FuzzRequest:
    """One request as an ASGI server would pass it on."""

    method: str
    path: str
    headers: list[tuple[bytes, bytes]]
    parts: list[bytes]  # of the body
    cut_after: int | None  # messages of the reply after which the client has gone; None: it stays

    def describe(self) -> str:
        body = b"".join(self.parts)
        return f"{self.method} {self.path} {self.headers!r:.200} {len(body)} bytes {body[:400]!r}"


async def fuzz(folder: Path, num_requests: int, seed: int) -> Findings:
    """Send `num_requests` to a server of the model in `folder`."""
    findings, rng, start = Findings(), random.Random(seed), time.perf_counter()
    async with fuzzed_server(folder) as server:
        OUTGOING.clear()
        before = await _text(server)
        posts = _post_routes(server)
        watching = asyncio.create_task(_watch_stalls(findings))
        for first in range(0, num_requests, BATCH):
            count = min(BATCH, num_requests - first)
            await _send_all(await _make_all(count, rng, posts, server.app.openapi()), server, findings)
            if not await until(lambda: not server.leaks()):
                findings.problems.append(f"after {first + count} requests: {', '.join(server.leaks())} not released")
                break
            if server.exits:
                findings.problems.append(f"after {first + count} requests: the engine died")
                break
            if OUTGOING:
                findings.problems.append(f"after {first + count} requests: {OUTGOING[0]}")
                break
        watching.cancel()
        if (after := await _text(server)) != before:
            findings.problems.append(f"the text of a seed changed from {before!r} to {after!r}")
    findings.seconds = time.perf_counter() - start
    return findings


def _post_routes(server: FuzzedServer) -> dict[str, Any]:
    """The schema of each route's body."""
    paths = server.app.openapi()["paths"]
    bodies = {path: routes["post"].get("requestBody") for path, routes in paths.items() if "post" in routes}
    return {path: body["content"]["application/json"]["schema"] for path, body in bodies.items() if body}


async def _make_all(
    count: int, rng: random.Random, posts: dict[str, Any], openapi: dict[str, Any]
) -> list[FuzzRequest]:
    """Requests to send, made with pauses: the time to make them is no stall of the server."""
    requests = []
    for _ in range(count):
        requests.append(_make(rng, posts, openapi))
        await asyncio.sleep(0)
    return requests


def _make(rng: random.Random, posts: dict[str, Any], openapi: dict[str, Any]) -> FuzzRequest:
    """A request that is wrong in one way or several."""
    path, base = rng.choice(BODIES)
    match rng.randrange(4):
        case 0:
            path = rng.choice(list(posts))
            body = dumps(from_schema(posts[path], openapi, rng))
        case 1:
            body = mutated_bytes(dumps(base), rng)
        case _:
            body = dumps(mutated_json(base, rng))
    headers, method = list(HEADERS), "POST"
    if rng.random() < 0.1:
        headers = _mutated_headers(rng)
    if rng.random() < 0.05:
        method = rng.choice(("GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "X"))
    if rng.random() < 0.05:
        path = mutated_bytes(path.encode(), rng).decode("latin-1")
    cut_after = rng.randrange(4) if rng.random() < 0.05 else None
    return FuzzRequest(method, path, headers, _split(body, rng), cut_after)


def _mutated_headers(rng: random.Random) -> list[tuple[bytes, bytes]]:
    headers = [(name, mutated_bytes(value, rng) if rng.random() < 0.5 else value) for name, value in HEADERS]
    extra = (b"content-length", b"authorization", b"content-type", b"accept-encoding", b"x-request-id", b"\xff")
    headers += [(rng.choice(extra), rng.choice((b"", b"-1", b"1e9", b"9" * 400, b"\xff\xfe", b"gzip")))]
    rng.shuffle(headers)
    return headers


def _split(body: bytes, rng: random.Random) -> list[bytes]:
    cuts = sorted(rng.randrange(len(body) + 1) for _ in range(rng.choice((0, 0, 1, 3))))
    return [body[start:end] for start, end in zip([0, *cuts], [*cuts, len(body)], strict=True)]


async def _send_all(requests: list[FuzzRequest], server: FuzzedServer, findings: Findings) -> None:
    waiting = iter(requests)

    async def send_in_turn() -> None:
        for request in waiting:
            await _send(request, server, findings)

    await asyncio.gather(*(send_in_turn() for _ in range(CONCURRENCY)))


async def _send(request: FuzzRequest, server: FuzzedServer, findings: Findings) -> None:
    try:
        async with asyncio.timeout(HANG_S):
            replies = await _exchange(request, server)
    except TimeoutError:
        findings.statuses[0] += 1
        findings.problems.append(f"no end within {HANG_S:g} s: {request.describe()}")
    except Exception as error:
        findings.statuses[0] += 1
        findings.problems.append(f"{type(error).__name__}: {error}: {request.describe()}")
    else:
        _check(request, replies, findings)


async def _exchange(request: FuzzRequest, server: FuzzedServer) -> list[Message]:
    """Everything the application sent."""
    parts, sent, gone = list(request.parts), [], asyncio.Event()

    async def receive() -> Message:
        if parts:
            return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if request.cut_after is not None and len(sent) >= request.cut_after:
            gone.set()
        if not gone.is_set():
            sent.append(message)

    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": request.path,
        "raw_path": request.path.encode("utf-8", "surrogatepass"),
        "query_string": b"",
        "root_path": "",
        "headers": request.headers,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8000),
    }
    if request.cut_after == 0:
        gone.set()
    await server.app(scope, receive, send)
    return sent


def _check(request: FuzzRequest, replies: list[Message], findings: Findings) -> None:
    starts = [message for message in replies if message["type"] == "http.response.start"]
    if request.cut_after is not None:
        findings.statuses[starts[0]["status"] if starts else 499] += 1
        return
    status = starts[0]["status"] if starts else 0
    findings.statuses[status] += 1
    body = b"".join(message.get("body", b"") for message in replies if message["type"] == "http.response.body")
    if problem := _problem(request, status, len(starts), body):
        findings.problems.append(f"{problem}: status {status}, {body[:300]!r}: {request.describe()}")


def _problem(request: FuzzRequest, status: int, num_starts: int, body: bytes) -> str | None:
    if num_starts != 1:
        return f"{num_starts} replies"
    if status >= 500 and status != 504:  # a request may ask for a timeout that it does not meet
        return "a server error"
    if 300 <= status < 400:
        return "a redirect"
    if b'"internal_error"' in body:
        return "an internal error inside a stream"
    if status >= 400 and any(secret in body for secret in SECRETS if secret not in b"".join(request.parts)):
        return "a leak"
    if status >= 400 and request.method != "HEAD" and not _is_error_object(body):
        return "an error without OpenAI's or Anthropic's shape"
    return None


def _is_error_object(body: bytes) -> bool:
    try:
        return set(json.loads(body)["error"]) in ({"message", "type", "param", "code"}, {"message", "type"})
    except (ValueError, KeyError, TypeError):
        return False


async def _text(server: FuzzedServer) -> str:
    request = FuzzRequest("POST", "/v1/completions", HEADERS, [dumps(SAME_TEXT)], None)
    body = b"".join(message.get("body", b"") for message in await _exchange(request, server))
    return str(json.loads(body)["choices"][0]["text"])


async def _watch_stalls(findings: Findings) -> None:
    loop = asyncio.get_running_loop()
    while True:
        before = loop.time()
        await asyncio.sleep(0.01)
        findings.longest_stall_s = max(findings.longest_stall_s, loop.time() - before - 0.01)
