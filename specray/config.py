"""The engine's configuration: a frozen tree of pydantic models, validated as a whole when it is built.

Options of the server live in `specray.server.config`, names of drafting methods in `specray.spec_decode.DRAFTERS`.
Validation opens no file.
"""

import re
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from specray import unsupported_options
from specray.errors import ConfigError

EMBEDDED_MODEL = "smollm2-135m-instruct"
MAX_TREE_NODES = 128  # of a draft tree, its root included

MAX_DRAFTERS = 8  # loaded side by side
QUANTIZATION_DEVICES = {"int8": "cpu", "int4": "cpu", "fp8": "cuda"}  # that have kernels; `auto` has them everywhere

Rate = Annotated[float, Field(ge=0.0, le=1.0)]
DrafterName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
AttentionKernels = Literal["auto", "torch", "triton", "flashinfer", "fa"]
ExpertKernels = Literal["auto", "torch", "triton"]
ModelImpl = Literal["auto", "native", "transformers"]
KVCacheDtype = Literal["auto", "int8", "fp8", "fp8_e4m3", "fp8_e5m2"]  # fp8 is fp8_e4m3, as in vLLM


Model = TypeVar("Model", bound=BaseModel)


def quantization_obstacle(option: str, name: str | None, device: str, dtype: str) -> str | None:
    """Why quantization `name`, the value of `option`, cannot have this device or type of activations; None if it can.

    With "auto" for either, this is known when a model is loaded.
    """
    kind = QUANTIZATION_DEVICES.get(name or "", device)
    if device not in ("auto", kind):
        other = "int8" if kind == "cuda" else "fp8"
        return f"has kernels for {kind} only, but device={device}; set {option}: {other} or device: {kind}"
    if name == "fp8" and dtype not in ("auto", "bfloat16"):
        return f"works only with bfloat16, not dtype={dtype}; set dtype: bfloat16 or {option}: null"
    return None


def with_values(model: Model, **values: object) -> Model:
    """A copy with other values, validated as a whole, as `model_copy` does not. ValidationError if they do not fit."""
    given = {name: getattr(model, name) for name in model.model_fields_set}
    return type(model).model_validate(given | values)


