"""A server in one event loop without Ray: real engine, router and HTTP application over scripted ranks."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import cluster.engine.router
import specray.server.routing.router_pool
from cluster.config import AppConfig
from cluster.engine.router import NOT_CONNECTED, Router
from cluster.engine.supervisor import DrafterState
from specray.config import SpeculativeConfig
from specray.draft_trace import VerifiedTree
from specray.engine.engine import Engine
from specray.engine.engine_request import EngineRequest
from specray.engine.executor import Capacity
from specray.errors import EngineDeadError, SpecRayError
from specray.metrics import Snapshot
from specray.outputs import TokenLogprob
from specray.server.app import create_app
from specray.server.grammar_check import GrammarCheck
from specray.server.routing.messages import DesiredDrafter, Item, Refusal
from specray.server.routing.router_pool import RouterPool
from specray.server.routing.subset import IngressPlace
from specray.server.service import Service
from specray.server.tokenization import Tokenization
from specray.step import NewRequest, RequestResult, StepPlan, StepResult, StepTimes
from specray.worker.remote_drafter.handshake import DrafterHandshake
from tests.support.processes import TIMEOUT_S
from tests.support.routers import start_router

TEXT = "The quick brown fox, é 🎉 and so on. "  # the output of scripted ranks, repeated
TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
END = "<|end|>"
FATAL = "DIE!"
LOOK_S = 0.2  # between an ingress's looks at the list of routers, which does not push its changes
REJECTED = 1  # the token of rejected drafts in scripted trees


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Every byte is a token; one special token ends a text."""
    alphabet = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


class ScriptedSupervisor:
    """Loads any drafter at once, except those in `refused`."""

    def __init__(self) -> None:
        self.state = DrafterState("off", SpeculativeConfig(), None, 0)
        self.refused: dict[SpeculativeConfig, SpecRayError] = {}
        self.loaded: list[SpeculativeConfig] = []  # in order

    def replace(self, speculative: SpeculativeConfig) -> DrafterHandshake:
        if error := self.refused.get(speculative):
            raise error
        self.loaded.append(speculative)
        self.keep(speculative)
        return DrafterHandshake((speculative.max_num_nodes or 1) - 1, [], False)

    def keep(self, speculative: SpeculativeConfig) -> None:
        self.state = self.state._replace(state="ready" if speculative.has_drafter else "off", speculative=speculative)


