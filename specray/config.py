"""The engine's configuration: one frozen pydantic tree, checked as a whole when it is built.

What lives here: every option of the engine, its bounds, cross-field checks and automatic values
that need no model. Not here: options of the HTTP server (`cluster.config`), the drafters' names
(`specray.spec_decode.DRAFTERS`) and anything that opens a file.
"""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from specray.errors import ConfigError

EMBEDDED_MODEL = "smollm2-135m-instruct"
MAX_TREE_NODES = 128  # of a draft tree, its root included

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


class Options(BaseModel):
    """Base of every part: frozen, unknown keys refused, no silent coercion of types."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class SpeculativeConfig(Options):
    """How drafts are made; option names are those of SGLang's documentation."""

    algorithm: str | None = Field(
        None, description="Drafting method, a key of DRAFTERS (EAGLE3, EAGLE, NGRAM); null decodes plainly."
    )
    num_steps: Annotated[int, Field(ge=1, le=32)] | None = Field(
        None, description="Depth of a draft tree. Set it with eagle_topk and num_draft_tokens, or none of the three."
    )
    eagle_topk: Annotated[int, Field(ge=1, le=32)] | None = Field(
        None, description="Children drafted below a node, and nodes expanded per level; 1 drafts a chain."
    )
    num_draft_tokens: Annotated[int, Field(ge=2, le=MAX_TREE_NODES)] | None = Field(
        None, description="Nodes of a draft tree, the root (last known token) included; null takes the method's own."
    )

    max_step_draft_tokens: Annotated[int, Field(ge=1, le=100_000)] | None = Field(
        None,
        description="Draft tokens verified in a step, all requests together: many requests at once get smaller trees, "
        "none at all where it does not reach. null: no bound.",
    )

    draft_model_path: str | None = Field(
        None, min_length=1, description="Draft head or model: embedded name, local folder or hub name."
    )
    draft_model_revision: str | None = Field(None, description="Commit, branch or tag of a draft model on the hub.")
    draft_load_format: Literal["auto", "safetensors", "bin"] = Field("auto", description="Its weight files to read.")
    draft_dtype: Dtype = Field("auto", description="Type of its weights and KV; auto takes the target's.")
    token_map: str | None = Field(
        None,
        min_length=1,
        description="FR-Spec: file of frequent token ids (.pt or .json); drafts are chosen among these.",
    )

    def changed(self) -> set[str]:
        """Names of the options that do not have their default."""
        return {name for name, option in type(self).model_fields.items() if getattr(self, name) != option.default}

    @model_validator(mode="after")
    def _needs_algorithm(self) -> Self:
        if self.algorithm is None and (changed := sorted(self.changed())):
            name = changed[0]
            raise ConfigError(
                f"speculative.{name}={getattr(self, name)!r} has no effect while speculative.algorithm is null; "
                f"set an algorithm (EAGLE3, EAGLE, NGRAM) or remove {name}"
            )
        return self


class EngineConfig(Options):
    """Everything one engine (one target group) needs."""

    model: str = Field(EMBEDDED_MODEL, min_length=1, description="Embedded name, local folder, .gguf file or hub name.")
    revision: str | None = Field(None, description="Commit, branch or tag of a hub model.")
    load_format: Literal["auto", "safetensors", "gguf", "bin"] = Field("auto", description="Weight files to read.")
    dtype: Dtype = Field(
        "auto",
        description="Type of weights and KV; auto takes the checkpoint's, for float32 bfloat16 where it is fast.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where the target runs; auto takes a GPU if there is one."
    )
    tp_size: int = Field(1, ge=1, le=64, description="Tensor-parallel ranks of the target.")
    attention_backend: Literal["auto", "torch"] = Field(
        "auto", description="Attention kernels; auto takes the fastest that fits."
    )
    num_threads: int | None = Field(
        None, ge=1, le=1024, description="Compute threads of a rank on CPU; null: cores / ranks, served: one core less."
    )

    context_length: int | None = Field(
        None, ge=2, le=10_000_000, description="Longest prompt + output; null takes the model's."
    )
    page_size: int = Field(16, ge=1, le=1024, description="Tokens in a KV block, the unit of sharing and eviction.")
    max_total_tokens: int | None = Field(
        None, ge=2, le=1_000_000_000, description="Tokens in the KV pool; null derives it from memory."
    )
    mem_fraction_static: float | None = Field(
        None, gt=0.0, lt=1.0, description="Share of memory for weights + KV pool; null takes 0.85 on a GPU, 0.4 on CPU."
    )
    disable_radix_cache: bool = Field(False, description="Turn prefix reuse off.")

    max_running_requests: int = Field(48, ge=1, le=4096, description="Requests decoded together.")
    max_queued_requests: int = Field(
        256, ge=0, le=1_000_000, description="Requests that may wait; more are refused (429)."
    )
    chunked_prefill_size: int = Field(
        512, ge=1, le=1_000_000, description="Most prompt tokens of one request in one step."
    )
    max_prefill_tokens: int = Field(
        2048, ge=1, le=1_000_000, description="Most prompt tokens of all requests in one step."
    )

    speculative: SpeculativeConfig = SpeculativeConfig()

    @model_validator(mode="after")
    def _chunk_fits_step(self) -> Self:
        if self.chunked_prefill_size > self.max_prefill_tokens:
            raise ConfigError(
                f"chunked_prefill_size={self.chunked_prefill_size} is more than max_prefill_tokens="
                f"{self.max_prefill_tokens}; a chunk has to fit a step, so raise max_prefill_tokens or lower the chunk"
            )
        return self

    @model_validator(mode="after")
    def _tree_fits_pool(self) -> Self:
        nodes = self.speculative.num_draft_tokens or 1
        if self.max_total_tokens is not None and self.max_total_tokens < self.page_size + nodes:
            raise ConfigError(
                f"max_total_tokens={self.max_total_tokens} cannot hold one block of page_size={self.page_size} and a "
                f"tree of {nodes} nodes; set max_total_tokens >= {self.page_size + nodes} or lower the others"
            )
        return self