class Options(BaseModel):
    """Base class of all option groups: frozen; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class CorpusOptions(Options):
    """A text that is quoted often, in a file of `specray corpus build`."""

    name: DrafterName
    path: str = Field(min_length=1)
    tenants: tuple[str, ...] = ()  # whose requests are drafted from it; empty: all
    max_mb: int = Field(256, ge=1)


class DrafterOptions(Options):
    """The options of one drafter. Their names are those of SGLang's documentation."""

    algorithm: str | None = Field(
        None,
        description="EAGLE3, EAGLE (or NEXTN), MTP, PARALLEL, DFLASH, DSPARK, STANDALONE, NGRAM, or the import "
        "path of a drafter (package.module:Class); null decodes without drafts.",
    )
    num_steps: Annotated[int, Field(ge=1, le=32)] | None = Field(
        None,
        description="Depth of a draft tree. Set num_steps, eagle_topk and num_draft_tokens together, or none.",
    )
    eagle_topk: Annotated[int, Field(ge=1, le=32)] | None = Field(
        None, description="Children drafted per node, and nodes expanded per level; 1 drafts a chain."
    )
    num_draft_tokens: Annotated[int, Field(ge=2, le=MAX_TREE_NODES)] | None = Field(
        None,
        description="Nodes of a draft tree, including the root (the last accepted token); null "
        "chooses a value for the method. NGRAM takes ngram_max_match_window_size.",
    )

    draft_model_path: str | None = Field(
        None, min_length=1, description="Draft head or draft model: embedded name, local folder or hub name."
    )
    draft_model_revision: str | None = Field(None, description="Commit, branch or tag of the draft model on the hub.")
    draft_load_format: Literal["auto", "safetensors", "bin"] = Field(
        "auto", description="Format of the draft model's weight files."
    )
    draft_dtype: Dtype = Field(
        "auto", description="Data type of the draft model's weights and KV cache; auto takes the target's."
    )
    draft_model_quantization: Literal["auto", "int8", "int4", "fp8", "unquant"] | None = Field(
        None,
        description="Quantization of the draft model: null takes the target's, unquant disables "
        "it, auto chooses int8 on a CPU and none elsewhere.",
    )
    draft_attention_backend: AttentionKernels | None = Field(
        None,
        description="Attention kernels of the draft model; null takes the target's. With "
        "flashinfer, the levels of a draft tree use Triton's; with fa, all.",
    )
    token_map: str | None = Field(
        None,
        min_length=1,
        description="FR-Spec: file of the token ids that may be drafted (.pt or .json), local or "
        "owner/name/file on the hub.",
    )

    ngram_min_match_window_size: int = Field(
        1, ge=1, le=128, description="Least number of last tokens that must match earlier text."
    )
    ngram_max_match_window_size: int = Field(12, ge=1, le=128, description="Maximum number of last tokens to match.")
    ngram_min_bfs_breadth: int = Field(
        1, ge=1, le=128, description="BFS: children per node below the longest match; shorter matches get more."
    )
    ngram_max_bfs_breadth: int = Field(
        10,
        ge=1,
        le=128,
        description="BFS: maximum number of children per node. PROB: children considered per node.",
    )
    ngram_match_type: Literal["BFS", "PROB", "SUFFIX"] = Field(
        "BFS",
        description="Trees of matches: BFS takes the most recent continuations first, PROB the "
        "most frequent ones; SUFFIX drafts one chain, by suffix decoding's score.",
    )
    ngram_branch_length: int = Field(
        18, ge=2, le=256, description="Length of a branch of the trie: matched and drafted tokens together."
    )
    ngram_max_trie_depth: Annotated[int, Field(ge=2, le=128)] | None = Field(
        None,
        description="SGLang's newer option: ngram_branch_length, and one more than "
        "ngram_max_match_window_size; leave both out then.",
    )
    ngram_capacity: int = Field(
        10_000_000,
        ge=1000,
        le=10_000_000_000,
        description="Maximum number of nodes in the trie of finished requests, over all tenants. "
        "Each token adds up to ngram_branch_length; the oldest are evicted.",
    )
    ngram_max_spec_factor: Annotated[float, Field(gt=0.0, le=128.0)] | None = Field(
        2.0,
        description="Not in SGLang: draft tokens per matched token; null fills the tree.",
    )
    ngram_min_token_prob: float = Field(
        0.1,
        ge=0.0,
        le=1.0,
        description="Not in SGLang. SUFFIX: a chain ends where its estimated probability falls below this.",
    )
    merged_draft_tokens: Annotated[int, Field(ge=2, le=MAX_TREE_NODES)] | None = Field(
        None,
        description="Not in SGLang: another method's trees are merged with n-grams into trees of up to this many "
        "nodes, root included.",
    )
    corpora: Annotated[tuple[CorpusOptions, ...], Field(max_length=64)] = Field(
        (),
        description="Not in SGLang: files of `specray corpus build` to draft from: mappings with name, path, tenants "
        "(names of API keys) and max_mb (256).",
    )

    moe_runner_backend: ExpertKernels | None = Field(
        None, description="Kernels for the experts of the draft model; null takes the target's."
    )

    def changed(self) -> set[str]:
        """Names of the options that differ from their defaults."""
        return {name for name, option in type(self).model_fields.items() if getattr(self, name) != option.default}


class NamedDrafter(DrafterOptions):
    """One of several drafters."""

    name: DrafterName
    algorithm: str


class ShadowOptions(Options):
    """A drafter that drafts without being verified, to measure it against the text of real requests."""

    drafter: DrafterName | None = Field(
        None,
        description="Name of the drafter whose trees are not verified but compared with the "
        "generated text. Only requests that name it are drafted by it.",
    )
    share: float = Field(
        0.05, gt=0.0, le=1.0, description="Share of requests for which the shadow drafter drafts as well."
    )
    promotes: bool = Field(
        False,
        description="Give the requests to a shadow that is better with 95 % confidence, and back if its acceptance "
        "collapses.",
    )
    is_former: bool = Field(False, description="Set by a promotion: the shadow was in use before.")


