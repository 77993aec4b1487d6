"""The openai package as tests use it: synchronous and asynchronous, over a real socket, strictly validated."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import openai

from specray.step import NewRequest
from tests.support.scripted_server import Server

KINDS = ("sync", "async")
Json = dict[str, Any]


class Clients(NamedTuple):
    """Both clients of one server, without retries. The asynchronous one lives in the loop of `runner`."""

    sync: openai.OpenAI
    asynchronous: openai.AsyncOpenAI
    runner: asyncio.Runner

    @classmethod
    def of(cls, url: str, **options: Any) -> "Clients":
        runner = asyncio.Runner()
        options = {"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0} | options
        return cls(openai.OpenAI(**options), openai.AsyncOpenAI(**options), runner)

    def close(self) -> None:
        self.sync.close()
        self.runner.run(self.asynchronous.close())
        self.runner.close()


class Ask:
    """One client of a server. Every object that it returns has been validated by `strict`."""

    def __init__(self, clients: Clients, kind: str) -> None:
        self.kind = kind
        self.clients = clients

    def __call__(self, method: str, **arguments: Any) -> Any:
        """Call `method`, such as `chat.completions.create`. A stream is returned as the list of its chunks."""
        if self.kind == "sync":
            reply = _find(self.clients.sync, method)(**arguments)
            return [strict(chunk) for chunk in reply] if isinstance(reply, openai.Stream) else strict(reply)
        return self.clients.runner.run(self._asynchronously(method, arguments))

    async def _asynchronously(self, method: str, arguments: Json) -> Any:
        reply = await _find(self.clients.asynchronous, method)(**arguments)
        if isinstance(reply, openai.AsyncStream):
            return [strict(chunk) async for chunk in reply]
        return strict(reply)

    def chat(self, **arguments: Any) -> Any:
        return self("chat.completions.create", **arguments)

    def text(self, **arguments: Any) -> Any:
        return self("completions.create", **arguments)

    def response(self, **arguments: Any) -> Any:
        return self("responses.create", **arguments)

    def post(self, path: str, **body: Any) -> Any:
        """A route that the SDK has no method for, through its `post`. `path` is relative to the server."""
        client: Any = self.clients.sync if self.kind == "sync" else self.clients.asynchronous
        url = str(client.base_url).removesuffix("/v1/") + path
        reply = client.post(url, cast_to=object, body=body)
        return reply if self.kind == "sync" else self.clients.runner.run(_awaited(reply))


class Scripted(NamedTuple):
    """A server over scripted ranks, and what reached its ranks since `script` was called."""

    url: str
    server: Server
    clients: Clients
    rows: list[NewRequest]

    def script(self, text: str) -> None:
        """The ranks generate `text`, over and over."""
        self.server.ranks.script = self.server.ranks.tokenizer.encode(text)
        self.rows.clear()

    @property
    def row(self) -> NewRequest:
        return self.rows[0]

    @property
    def prompt(self) -> str:
        """The text of the first prompt."""
        text: str = self.server.ranks.tokenizer.decode(self.row.token_ids[: self.row.num_prompt_tokens])
        return text


def record(server: Server) -> list[NewRequest]:
    """A list that receives what reaches the ranks, apart from the router's own probes."""
    rows: list[NewRequest] = []
    submit = server.ranks.submit

    def recorded(plan: Any) -> None:
        rows.extend(row for row in plan.new_requests if row.token_ids[:1] != [0])
        submit(plan)

    server.ranks.submit = recorded  # type: ignore[method-assign]
    return rows


def strict(value: Any) -> Any:
    """The same object, after a strict validation of everything in it, which the SDK does not do."""
    if not isinstance(value, openai.BaseModel):
        return value
    fields = value.to_dict(mode="json", warnings=False)
    for choice in fields.get("choices", []):
        if "text" in choice and choice["finish_reason"] is None:
            choice["finish_reason"] = "stop"  # the SDK's type forbids the null that OpenAI's own chunks have
        choice.get("message", {}).pop("parsed", None)  # the SDK's own, made from the text
        scores = (choice.get("logprobs") or {}).get("token_logprobs")
        if scores and scores[0] is None:  # so does it that of an echoed prompt's first token
            scores[0], choice["logprobs"]["top_logprobs"][0] = 0.0, {}
    type(value).model_validate(fields, strict=True)
    return value


def first(reply: Any) -> Any:
    return reply.choices[0]


def content(reply: Any) -> str:
    """The text of a reply of any endpoint, or what the chunks of a stream add up to."""
    if isinstance(reply, list):
        return "".join(map(_delta, reply))
    if hasattr(reply, "output_text"):
        text: str = reply.output_text
        return text
    choice = first(reply)
    return (choice.text if hasattr(choice, "text") else choice.message.content) or ""


def generated(reply: Any) -> list[str]:
    """The generated tokens of a reply with log probabilities."""
    logprobs = first(reply).logprobs
    return [entry.token for entry in logprobs.content] if hasattr(logprobs, "content") else logprobs.tokens


def _delta(chunk: Any) -> str:
    if hasattr(chunk, "choices"):
        return "".join((c.text if hasattr(c, "text") else c.delta.content) or "" for c in chunk.choices if c.index == 0)
    return chunk.delta if chunk.type == "response.output_text.delta" else ""


def _find(client: Any, method: str) -> Callable[..., Any]:
    for name in method.split("."):
        client = getattr(client, name)
    found: Callable[..., Any] = client
    return found


async def _awaited(reply: Any) -> Any:
    return await reply


def texts(replies: Sequence[Any]) -> list[str]:
    return [content(reply) for reply in replies]
