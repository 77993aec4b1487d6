"""The endpoints of operators and their tools: probes, load, and the state of the engines."""

import uuid
from math import inf
from typing import Any

from specray.engine.engine_request import EngineRequest
from specray.metrics import number
from specray.sampling_params import SamplingParams
from specray.server.config import ServingConfig
from specray.server.errors import ApiError
from specray.server.model import ServedModel
from specray.server.monitoring.metric_aliases import accept_length
from specray.server.routing.client import NOT_READY
from specray.server.routing.router_pool import DRAINING, RouterPool
from specray.server.submission import RequestSubmitter

GENERATION_TIMEOUT_S = 20.0  # of /health_generate, as SGLang's
PRIVATE_OPTIONS = {"api_key_file", "admin_key_file", "request_log", "request_log_tenants"}
MAX_TOKEN_AGE_S = 5.0  # /readyz; an idle engine generates a probe token every few seconds

Json = dict[str, Any]


class OperationEndpoints:
    """What the endpoints answer that ask more than one part of the server."""

    def __init__(
        self, config: ServingConfig, router_pool: RouterPool, model: ServedModel, submitter: RequestSubmitter
    ) -> None:
        self._config = config
        self._router_pool = router_pool
        self._model = model
        self._submitter = submitter

    async def check_health(self) -> Json:
        """The reply of /health. ApiError (503) unless a request would be served now."""
        self._check_not_draining()
        if not self._router_pool.is_connected:
            raise ApiError(503, NOT_READY)
        await self._model.tokenization()
        absent = self._router_pool.absent_drafters
        return {"status": "ok"} | ({"absent_drafters": absent} if absent else {})

    async def check_generation(self) -> None:
        """Generate one token. SpecRayError or ApiError if no engine can."""
        _, timeout_s = await self._submitter.admit(GENERATION_TIMEOUT_S)
        params = SamplingParams(max_tokens=1, temperature=0.0, seed=0, ignore_eos=True)
        request = EngineRequest(f"health-{uuid.uuid4().hex}", [0], params, is_probe=True)
        request_stream = await self._router_pool.submit([request], timeout_s)
        try:
            async for _ in request_stream.outputs():
                pass
        finally:
            request_stream.close()

    def check_ready(self) -> None:
        """Raise ApiError (503) if the server is draining or no engine generated a token recently."""
        self._check_not_draining()
        if (seconds := self._router_pool.since_token_s) > MAX_TOKEN_AGE_S:
            last = "none has been generated yet" if seconds == inf else f"the last one was {seconds:.0f} s ago"
            raise ApiError(503, f"no engine is generating tokens: {last}; try again later")

    async def num_requests(self) -> int:
        """Requests that are computed or wait, on all engines."""
        names = ("specray_num_requests_running", "specray_num_requests_waiting")
        return int(
            sum(number(snapshot, name) for snapshot in (await self._router_pool.stats()).values() for name in names)
        )

    async def server_info(self) -> Json:
        """SGLang's /server_info: options in effect but paths and names of tenants, and the state of the engines."""
        info = self._model.info
        speculative = self._router_pool.drafter_rollout.speculative.model_dump()
        return {
            **self._config.model_dump(exclude={"speculative": True, "server": PRIVATE_OPTIONS}),
            **{f"speculative_{name}": value for name, value in speculative.items()},
            "max_total_num_tokens": info.num_kv_tokens,
            "max_draft_tokens": info.max_draft_tokens,
            "draft_mps": info.mps,
            "sums_over_ranks": info.sums_over_ranks,
            "draft_ranks": self._config.draft_ranks(self._router_pool.drafter_rollout.speculative),
            "since_token_s": self._router_pool.token_ages,
            "rank_nodes": self._router_pool.rank_nodes,
            "absent_drafters": self._router_pool.absent_drafters,
            "num_failovers": self._router_pool.num_failovers,  # of this ingress replica
            "internal_states": [
                snapshot | {"avg_spec_accept_length": accept_length(snapshot)}  # SGLang's benchmarks print it
                for snapshot in (await self._router_pool.stats()).values()
            ],
        }

    def _check_not_draining(self) -> None:
        if self._router_pool.is_draining:
            raise ApiError(503, DRAINING)