class ScriptedRanks:
    """An executor whose rows repeat TEXT, with up to two accepted drafts per step.

    `broken` simulates a dead rank. A request whose prompt contains FATAL breaks it in the step that computes it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, step_s: float = 0.0, context_length: int = 512) -> None:
        self.tokenizer = tokenizer
        self.script = tokenizer.encode(TEXT)
        self.capacity = Capacity(context_length // 8 + 1, 2, context_length, len(tokenizer), [tokenizer.eos_token_id])
        self.drafter = ScriptedSupervisor()
        self.drafter_absence = ""
        self.rank_nodes = ("10.0.0.1",)
        self.mps = "off"
        self.step_s = step_s
        self.broken: str | None = None
        self.is_stopped = False
        self.num_steps = 0
        self._rows: dict[int, NewRequest] = {}
        self._pending: dict[int, int] = {}
        self._written: dict[int, int] = {}
        self._results: deque[StepResult] = deque()

    def submit(self, plan: StepPlan) -> None:
        for row in plan.new_requests:
            self._rows[row.slot] = row
            self._pending[row.slot] = len(row.token_ids) - row.num_computed_tokens
            self._written[row.slot] = len(row.token_ids) - row.num_prompt_tokens
        if any(FATAL in self.tokenizer.decode(self._rows[step.slot].token_ids) for step in plan.rows):
            self.broken = "rank 0 of the target died"
        rows = [self._run(step.slot, step.num_tokens, step.draft_limit.num_tokens) for step in plan.rows]
        self._results.append(StepResult(plan.step_id, rows, StepTimes(0.0, 0.0, 0.0, 0.0)))

    def collect(self) -> StepResult:
        time.sleep(self.step_s)
        if self.broken is not None:
            raise EngineDeadError(self.broken)
        self.num_steps += 1
        return self._results.popleft()

    def failure(self) -> str | None:
        return self.broken

    def stop(self) -> None:
        self.is_stopped = True

    def close(self) -> None:
        pass

    def _run(self, slot: int, num_tokens: int, max_draft_tokens: int) -> RequestResult:
        prompt_logprobs = self._prompt_logprobs(slot, num_tokens)
        self._pending[slot] -= num_tokens
        if self._pending[slot] > 0:
            return RequestResult(slot, [], 0, None, None, prompt_logprobs=prompt_logprobs)
        drafts = min(2, max_draft_tokens)
        start = self._written[slot]
        tokens = [self.script[(start + i) % len(self.script)] for i in range(drafts + 1)]
        self._written[slot] += len(tokens)
        self._pending[slot] = 1
        wanted = self._rows[slot].sampling.logprobs
        chosen = tuple((token, -2.0) for token in self._rows[slot].sampling.logprob_token_ids or ())
        logprobs = None if wanted is None else [logprob_of(token, wanted)._replace(chosen=chosen) for token in tokens]
        tree = tree_of(tokens[:-1]) if self._rows[slot].traces_drafts else None
        nodes = list(range(2, drafts + 2))
        return RequestResult(slot, tokens, drafts, logprobs, None, nodes, prompt_logprobs, tree)

    def _prompt_logprobs(self, slot: int, num_tokens: int) -> list[TokenLogprob] | None:
        """Those of the prompt tokens after the `num_tokens` that are computed now."""
        row = self._rows[slot]
        if row.prompt_logprobs is None or self._written[slot]:
            return None
        first = row.num_prompt_tokens - self._pending[slot]
        tokens = row.token_ids[max(first, row.prompt_logprobs.start) + 1 : first + num_tokens + 1]
        return [logprob_of(token, row.prompt_logprobs.num_top) for token in tokens]


def tree_of(accepted: list[int]) -> VerifiedTree:
    """A chain of accepted drafts. The first one comes after a rejected sibling."""
    if not accepted:
        return VerifiedTree([0], [-1])
    return VerifiedTree([0, REJECTED, *accepted], [-1, 0, 0, *range(2, len(accepted) + 1)])


def logprob_of(token: int, wanted: int) -> TokenLogprob:
    return TokenLogprob(token, -0.5, [(token, -0.5), (0, -float("inf"))][:wanted])


class Replica:
    """One router over scripted ranks, and the faults that tests inject."""

    def __init__(self, replica_id: str, ranks: ScriptedRanks, router: Router, exit_statuses: list[int]) -> None:
        self.replica_id = replica_id
        self.ranks = ranks
        self.router = router
        self.exit_statuses = exit_statuses  # of the router's process; empty while it runs
        self.is_dead = False
        self.is_stopping = False  # Serve no longer lists it and waits for its calls to end
        self.runs = asyncio.Event()
        self.runs.set()

    @property
    def runs_on(self) -> bool:
        return not self.is_dead and not self.exit_statuses

    def kill(self) -> None:
        self.is_dead = True
        self.end_streams()

    def end_streams(self) -> None:
        """End them as a process that is gone: without a ConnectionEnd."""
        for connection in self.router._connections._by_id.values():
            connection.items.put_nowait([])  # wakes the reader, which finds the process gone

    def freeze(self) -> None:
        self.runs.clear()

    def thaw(self) -> None:
        self.runs.set()

    async def end(self) -> None:
        for task in self.router._background:
            task.cancel()
        await asyncio.to_thread(self.router._engine.close)


class ReplicaHandle:
    """A `RouterHandle` to a router that may be dead or frozen."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    async def outputs(self, connection_id: str) -> AsyncIterator[Item]:
        router = await self._reach()
        async for item in router.outputs(connection_id):
            await self._reach()
            yield item

    async def submit(self, connection_id: str, requests: list[EngineRequest]) -> Refusal | None:
        if self._replica.is_stopping:  # Serve sends calls to an unlisted replica to another one, which refuses them
            return Refusal(EngineDeadError.status, NOT_CONNECTED, None)
        return await (await self._reach()).submit(connection_id, requests)

    async def abort(self, request_ids: list[str]) -> None:
        await (await self._reach()).abort(request_ids)

    async def renew(self, connection_id: str, num_refused: int, num_poison: int) -> bool:
        if self._replica.is_stopping:  # Serve retries calls to an unlisted replica forever
            await asyncio.Event().wait()
        return await (await self._reach()).renew(connection_id, num_refused, num_poison)

    async def stats(self) -> Snapshot:
        return await (await self._reach()).stats()

    async def drafter(self) -> dict[str, Any]:
        return await (await self._reach()).drafter()

    async def apply(self, desired: DesiredDrafter) -> Refusal | None:
        return await (await self._reach()).apply(desired)

    async def drain(self) -> int:
        return await (await self._reach()).drain()

    async def abort_of(self, tenant: str, name: str | None) -> None:
        await (await self._reach()).abort_of(tenant, name)

    async def flush_cache(self) -> None:
        await (await self._reach()).flush_cache()

    async def _reach(self) -> Router:
        await self._replica.runs.wait()
        if not self._replica.runs_on:
            raise ConnectionError("the process is gone")
        return self._replica.router


