"""The whole server in one event loop without Ray: real engine, router and HTTP surface over scripted ranks."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import cluster.router
from cluster.client import RouterClient
from cluster.config import AppConfig
from cluster.openai.app import create_app
from cluster.openai.service import Service
from cluster.openai.tokenization import Tokenization
from cluster.router import Router
from specray.engine.engine import Engine
from specray.engine.executor import Capacity
from specray.errors import EngineDeadError
from specray.outputs import TokenLogprob
from specray.step import NewRow, RowResult, StepPlan, StepResult, StepTimes

TEXT = "The quick brown fox, é 🎉 and so on. "  # what the scripted ranks write, over and over
TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
END = "<|end|>"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Every byte is a token; one special token ends a text."""
    alphabet = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


class ScriptedRanks:
    """An executor whose rows repeat TEXT, up to two accepted drafts a step. `broken` ends it as a dead rank would."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, step_s: float = 0.0) -> None:
        self.script = tokenizer.encode(TEXT)
        self.capacity = Capacity(65, 2, 512, len(tokenizer), [tokenizer.eos_token_id])
        self.step_s = step_s
        self.broken: str | None = None
        self.num_steps = 0
        self._rows: dict[int, NewRow] = {}
        self._pending: dict[int, int] = {}
        self._written: dict[int, int] = {}
        self._results: deque[StepResult] = deque()

    def submit(self, plan: StepPlan) -> None:
        for row in plan.new_rows:
            self._rows[row.slot] = row
            self._pending[row.slot] = len(row.token_ids) - row.num_computed_tokens
            self._written[row.slot] = len(row.token_ids) - row.num_prompt_tokens
        rows = [self._run(step.slot, step.num_tokens, step.max_draft_tokens) for step in plan.rows]
        self._results.append(StepResult(plan.step_id, rows, StepTimes(0.0, 0.0, 0.0, 0.0)))

    def collect(self) -> StepResult:
        time.sleep(self.step_s)
        if self.broken is not None:
            raise EngineDeadError(self.broken)
        self.num_steps += 1
        return self._results.popleft()

    def failure(self) -> str | None:
        return self.broken

    def close(self) -> None:
        pass

    def _run(self, slot: int, num_tokens: int, max_drafts: int) -> RowResult:
        self._pending[slot] -= num_tokens
        if self._pending[slot] > 0:
            return RowResult(slot, [], 0, None, None)
        drafts = min(2, max_drafts)
        start = self._written[slot]
        tokens = [self.script[(start + i) % len(self.script)] for i in range(drafts + 1)]
        self._written[slot] += len(tokens)
        self._pending[slot] = 1
        wanted = self._rows[slot].sampling.logprobs
        logprobs = None if wanted is None else [logprob_of(token, wanted) for token in tokens]
        return RowResult(slot, tokens, drafts, logprobs, None)


def logprob_of(token: int, wanted: int) -> TokenLogprob:
    return TokenLogprob(token, -0.5, [(token, -0.5), (0, -float("inf"))][:wanted])


class Server:
    """A running server and the handles a test needs."""

    def __init__(
        self, http: httpx.AsyncClient, ranks: ScriptedRanks, router: Router, client: RouterClient, left: list[int]
    ) -> None:
        self.left = left  # the exit status, once the router has left its process
        self.http = http
        self.ranks = ranks
        self.router = router
        self.client = client

    async def until(self, condition: Callable[[], bool], seconds: float = 5.0) -> None:
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.005)


Serve = Callable[..., AbstractAsyncContextManager[Server]]


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


@pytest.fixture
def serve(tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> Serve:
    """`async with serve(step_s=..., connect=..., **AppConfig fields) as server`."""

    @asynccontextmanager
    async def run(step_s: float = 0.0, connect: bool = True, **options: Any) -> AsyncIterator[Server]:
        config = AppConfig(model="toy", **options)
        ranks = ScriptedRanks(tokenizer, step_s)
        monkeypatch.setattr(
            cluster.router, "_start_engine",
            lambda _: (ranks, Engine(config.engine, ranks, tokenizer.backend_tokenizer)),
        )  # fmt: skip
        router = object.__new__(Router)
        left: list[int] = []
        await Router.__init__(router, config, leave=left.append)  # type: ignore[misc]
        client = RouterClient(router, config.server.lease_s)
        app = create_app(Service(config, client, lambda: Tokenization(tokenizer)))
        if connect:
            client.start()
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=20.0) as http:
            server = Server(http, ranks, router, client, left)
            if connect:
                await server.until(lambda: client.info is not None)
            yield server
        await client.close()
        router._keeper.cancel()
        await asyncio.to_thread(router._engine.close)

    return run