class SpeculativeConfig(DrafterOptions):
    """Speculative decoding: one drafter or several, and how their drafts are verified."""

    drafters: Annotated[tuple[NamedDrafter, ...], Field(max_length=MAX_DRAFTERS)] = Field(
        (),
        description="Not in SGLang. Several drafters side by side, in place of algorithm and its "
        "options: mappings with name, algorithm and that drafter's own options.",
    )
    default_drafter: DrafterName | None = Field(
        None,
        description="Drafter of requests that name none; null learns which one is the fastest, "
        "per client and kind of text.",
    )
    shadow: ShadowOptions = ShadowOptions()

    max_step_draft_tokens: Annotated[int, Field(ge=1, le=100_000)] | None = Field(
        None,
        description="Maximum number of draft tokens verified in a step, over all requests: a "
        "large batch gets smaller trees, and the newest requests none.",
    )

    budget: Literal["static", "auto"] | None = Field(
        None,
        description="Not in SGLang. static verifies whole trees, or equal shares of "
        "max_step_draft_tokens; auto drafts what generates the most tokens per "
        "second, by costs and acceptance measured while serving. null is auto in a "
        "server with CUDA graphs, or on CPUs where one seed gives one text, else static.",
    )

    plain_share: float = Field(
        0.0,
        ge=0.0,
        le=0.5,
        description="Share of steps without drafts, to measure the speed-up; on CPUs, budget: auto has them anyway.",
    )

    verification: Literal["coupled", "rejection"] = Field(
        "coupled",
        description="coupled: the output for a seed does not depend on the drafts. rejection: the "
        "same distribution, but the output for a seed depends on them.",
    )
    accept_threshold_single: float = Field(
        1.0,
        gt=0.0,
        le=1.0,
        description="Lossy below 1.0: draft tokens whose target probability is at least this are accepted.",
    )
    accept_threshold_acc: float = Field(
        1.0,
        gt=0.0,
        le=1.0,
        description="Lossy below 1.0: draft tokens are accepted as if their target probability were divided by this.",
    )

    attention_mode: Literal["prefill", "decode"] = Field(
        "prefill",
        description="How flashinfer and fa verify drafts: by their prefill kernel where it can "
        "(fa: chains only), or by Triton's kernel for decoding. Others have one "
        "kernel for both.",
    )
    moe_a2a_backend: Annotated[str | None, unsupported_options.MOE_A2A_BACKEND.check] = (
        unsupported_options.MOE_A2A_BACKEND.field
    )
    ngram_force_greedy_verify: Annotated[bool, unsupported_options.NGRAM_FORCE_GREEDY_VERIFY.check] = (
        unsupported_options.NGRAM_FORCE_GREEDY_VERIFY.field
    )

    simulate_accept_length: Annotated[float, Field(ge=1.0, le=33.0)] | None = Field(
        None,
        description="For benchmarks: accept drafts at random, this many tokens a step on average. "
        "The output is meaningless.",
    )
    simulate_accept_rates: Annotated[list[Rate], Field(min_length=1, max_length=32)] | None = Field(
        None,
        description="For benchmarks: acceptance rate at each depth, given that the parent was "
        "accepted. The output is meaningless.",
    )
    simulate_output_is_meaningless: bool = Field(False, description="Required by the two options above.")

    @property
    def drafter_name(self) -> str | None:
        """The method's name in logs and metrics; the names of several drafters, joined."""
        name = "+".join(drafter.name for drafter in self.drafters) or self.algorithm
        return f"SIMULATED {name}" if self.is_simulated else name

    @property
    def has_drafter(self) -> bool:
        """Whether there is anything to draft with."""
        return self.algorithm is not None or bool(self.drafters)

    @property
    def shared_options(self) -> dict[str, Any]:
        """The options that are not a drafter's own and name none, but those with their defaults."""
        others = {*DrafterOptions.model_fields, "drafters", "default_drafter", "shadow"}
        return self.model_dump(exclude_defaults=True, exclude=others)

    @property
    def members(self) -> dict[str, "SpeculativeConfig"]:
        """Each drafter's options, as those of the only drafter, by name. The name of a single one is its algorithm's.

        The options that are not a drafter's own stay as they are. The first one takes over the requests of one that is
        dropped: the default if there is one, and no shadow if there is another.
        """
        if self.algorithm is not None:
            return {re.sub(r"[^a-z0-9]+", "-", self.algorithm.lower()).strip("-")[:64]: self}
        default, shadow = self.default_drafter, self.shadow.drafter
        ordered = sorted(self.drafters, key=lambda drafter: (drafter.name != default, drafter.name == shadow))
        return {
            drafter.name: SpeculativeConfig(**self.shared_options, **drafter.model_dump(exclude={"name"}))
            for drafter in ordered
        }

    @property
    def num_nodes(self) -> int | None:
        """Most nodes of a single drafter's trees, the root included; None: automatic."""
        return self.merged_draft_tokens or self.num_draft_tokens

    @property
    def max_num_nodes(self) -> int | None:
        """Nodes of the drafter that has most; None if all are automatic."""
        sizes = [member.num_nodes for member in self.members.values()]
        return max((size for size in sizes if size is not None), default=None)

    @property
    def is_simulated(self) -> bool:
        """Whether acceptance is simulated, which makes the output meaningless."""
        return self.simulate_accept_length is not None or self.simulate_accept_rates is not None

    @property
    def ignores_drafts(self) -> bool:
        """Whether a seed gives the same text whatever is drafted, if the target's logits do not depend on the batch."""
        return self.verification == "coupled" and not self.is_lossy and not self.is_simulated

    @property
    def is_lossy(self) -> bool:
        """Whether the output distribution may differ from that of decoding without drafts."""
        return min(self.accept_threshold_single, self.accept_threshold_acc) < 1.0

    def check_successor(self, other: "SpeculativeConfig") -> None:
        """ConfigError if `other` cannot replace this configuration without a restart.

        The verifier is fixed. So is the code: only the operator's configuration names a module to import.
        """
        ours, theirs = ([part.algorithm or "" for part in config.members.values()] for config in (self, other))
        if unknown := [algorithm for algorithm in theirs if ":" in algorithm and algorithm not in ours]:
            raise ConfigError(
                f"speculative.algorithm={unknown[0]!r} is an import path that this server was not started with, "
                "and a running server imports no code; restart it with this algorithm, or choose a built-in one"
            )
        for name in (
            "verification",
            "accept_threshold_single",
            "accept_threshold_acc",
            "simulate_accept_length",
            "simulate_accept_rates",
        ):
            if other.has_drafter and getattr(other, name) != getattr(self, name):
                raise ConfigError(
                    f"speculative.{name}={getattr(other, name)!r} cannot replace {getattr(self, name)!r} in a running "
                    "server; leave it as it is, or restart with the new value"
                )

    @model_validator(mode="after")
    def _check_thresholds(self) -> Self:
        if self.is_lossy and self.verification == "rejection":
            raise ConfigError(
                f"accept_threshold_single={self.accept_threshold_single} and accept_threshold_acc="
                f"{self.accept_threshold_acc} have no effect with verification: rejection, which is exact; set both to "
                "1.0, or set verification: coupled"
            )
        return self

    @model_validator(mode="after")
    def _check_simulation(self) -> Self:
        both = {name: getattr(self, name) for name in ("simulate_accept_length", "simulate_accept_rates")}
        given = {name: value for name, value in both.items() if value is not None}
        if not given:
            if self.simulate_output_is_meaningless:
                raise ConfigError("simulate_output_is_meaningless=true has nothing to confirm; remove it")
            return self
        if len(given) == 2:
            raise ConfigError("simulate_accept_length and simulate_accept_rates exclude each other; set one of them")
        [(name, value)] = given.items()
        if not self.simulate_output_is_meaningless:
            raise ConfigError(
                f"speculative.{name}={value!r} simulates acceptance, so the output is meaningless; set "
                "simulate_output_is_meaningless: true as well for a benchmark, or remove it to serve"
            )
        if self.is_lossy or self.verification == "rejection":
            raise ConfigError(
                f"speculative.{name} replaces verification; leave verification, accept_threshold_single and "
                "accept_threshold_acc at their defaults"
            )
        return self

    @model_validator(mode="after")
    def _check_drafters(self) -> Self:
        own = sorted(self.changed() & DrafterOptions.model_fields.keys())
        names = [drafter.name for drafter in self.drafters]
        if self.drafters and own:
            raise ConfigError(
                f"speculative.{own[0]}={getattr(self, own[0])!r} is an option of a single drafter, but "
                f"speculative.drafters has {', '.join(names)}; move it into one of them, or remove drafters"
            )
        if twice := [name for place, name in enumerate(names) if name in names[:place]]:
            raise ConfigError(f"speculative.drafters: two of them are named {twice[0]!r}; give each its own name")
        if "none" in names:
            raise ConfigError("speculative.drafters: none cannot be a drafter's name; choose another")
        for place, name in (("default_drafter", self.default_drafter), ("shadow.drafter", self.shadow.drafter)):
            if name is not None and name not in names:
                known = f"choose one of {', '.join(names)}" if names else "set speculative.drafters, which is empty"
                raise ConfigError(f"speculative.{place}={name!r} is not one of speculative.drafters; {known}")
        return self

    @model_validator(mode="after")
    def _check_shadow(self) -> Self:
        name = self.shadow.drafter
        if name is None:
            if self.shadow.promotes:
                raise ConfigError("speculative.shadow.promotes=true has no effect without shadow.drafter; name it")
            return self
        if name == self.default_drafter or len(self.drafters) == 1:
            raise ConfigError(
                f"speculative.shadow.drafter={name!r} leaves no drafter to verify; add another one to "
                "speculative.drafters, or choose another default_drafter"
            )
        if self.shadow.promotes and self.default_drafter is None and len(self.drafters) > 2:
            raise ConfigError(
                f"speculative.shadow.promotes=true: {name!r} would take the place of several drafters; set "
                "default_drafter to the one that it is compared with"
            )
        if not self.ignores_drafts:
            raise ConfigError(
                f"speculative.shadow.drafter={name!r} is measured by comparing its drafts with the text, which holds "
                "only where verification is coupled and neither lossy nor simulated; leave the options of verification "
                "at their defaults, or set shadow.drafter: null"
            )
        return self

    @model_validator(mode="after")
    def _check_algorithm(self) -> Self:
        if not self.has_drafter and (changed := sorted(self.changed())):
            name = changed[0]
            raise ConfigError(
                f"speculative.{name}={getattr(self, name)!r} has no effect while speculative.algorithm is null; "
                f"set an algorithm (EAGLE3, EAGLE, MTP, PARALLEL, DFLASH, DSPARK, STANDALONE, NGRAM) or remove {name}"
            )
        return self