class Server:
    """A running server. Most tests use `replicas[0]` only."""

    def __init__(self, start: Callable[[str], Awaitable[Replica]]) -> None:
        self._start = start
        self._num_started = 0
        self.replicas: list[Replica] = []
        self.nodes_lost: list[str] = []
        self.http: httpx.AsyncClient
        self.app: FastAPI
        self.service: Service
        self.router_pool: RouterPool

    async def add_replica(self) -> Replica:
        self._num_started += 1
        self.replicas.append(await self._start(f"replica-{self._num_started}"))
        return self.replicas[-1]

    def replica_ids(self) -> list[str]:
        return [replica.replica_id for replica in self.replicas if replica.runs_on and not replica.is_stopping]

    def place(self) -> IngressPlace:
        return IngressPlace()

    def subscribe(self, changed: Callable[[], object]) -> None:
        """Changes are found by looking, see DIRECTORY_CHECK_S."""

    def lost_nodes(self) -> list[str]:
        return self.nodes_lost

    def handle(self, replica_id: str) -> ReplicaHandle:
        return ReplicaHandle(next(replica for replica in self.replicas if replica.replica_id == replica_id))

    @property
    def ranks(self) -> ScriptedRanks:
        return self.replicas[0].ranks

    @property
    def router(self) -> Router:
        return self.replicas[0].router

    @property
    def exit_statuses(self) -> list[int]:
        return self.replicas[0].exit_statuses

    @property
    def num_connected(self) -> int:
        return sum(client.info is not None for client in self.router_pool._clients.values())

    async def until(self, condition: Callable[[], bool], seconds: float = TIMEOUT_S) -> None:
        """As `wait_until`."""
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.005)


@asynccontextmanager
async def listening(server: Server) -> AsyncIterator[str]:
    """Serve the application on a real socket, for clients that disconnect at any byte. Yields its URL."""
    front = uvicorn.Server(uvicorn.Config(server.app, port=0, log_level="critical"))
    serving = asyncio.create_task(front.serve())
    await server.until(lambda: front.started)
    port = front.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        front.should_exit = True
        await serving


Serve = Callable[..., AbstractAsyncContextManager[Server]]


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


@pytest.fixture
def serve(tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> Serve:
    """`async with serve(step_s=..., connect=..., **AppConfig fields) as server`. Grammars are not compiled."""
    return make_serve(tokenizer, monkeypatch)


def make_serve(tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> Serve:
    """The fixture `serve`, for servers that outlive a test."""

    async def pass_all(*_: object) -> None:
        pass

    monkeypatch.setattr(GrammarCheck, "check", pass_all)
    monkeypatch.setattr(specray.server.routing.router_pool, "DIRECTORY_CHECK_S", LOOK_S)

    @asynccontextmanager
    async def run(
        step_s: float = 0.0, connect: bool = True, num_replicas: int = 1, longest: int = 512, **options: Any
    ) -> AsyncIterator[Server]:
        config = AppConfig(model="toy", **options)

        async def start(replica_id: str) -> Replica:
            ranks = ScriptedRanks(tokenizer, step_s, longest)
            monkeypatch.setattr(
                cluster.engine.router,
                "_start_engine",
                lambda _: (ranks, Engine(config.engine, ranks, tokenizer.backend_tokenizer)),
            )
            exit_statuses: list[int] = []
            router = await start_router(config, exit_statuses.append)
            return Replica(replica_id, ranks, router, exit_statuses)

        server = Server(start)
        for _ in range(num_replicas):
            await server.add_replica()
        server.router_pool = RouterPool(server, config)
        server.service = Service(config, server.router_pool, lambda length: Tokenization(tokenizer, length))
        app = server.app = create_app(server.service)
        if connect:
            server.router_pool.start()
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=20.0) as http:
                server.http = http
                if connect:
                    await server.until(lambda: server.num_connected == num_replicas)
                yield server
        finally:  # also if the test has failed: the engines' threads would go on and deliver to a closed loop
            await server.router_pool.close()
            for replica in server.replicas:
                replica.thaw()
                await replica.end()

    return run
