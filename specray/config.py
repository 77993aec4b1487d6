"""The engine's configuration: one frozen pydantic tree, checked as a whole when it is built.

What lives here: every option of the engine, its bounds, cross-field checks and automatic values
that need no model. Not here: options of the HTTP server (`cluster.config`), the drafters' names
(`specray.spec_decode.DRAFTERS`) and anything that opens a file.
"""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from specray import unsupported_options
from specray.errors import ConfigError

EMBEDDED_MODEL = "smollm2-135m-instruct"
MAX_TREE_NODES = 128  # of a draft tree, its root included

Rate = Annotated[float, Field(ge=0.0, le=1.0)]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]


class Options(BaseModel):
    """Base of every part: frozen, unknown keys refused, no silent coercion of types."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class SpeculativeConfig(Options):
    """How drafts are made; option names are those of SGLang's documentation."""

    algorithm: str | None = Field(
        None, description="Method, a key of DRAFTERS (EAGLE3, EAGLE or NEXTN, MTP, STANDALONE, NGRAM); null: plain."
    )
    num_steps: Annotated[int, Field(ge=1, le=32)] | None = Field(
        None, description="Depth of a draft tree. Set it with eagle_topk and num_draft_tokens, or none of the three."
    )
    eagle_topk: Annotated[int, Field(ge=1, le=32)] | None = Field(
        None, description="Children drafted below a node, and nodes expanded per level; 1 drafts a chain."
    )
    num_draft_tokens: Annotated[int, Field(ge=2, le=MAX_TREE_NODES)] | None = Field(
        None,
        description="Nodes of a draft tree, including the root (the last known token); null takes the method's: "
        "NGRAM's is ngram_max_match_window_size.",
    )

    max_step_draft_tokens: Annotated[int, Field(ge=1, le=100_000)] | None = Field(
        None,
        description="Draft tokens verified in a step, all requests together: many requests at once get smaller trees, "
        "and where it does not reach, the youngest get none. null: no bound.",
    )

    draft_model_path: str | None = Field(
        None, min_length=1, description="Draft head or model: embedded name, local folder or hub name."
    )
    draft_model_revision: str | None = Field(None, description="Commit, branch or tag of a draft model on the hub.")
    draft_load_format: Literal["auto", "safetensors", "bin"] = Field("auto", description="Its weight files to read.")
    draft_dtype: Dtype = Field("auto", description="Type of its weights and KV; auto takes the target's.")
    draft_model_quantization: Literal["auto", "int8", "fp8", "unquant"] | None = Field(
        None,
        description="Of its weights; null takes the target's, unquant none, auto int8 on a CPU that has kernels for it "
        "and none elsewhere. What it shares with the target stays as the target's.",
    )
    draft_attention_backend: Annotated[Literal["auto", "torch"] | None, unsupported_options.ATTENTION_KERNELS] = Field(
        None, description="Attention kernels of a draft head or model; null takes the target's."
    )
    token_map: str | None = Field(
        None,
        min_length=1,
        description="FR-Spec: file of frequent token ids (.pt or .json), local or owner/name/file on the hub; only "
        "these are drafted.",
    )

    ngram_min_match_window_size: int = Field(
        1, ge=1, le=128, description="Least last tokens that must have been seen before, for NGRAM to draft from there."
    )
    ngram_max_match_window_size: int = Field(12, ge=1, le=128, description="Most last tokens that are compared.")
    ngram_min_bfs_breadth: int = Field(
        1, ge=1, le=128, description="BFS: children of a node below the longest match; shorter ones get more."
    )
    ngram_max_bfs_breadth: int = Field(
        10, ge=1, le=128, description="BFS: most children of a node. PROB: children whose shares are compared."
    )
    ngram_match_type: Literal["BFS", "PROB", "SUFFIX"] = Field(
        "BFS",
        description="Trees from matches: BFS the most recent first, PROB the most frequent first, SUFFIX one chain by "
        "suffix decoding's score.",
    )
    ngram_branch_length: int = Field(
        18, ge=2, le=256, description="Tokens of a branch of the trie: match and drafts together."
    )
    ngram_max_trie_depth: Annotated[int, Field(ge=2, le=128)] | None = Field(
        None, description="Newer name for branch_length d and windows up to d - 1 in one; null takes those."
    )
    ngram_capacity: int = Field(
        10_000_000,
        ge=1000,
        le=10_000_000_000,
        description="Nodes of the trie of ended requests, all tenants together, a branch of them for each token; what "
        "was seen longest ago goes first.",
    )
    ngram_max_spec_factor: Annotated[float, Field(gt=0.0, le=128.0)] | None = Field(
        2.0,
        description="Ours: drafts that each matched token earns, so that weak matches cost little; null: as many as "
        "fit the tree.",
    )
    ngram_min_token_prob: float = Field(
        0.1, ge=0.0, le=1.0, description="Ours, of SUFFIX: a chain ends where its share of what was seen is lower."
    )
    ngram_override_min_match: Annotated[int, Field(ge=1, le=128)] | None = Field(
        None,
        description="Ours: beside another method, draft from n-grams where so many last tokens were seen before; null: "
        "never.",
    )

    verification: Literal["coupled", "rejection"] = Field(
        "coupled",
        description="coupled: one seed gives one text, whatever is drafted. rejection: the same law, but a seed's text "
        "changes with drafter and drafts.",
    )
    accept_threshold_single: float = Field(
        1.0, gt=0.0, le=1.0, description="Below 1.0, lossy: drafts that are at least so likely are accepted."
    )
    accept_threshold_acc: float = Field(
        1.0,
        gt=0.0,
        le=1.0,
        description="Below 1.0, lossy: acceptance grows as if drafts were 1 / accept_threshold_acc as likely.",
    )

    attention_mode: Annotated[str | None, unsupported_options.ATTENTION_MODE.check] = (
        unsupported_options.ATTENTION_MODE.field
    )
    moe_runner_backend: Annotated[str | None, unsupported_options.MOE_RUNNER_BACKEND.check] = (
        unsupported_options.MOE_RUNNER_BACKEND.field
    )
    moe_a2a_backend: Annotated[str | None, unsupported_options.MOE_A2A_BACKEND.check] = (
        unsupported_options.MOE_A2A_BACKEND.field
    )
    enable_spec_v2: Annotated[bool, unsupported_options.ENABLE_SPEC_V2.check] = unsupported_options.ENABLE_SPEC_V2.field
    ngram_force_greedy_verify: Annotated[bool, unsupported_options.NGRAM_FORCE_GREEDY_VERIFY.check] = (
        unsupported_options.NGRAM_FORCE_GREEDY_VERIFY.field
    )

    simulate_accept_length: Annotated[float, Field(ge=1.0, le=33.0)] | None = Field(
        None,
        description="For measuring steps: drafts are accepted by lot, so that a step makes so many tokens on average; "
        "the output is meaningless.",
    )
    simulate_accept_rates: Annotated[list[Rate], Field(min_length=1, max_length=32)] | None = Field(
        None, description="The same by depth: how often a draft is accepted where the one before it was."
    )
    simulate_output_is_meaningless: bool = Field(
        False, description="Has to be true for the two above, which nobody wants by mistake."
    )

    @property
    def drafter_name(self) -> str | None:
        """The method, as logs and metrics name it."""
        return f"SIMULATED {self.algorithm}" if self.is_simulated else self.algorithm

    @property
    def is_simulated(self) -> bool:
        """Whether acceptance is made up, and the output with it."""
        return self.simulate_accept_length is not None or self.simulate_accept_rates is not None

    @property
    def is_lossy(self) -> bool:
        """Whether sampled requests may get other tokens than the target alone would give them."""
        return min(self.accept_threshold_single, self.accept_threshold_acc) < 1.0

    def check_successor(self, other: "SpeculativeConfig") -> None:
        """ConfigError if `other` cannot follow this one without a restart: a verifier is chosen for good."""
        for name in (
            "verification",
            "accept_threshold_single",
            "accept_threshold_acc",
            "simulate_accept_length",
            "simulate_accept_rates",
        ):
            if other.algorithm is not None and getattr(other, name) != getattr(self, name):
                raise ConfigError(
                    f"speculative.{name}={getattr(other, name)!r} cannot follow {getattr(self, name)!r} while serving; "
                    f"leave it at {getattr(self, name)!r}, or restart with it"
                )

    def changed(self) -> set[str]:
        """Names of the options that do not have their default."""
        return {name for name, option in type(self).model_fields.items() if getattr(self, name) != option.default}

    @model_validator(mode="after")
    def _thresholds_go_with_coupling(self) -> Self:
        if self.is_lossy and self.verification == "rejection":
            raise ConfigError(
                f"accept_threshold_single={self.accept_threshold_single} and accept_threshold_acc="
                f"{self.accept_threshold_acc} are no part of verification: rejection, which is exact; set both to 1.0, "
                "or verification: coupled"
            )
        return self

    @model_validator(mode="after")
    def _simulation_is_meant(self) -> Self:
        both = {name: getattr(self, name) for name in ("simulate_accept_length", "simulate_accept_rates")}
        given = {name: value for name, value in both.items() if value is not None}
        if not given:
            if self.simulate_output_is_meaningless:
                raise ConfigError("simulate_output_is_meaningless=true has nothing to confirm; remove it")
            return self
        if len(given) == 2:
            raise ConfigError("simulate_accept_length and simulate_accept_rates say the same thing; set one of them")
        [(name, value)] = given.items()
        if not self.simulate_output_is_meaningless:
            raise ConfigError(
                f"speculative.{name}={value!r} makes acceptance up, and the output is nobody's; to measure it, set "
                "simulate_output_is_meaningless: true as well, to serve, remove it"
            )
        if self.is_lossy or self.verification == "rejection":
            raise ConfigError(
                f"speculative.{name} takes the place of the verification; leave verification, "
                "accept_threshold_single and accept_threshold_acc as they are by default"
            )
        return self

    @model_validator(mode="after")
    def _needs_algorithm(self) -> Self:
        if self.algorithm is None and (changed := sorted(self.changed())):
            name = changed[0]
            raise ConfigError(
                f"speculative.{name}={getattr(self, name)!r} has no effect while speculative.algorithm is null; "
                f"set an algorithm (EAGLE3, EAGLE, MTP, STANDALONE, NGRAM) or remove {name}"
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
    quantization: Literal["int8", "fp8"] | None = Field(
        None,
        description="Of weights, when they are loaded, and of what they are multiplied with: int8 on CPU, fp8 on GPUs.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where the target runs; auto takes a GPU if there is one."
    )
    tp_size: int = Field(1, ge=1, le=64, description="Tensor-parallel ranks of the target.")
    attention_backend: Annotated[Literal["auto", "torch"], unsupported_options.ATTENTION_KERNELS] = Field(
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
    max_queued_requests_per_tenant: int | None = Field(
        None, ge=0, le=1_000_000, description="Of these, requests with one API key's name; null: half of them."
    )
    chunked_prefill_size: int = Field(
        512, ge=1, le=1_000_000, description="Most prompt tokens of one request in one step."
    )
    max_prefill_tokens: int = Field(
        2048,
        ge=1,
        le=1_000_000,
        description="Most prompt tokens of all requests in one step; two chunks while others decode.",
    )

    enable_multi_layer_eagle: Annotated[bool, unsupported_options.ENABLE_MULTI_LAYER_EAGLE.check] = (
        unsupported_options.ENABLE_MULTI_LAYER_EAGLE.field
    )
    enable_dp_attention: Annotated[bool, unsupported_options.ENABLE_DP_ATTENTION.check] = (
        unsupported_options.ENABLE_DP_ATTENTION.field
    )
    trust_remote_code: bool = Field(False, description=unsupported_options.without_effect("trust_remote_code"))
    enable_torch_compile: bool = Field(False, description=unsupported_options.without_effect("enable_torch_compile"))
    torch_compile_max_bs: int | None = Field(
        None, ge=1, description=unsupported_options.without_effect("torch_compile_max_bs")
    )
    cuda_graph_max_bs: int | None = Field(
        None, ge=1, description=unsupported_options.without_effect("cuda_graph_max_bs")
    )

    speculative: SpeculativeConfig = SpeculativeConfig()

    @property
    def max_queued_of_tenant(self) -> int:
        """Requests of one tenant that may wait, so that others find a place. Without keys there are no tenants."""
        most = self.max_queued_requests_per_tenant
        return -(-self.max_queued_requests // 2) if most is None else most

    @model_validator(mode="after")
    def _quantization_fits_device(self) -> Self:
        kinds = {"int8": "cpu", "fp8": "cuda"}
        drafts = self.speculative.draft_model_quantization
        for name, kind in (("quantization", self.quantization), ("speculative.draft_model_quantization", drafts)):
            if kind in kinds and self.device not in ("auto", kinds[kind]):
                other = next(k for k in kinds if k != kind)
                raise ConfigError(
                    f"{name}={kind} has kernels for {kinds[kind]} alone, but device={self.device}; set {name}: {other} "
                    f"or device: {kinds[kind]}"
                )
        return self

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