_GPU_CHUNK = 8192
# SGLang's with `device: cuda`. The KV pool's size limits how many requests run, too.
_GPU_DEFAULTS = {"max_running_requests": 200, "chunked_prefill_size": _GPU_CHUNK, "max_prefill_tokens": 2 * _GPU_CHUNK}


class EngineConfig(Options):
    """One engine: a target on tp_size ranks, and its drafter."""

    model: str = Field(
        EMBEDDED_MODEL, min_length=1, description="Target model: embedded name, local folder, .gguf file or hub name."
    )
    revision: str | None = Field(None, description="Commit, branch or tag of the model on the hub.")
    load_format: Literal["auto", "safetensors", "gguf", "bin"] = Field(
        "auto", description="Format of the weight files."
    )
    hf_overrides: dict[str, Any] = Field(
        {}, description='Keys that replace those of the model\'s config.json, as JSON: `{"rope_scaling": {…}}`.'
    )
    model_impl: ModelImpl = Field(
        "auto",
        description="Which code computes the target: native, classes of this package; transformers, the modules of the "
        "transformers package with this package's attention and matrices; auto takes native where there is one.",
    )
    chat_template: str | None = Field(
        None, min_length=1, description="File with a Jinja chat template; null takes the model's."
    )
    dtype: Dtype = Field(
        "auto",
        description="Data type of weights and activations; auto takes the checkpoint's, or "
        "bfloat16 for float32 if the hardware supports it.",
    )
    kv_cache_dtype: KVCacheDtype = Field(
        "auto",
        description="Data type of the target's KV cache; auto takes dtype. int8 needs the CPU kernels.",
    )
    quantization: Literal["auto", "int8", "int4", "fp8"] | None = Field(
        None,
        description="Quantization of weights (while loading) and activations: int8 or int4 on "
        "CPUs, fp8 on GPUs. auto keeps the groups of a checkpoint in GGUF, AWQ, GPTQ "
        "or compressed-tensors on a CPU. null computes in dtype.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Device of the target; auto takes a GPU if there is one."
    )
    tp_size: int = Field(1, ge=1, le=64, description="Number of tensor-parallel ranks of the target.")
    attention_backend: AttentionKernels = Field(
        "auto",
        description="Attention kernels. auto chooses the compiled ones on a CPU, Triton's on a "
        "GPU, and torch's where neither is available. The others need a GPU: triton; "
        "flashinfer; fa, vLLM's flash-attention, with Triton's for draft trees.",
    )
    moe_runner_backend: ExpertKernels = Field(
        "auto",
        description="Kernels for the experts of a mixture: triton (GPU) in one grouped product, "
        "torch one expert after the other; auto takes triton on a GPU unless the "
        "weights are fp8 there.",
    )
    deterministic: bool = Field(
        False,
        description="GPUs: slower matrix products whose sums do not depend on the batch, so that "
        "one seed gives one text in bfloat16 and float16 too. The CPU kernels always "
        "compute this way.",
    )
    num_threads: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="Compute threads per rank on a CPU; null divides the cores among the ranks. A "
        "server leaves one of three or more cores free.",
    )

    context_length: int | None = Field(
        None, ge=2, le=10_000_000, description="Maximum length of prompt and output together; null takes the model's."
    )
    page_size: int = Field(16, ge=1, le=1024, description="Tokens per KV block, the unit of sharing and eviction.")
    max_total_tokens: int | None = Field(
        None, ge=2, le=1_000_000_000, description="Size of the KV pool in tokens; null derives it from the memory."
    )
    mem_fraction_static: float | None = Field(
        None,
        gt=0.0,
        lt=1.0,
        description="Fraction of memory for weights and KV pool; null takes 0.85 on a GPU and 0.4 on a CPU.",
    )
    disable_radix_cache: bool = Field(False, description="Disable prefix caching.")
    max_mamba_cache_size: int | None = Field(
        None,
        ge=1,
        description="Requests whose states are in memory, of a model with states; those beyond max_running_requests "
        "are for the prefix cache. null: three times that, within a quarter of the KV pool's memory.",
    )
    disable_overlap_schedule: bool = Field(
        False, description="Do not plan a step before the result of the last one is known."
    )

    max_running_requests: int = Field(
        48, ge=1, le=4096, description="Maximum number of requests in a batch; 200 on GPUs."
    )
    max_queued_requests: int = Field(
        256, ge=0, le=1_000_000, description="Maximum number of waiting requests; further ones are refused (429)."
    )
    max_queued_requests_per_tenant: int | None = Field(
        None,
        ge=0,
        le=1_000_000,
        description="Maximum number of waiting requests per API key; null takes half of max_queued_requests.",
    )
    chunked_prefill_size: int = Field(
        512, ge=1, le=1_000_000, description="Maximum number of prompt tokens of one request in a step; 8,192 on GPUs."
    )
    max_prefill_tokens: int = Field(
        2048,
        ge=1,
        le=1_000_000,
        description="Maximum number of prompt tokens in a step, over all requests, while none decodes; 16,384 on GPUs.",
    )
    mixed_prefill_tokens: int | None = Field(
        None,
        ge=2,
        le=1_000_000,
        description="Maximum number of prompt tokens in a step in which other requests decode; "
        "one request gets at most half. null takes 64 on a CPU and two chunks on a "
        "GPU.",
    )

    enable_multi_layer_eagle: Annotated[bool, unsupported_options.ENABLE_MULTI_LAYER_EAGLE.check] = (
        unsupported_options.ENABLE_MULTI_LAYER_EAGLE.field
    )
    enable_dp_attention: Annotated[bool, unsupported_options.ENABLE_DP_ATTENTION.check] = (
        unsupported_options.ENABLE_DP_ATTENTION.field
    )
    trust_remote_code: bool = Field(
        False, description="SGLang's option; accepted without effect: code from a checkpoint is never run."
    )
    enable_torch_compile: bool = Field(
        False,
        description="Compile the target's decoder layers with torch.compile at start: dense "
        "models on one rank. No effect where the CPU kernels run.",
    )
    torch_compile_max_bs: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="Largest batch of decode steps that run compiled; null takes 32. Each step "
        "size takes seconds to compile.",
    )
    disable_cuda_graph: bool = Field(
        False,
        description="Launch kernels one by one instead of replaying CUDA graphs. No effect on CPUs.",
    )
    cuda_graph_max_bs: int | None = Field(
        None, ge=1, description="Largest batch of decode steps with CUDA graphs; null takes max_running_requests."
    )

    disable_custom_all_reduce: bool = Field(
        False, description="Sum small steps over ranks on GPUs with NCCL, not with the one-shot kernel."
    )

    speculative: SpeculativeConfig = SpeculativeConfig()

    @model_validator(mode="before")
    @classmethod
    def _with_gpu_defaults(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("device") == "cuda":
            most = data.get("max_prefill_tokens")
            fitting = {"chunked_prefill_size": most} if isinstance(most, int) and most < _GPU_CHUNK else {}
            data = _GPU_DEFAULTS | fitting | data
        return data

    @property
    def max_queued_of_tenant(self) -> int:
        """Maximum number of waiting requests per tenant (API key), so that none fills the queue alone."""
        most = self.max_queued_requests_per_tenant
        return -(-self.max_queued_requests // 2) if most is None else most

    @model_validator(mode="after")
    def _check_quantization(self) -> Self:
        asked: list[tuple[str, str | None, str]] = [("quantization", self.quantization, self.dtype)]
        asked += [
            (
                "speculative.draft_model_quantization",
                member.draft_model_quantization,
                self.dtype if member.draft_dtype == "auto" else member.draft_dtype,
            )
            for member in self.speculative.members.values()
        ]
        for option, name, dtype in asked:
            if reason := quantization_obstacle(option, name, self.device, dtype):
                raise ConfigError(f"{option}={name} {reason}")
        return self

    @model_validator(mode="after")
    def _check_deterministic(self) -> Self:
        if self.deterministic and self.quantization == "fp8":
            raise ConfigError(
                "deterministic=true has no fp8 kernels, whose sums depend on the batch; set quantization: null or "
                "deterministic: false"
            )
        if self.deterministic and self.enable_torch_compile:
            raise ConfigError(
                "deterministic=true excludes enable_torch_compile=true: its sums depend on the batch; set one to false"
            )
        return self

    @model_validator(mode="after")
    def _check_chunk(self) -> Self:
        if self.chunked_prefill_size > self.max_prefill_tokens:
            raise ConfigError(
                f"chunked_prefill_size={self.chunked_prefill_size} is more than max_prefill_tokens="
                f"{self.max_prefill_tokens}; a chunk must fit in a step: raise max_prefill_tokens or lower "
                "chunked_prefill_size"
            )
        return self

    @model_validator(mode="after")
    def _check_pool(self) -> Self:
        nodes = self.speculative.max_num_nodes or 1
        if self.max_total_tokens is not None and self.max_total_tokens < self.page_size + nodes:
            raise ConfigError(
                f"max_total_tokens={self.max_total_tokens} cannot hold one block of page_size={self.page_size} and a "
                f"tree of {nodes} nodes; set max_total_tokens >= {self.page_size + nodes} or lower the others"
            )
        return self

    @model_validator(mode="after")
    def _check_states(self) -> Self:
        most, running = self.max_mamba_cache_size, self.max_running_requests
        if most is not None and most < running:
            raise ConfigError(
                f"max_mamba_cache_size={most} is less than max_running_requests={running}, each of which has states; "
                "raise the first or lower the second"
            )
        return self
