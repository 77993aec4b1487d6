"""The served model: its names, the engines' limits, and its tokenizer, which is loaded once an engine is connected."""

import asyncio
import hashlib
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from specray.models.tokenizer import sampling_defaults
from specray.sampling_params import SamplingParams
from specray.server.config import ServingConfig
from specray.server.errors import ApiError, short_repr
from specray.server.replies import ReplyMetadata
from specray.server.routing.client import NOT_READY
from specray.server.routing.messages import RouterInfo
from specray.server.routing.router_pool import RouterPool
from specray.server.speculation import SpeculationCapabilities
from specray.server.tokenization import Tokenization

Json = dict[str, Any]


class ServedModel:
    """The model that all engines of a server have.

    `load` builds the tokenization for a context length. It is called once, after a router is connected.
    """

    def __init__(self, config: ServingConfig, router_pool: RouterPool, load: Callable[[int], Tokenization]) -> None:
        self.sampling_defaults: Mapping[str, float | int] = {}  # the model's own, set with its tokenization
        self._config = config
        self._router_pool = router_pool
        self._load = load
        self._loading = asyncio.Lock()
        self._tokenization: Tokenization | None = None
        self._created = int(time.time())
        digest = hashlib.sha256(config.engine.model_dump_json().encode()).hexdigest()
        self._fingerprint = f"fp_{digest[:12]}"

    @property
    def info(self) -> RouterInfo:
        """The engines' model and limits. ApiError (503) before one is connected."""
        if self._router_pool.info is None:
            raise ApiError(503, NOT_READY)
        return self._router_pool.info

    async def tokenization(self) -> Tokenization:
        """The tokenizer. ApiError (503) before an engine is connected."""
        info = self.info
        async with self._loading:
            if self._tokenization is None:
                tokenization = await asyncio.to_thread(self._load, info.context_length)
                if self._config.server.generation_config == "auto":
                    self.sampling_defaults = sampling_defaults(Path(tokenization.folder))
                self._tokenization = tokenization
        return self._tokenization

    @property
    def speculation(self) -> SpeculationCapabilities:
        """The speculation options that requests may set at present."""
        info = self.info
        arithmetic = " and ".join(filter(None, (self._config.quantization, info.dtype)))
        speculative = self._router_pool.drafter_rollout.speculative
        return SpeculationCapabilities(speculative, info.max_draft_tokens, arithmetic, info.has_one_text)

    def check_name(self, name: str | None) -> None:
        """ApiError (404) unless a request's `model` is this server's."""
        if name is not None and name not in self._config.model_names and not self._config.server.any_model_name:
            message = f"model={short_repr(name)} is not served here; use {self._config.model_name!r}"
            raise ApiError(404, message, "model", "model_not_found")

    def metadata(self, id_prefix: str, params: SamplingParams) -> ReplyMetadata:
        """The fields of a new reply, with an ID of its own."""
        assert params.seed is not None
        request_id, is_simulated = f"{id_prefix}-{uuid.uuid4().hex}", self._config.speculative.is_simulated
        num_drafts = self.info.max_draft_tokens
        return ReplyMetadata(
            request_id, self._config.model_name, self._fingerprint, params.seed, is_simulated, num_drafts
        )

    def listing(self) -> Json:
        """OpenAI's /v1/models."""
        names = self._config.server.served_model_name or [self._config.model_name]
        return {"object": "list", "data": [self.entry(name) for name in names]}

    def entry(self, name: str) -> Json:
        """OpenAI's /v1/models/{name}. ApiError (404) if it is not served."""
        self.check_name(name)
        info = self._router_pool.info
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "specray",
            "root": self._config.model,
            "parent": None,
            "max_model_len": info.context_length if info else self._config.context_length,
        }

    def capabilities(self) -> Json:
        """The speculation options a request may set, and how speculation affects its output."""
        without = list(self.info.without_graphs)
        return {"model": self._config.model_name, **self.speculation.capabilities(), "without_cuda_graphs": without}

    async def details(self) -> Json:
        """SGLang's /get_model_info."""
        info = self.info
        await self.tokenization()
        return {
            "model_path": self._config.model,
            "tokenizer_path": self._config.model,
            "served_model_name": self._config.model_name,
            "is_generation": True,
            "max_model_len": info.context_length,
            "vocab_size": info.vocab_size,
            "eos_token_ids": info.eos_token_ids,
            "preferred_sampling_params": dict(self.sampling_defaults),
        }
