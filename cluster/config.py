"""The configuration of a Serve application (`args:` in its YAML file).

Engine options (`specray.config`) are at the top level, those of the server and its processes in groups. The HTTP
server's host and port belong to Ray Serve: `http_options` in the YAML file.
"""

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from specray.config import EngineConfig, Options
from specray.errors import ConfigError
from specray.worker.remote_drafter.handshake import DraftPlacement

ToolCallParserName = Literal[
    "hermes",
    "qwen",
    "qwen25",
    "llama3",
    "llama3_json",
    "mistral",
    "deepseekv3",
    "deepseek_v3",
    "deepseekv31",
    "deepseek_v31",
    "pythonic",
]
ReasoningParserName = Literal["deepseek-r1", "deepseek_r1", "qwen3"]


def _listed(value: object) -> object:
    return [] if value is None else [value] if isinstance(value, str) else value


ServedName = Annotated[str, Field(min_length=1, max_length=256)]


class ServerConfig(Options):
    """The HTTP API, request limits, timeouts, replicas and their CPU reservations."""

    served_model_name: Annotated[list[ServedName], BeforeValidator(_listed)] = Field(
        [],
        max_length=64,
        description="Names of the model in the API, of which replies show the first; without any, the model's own.",
    )
    any_model_name: bool = Field(
        False, description="Answer requests for any model name, as SGLang does; otherwise others get a 404."
    )
    api_key_file: str | None = Field(
        None,
        min_length=1,
        description="File with a line `NAME KEY` per client, not readable by other users; null requires no key.",
    )
    admin_key_file: str | None = Field(
        None,
        min_length=1,
        description="File like api_key_file with the keys for /admin, which replaces drafters while serving; null "
        "disables /admin.",
    )
    open_metrics: bool = Field(False, description="Serve /metrics without a key even if the API requires one.")
    metric_aliases: bool = Field(
        False,
        description="Serve /metrics also under the names of vLLM (`vllm:`) and SGLang (`sglang:`), for dashboards made "
        "for them.",
    )
    cors_origins: list[Annotated[str, Field(min_length=1, max_length=256)]] = Field(
        [],
        max_length=64,
        description="Origins of web pages that may call the API from a browser, such as `https://chat.example.org`; "
        "`*` allows all.",
    )
    allowed_hosts: list[Annotated[str, Field(min_length=1, max_length=256)]] = Field(
        [],
        max_length=64,
        description="Host names that a server without API keys answers to, besides addresses, the machine's own name, "
        "names without a dot and private ones; `*` allows all. Other names are refused, because a web page could use "
        "them to reach the server through a visitor's browser.",
    )
    ui: bool = Field(True, description="Serve the page at /, a chat that shows the draft trees of its answers.")
    request_timeout_s: float = Field(
        600.0, gt=0.0, le=86_400.0, description="Maximum duration of a request; a client's `timeout` can shorten it."
    )
    max_body_bytes: int = Field(
        2 * 2**20, ge=1024, le=2**30, description="Maximum size of a request body (413 beyond it)."
    )
    body_timeout_s: float = Field(
        30.0, ge=0.1, le=3600.0, description="Seconds in which a request's body must arrive (408 after it)."
    )
    default_max_tokens: int | None = Field(
        None, ge=1, le=10_000_000, description="max_tokens of chat requests that set none; null fills the context."
    )
    generation_config: Literal["auto", "none"] = Field(
        "auto",
        description="Defaults of temperature, top_p, top_k, min_p and repetition_penalty: auto takes those of the "
        "model's generation_config.json, none the API's own.",
    )
    response_store_mib: int = Field(
        0,
        ge=0,
        le=65_536,
        description="MiB of responses that each ingress replica keeps in memory for `previous_response_id`; 0 keeps "
        "none. A response is known to the client's own key and to the replica that made it.",
    )
    tool_call_parser: ToolCallParserName | None = Field(
        None, description="Format in which the model writes tool calls; null recognizes it by the chat template."
    )
    reasoning_parser: ReasoningParserName | None = Field(
        None,
        description="Format in which the model writes its reasoning, which replies then separate from the answer; "
        "null leaves it in the text.",
    )
    log_level: Literal["debug", "info", "warning", "error", "critical"] = Field(
        "info", description="Minimum severity of log messages, in all processes of the application."
    )
    access_log: bool = Field(
        False, description="Log one line per request: its ID (the header X-Request-Id), route, status and duration."
    )
    otlp_traces_endpoint: str | None = Field(
        None,
        min_length=1,
        max_length=2048,
        pattern="^https?://",
        description="URL that receives traces of requests by OTLP over HTTP, such as "
        "`http://127.0.0.1:4318/v1/traces`; null disables traces. Needs the extra `otel`.",
    )
    log_interval_s: float = Field(
        10.0, ge=0.1, le=3600.0, description="Seconds between statistics in the log while there is traffic."
    )
    stream_interval_ms: float = Field(
        20.0,
        ge=0.0,
        le=1000.0,
        description="Milliseconds for which tokens of a stream may be held, so that a chunk has the tokens of several "
        "fast steps. A first token and the end of a reply are sent at once. 0 sends each step's tokens at once.",
    )
    metrics_interval_s: float = Field(1.0, ge=0.1, le=60.0, description="Seconds between exports of metrics to Ray.")
    lease_s: float = Field(
        10.0,
        ge=1.0,
        le=300.0,
        description="Seconds without a renewal after which a router ends an ingress's requests.",
    )
    failover_s: float = Field(
        30.0,
        ge=0.0,
        le=3600.0,
        description="Seconds that requests of a lost engine wait for another engine to continue them, and new requests "
        "for the next engine while a new version replaces the only one.",
    )
    step_timeout_s: float = Field(
        60.0,
        ge=1.0,
        le=3600.0,
        description="Maximum duration of a step; after it the ranks are considered deadlocked and replaced. Must be "
        "longer than the slowest step, such as a full prefill chunk on a CPU.",
    )
    drain_s: float = Field(
        60.0, ge=1.0, le=3600.0, description="Seconds that a stopping replica has to finish its requests."
    )
    num_replicas: int = Field(
        1, ge=1, le=1024, description="Number of engines; each has a router, ranks and a drafter."
    )
    num_ingress_replicas: int = Field(1, ge=1, le=64, description="Number of replicas of the HTTP ingress.")
    ingress_cpus: float = Field(0.1, ge=0.0, le=64.0, description="CPUs that Ray reserves per ingress replica.")
    router_cpus: float = Field(0.1, ge=0.0, le=64.0, description="CPUs that Ray reserves per router.")
    rank_cpus: float = Field(0.1, ge=0.0, le=1024.0, description="CPUs that Ray reserves per target rank.")


class DraftConfig(Options):
    """Where the drafter runs."""

    placement: DraftPlacement = Field(
        "colocated",
        description="colocated: in a separate process beside rank 0, whose failure does not stop the engine; separate: "
        "the same on a GPU of its own; inline: in the rank's process. The output is the same.",
    )
    cpus: float = Field(
        0.1,
        ge=0.0,
        le=1024.0,
        description="CPUs that Ray reserves for the colocated drafter; with server.admin_key_file, for two of them "
        "together.",
    )
    gpu_share: float = Field(
        0.2,
        gt=0.0,
        lt=1.0,
        description="Share of rank 0's GPU that Ray reserves for the colocated drafter, like cpus. A separate drafter "
        "has a whole one.",
    )
    cuda_ipc: bool = Field(
        False,
        description="Hand hidden states to a colocated drafter in the GPU's memory (CUDA IPC) instead of the host's. "
        "On an H100 it was no faster. Needs an allocator without expandable_segments; no effect on a CPU.",
    )

    @model_validator(mode="after")
    def _shares_a_gpu(self) -> Self:
        if self.cuda_ipc and self.placement != "colocated":
            raise ConfigError(
                f"draft.cuda_ipc needs a drafter on rank 0's GPU in its own process, and draft.placement="
                f"{self.placement}; set draft.placement: colocated, or cuda_ipc: false"
            )
        return self


class PlacementConfig(Options):
    """Which nodes of the cluster an engine's ranks run on."""

    across_nodes: bool = Field(
        False,
        description="Allow the ranks of an engine to run on several nodes, as few as possible. Their traffic is "
        "neither encrypted nor authenticated and needs a private network.",
    )
    rank_resources: dict[str, Annotated[float, Field(gt=0.0, le=1_000_000.0)]] = Field(
        {},
        description="Custom Ray resources that each rank reserves besides CPUs and GPUs. Ranks run only on nodes "
        "started with them (`ray start --resources`).",
    )

    @model_validator(mode="after")
    def _check_rank_resources(self) -> Self:
        if taken := sorted(self.rank_resources.keys() & {"CPU", "GPU", "memory", "object_store_memory"}):
            raise ConfigError(
                f"placement.rank_resources names {', '.join(taken)}, which Ray manages itself; name only custom "
                "resources, and set server.rank_cpus for CPUs"
            )
        return self


class RoutingOptions(Options):
    """How much imbalance of load a cached prefix or a session may cause."""

    max_load_ratio: float = Field(
        1.5,
        ge=1.0,
        le=100.0,
        description="A replica is skipped if its load exceeds the least load times this, plus load_slack.",
    )
    load_slack: float = Field(
        4.0, ge=0.0, le=10_000.0, description="Requests by which a load may exceed max_load_ratio times the least."
    )
    prefix_block_size: int = Field(
        64, ge=1, le=65_536, description="Tokens per block of the ingress's prefix index; shorter prefixes are ignored."
    )
    prefix_blocks: int = Field(
        65_536,
        ge=1,
        le=10_000_000,
        description="Blocks per replica in the ingress's prefix index, about 100 bytes each.",
    )


class AutoscalingOptions(Options):
    """Bounds and targets of the number of Router replicas."""

    enabled: bool = Field(False, description="Scale the number of engines with the load, instead of num_replicas.")
    min_replicas: int = Field(1, ge=1, le=1024, description="Minimum number of replicas.")
    max_replicas: int = Field(1, ge=1, le=1024, description="Maximum number of replicas.")
    target_running: float = Field(
        32.0,
        gt=0.0,
        le=4096.0,
        description="Target number of running requests per replica; at most max_running_requests.",
    )
    target_wait_s: float = Field(5.0, gt=0.0, le=3600.0, description="Seconds in which a queue should be processed.")
    window_s: float = Field(
        20.0, gt=10.0, le=600.0, description="Seconds of reports to average; replicas report every 10 s."
    )
    up_delay_s: float = Field(
        5.0, ge=0.0, le=3600.0, description="Seconds for which more replicas must be needed before scaling up."
    )
    down_delay_s: float = Field(
        180.0, ge=0.0, le=86_400.0, description="Seconds for which fewer replicas must suffice before scaling down."
    )
    down_margin: float = Field(
        0.1, ge=0.0, le=1.0, description="Spare capacity to keep when scaling down, as a share of the load."
    )

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ConfigError(
                f"min_replicas={self.min_replicas} is more than max_replicas={self.max_replicas}; raise max_replicas "
                "or lower min_replicas"
            )
        return self

    @model_validator(mode="after")
    def _down_is_slower(self) -> Self:
        if self.down_delay_s < max(self.up_delay_s, self.window_s):
            raise ConfigError(
                f"down_delay_s={self.down_delay_s:g} is less than up_delay_s={self.up_delay_s:g} or window_s="
                f"{self.window_s:g}, so a replica could be stopped before the reports show that it is needed; "
                f"set down_delay_s >= {max(self.up_delay_s, self.window_s):g}"
            )
        return self


class AppConfig(EngineConfig):
    """An application: its engines and their server."""

    draft: DraftConfig = DraftConfig()
    placement: PlacementConfig = PlacementConfig()
    routing: RoutingOptions = RoutingOptions()
    autoscaling: AutoscalingOptions = AutoscalingOptions()
    server: ServerConfig = ServerConfig()

    @model_validator(mode="after")
    def _check_autoscaling(self) -> Self:
        if not self.autoscaling.enabled:
            return self
        if self.server.num_replicas != 1:
            raise ConfigError(
                f"server.num_replicas={self.server.num_replicas} has no effect with autoscaling.enabled; remove it, or "
                "set autoscaling.min_replicas and max_replicas"
            )
        if self.autoscaling.target_running > self.max_running_requests:
            raise ConfigError(
                f"autoscaling.target_running={self.autoscaling.target_running:g} is more than max_running_requests="
                f"{self.max_running_requests}, so it would never be reached; lower it"
            )
        return self

    @model_validator(mode="after")
    def _check_nodes(self) -> Self:
        if self.placement.across_nodes and self.tp_size == 1:
            raise ConfigError(
                "placement.across_nodes has no effect with tp_size=1: one rank runs on one node; raise tp_size, or set "
                "server.num_replicas for several engines"
            )
        return self

    @model_validator(mode="after")
    def _check_separate_drafter(self) -> Self:
        if self.draft.placement == "separate" and self.placement.across_nodes:
            raise ConfigError(
                "draft.placement=separate shares memory with rank 0, so its GPU must be on the same node, which "
                "placement.across_nodes does not ensure; set draft.placement: colocated, or across_nodes: false"
            )
        return self

    @property
    def has_draft_actor(self) -> bool:
        """Whether drafters run in separate processes, or may do so later (`replaces_drafters`)."""
        is_wanted = self.speculative.has_drafter or self.replaces_drafters
        return is_wanted and self.draft.placement != "inline"

    @property
    def has_draft_gpu(self) -> bool:
        """Whether drafters have a bundle of their own, with a GPU where ranks have one."""
        return self.has_draft_actor and self.draft.placement == "separate"

    @property
    def replaces_drafters(self) -> bool:
        """Whether an operator can replace the drafter while serving."""
        return self.server.admin_key_file is not None and self.draft.placement != "inline"

    @property
    def max_replicas(self) -> int:
        """The largest number of engines that may run at once."""
        return self.autoscaling.max_replicas if self.autoscaling.enabled else self.server.num_replicas

    @property
    def engine(self) -> EngineConfig:
        """The engine options alone."""
        return EngineConfig(**{name: getattr(self, name) for name in EngineConfig.model_fields})

    @property
    def model_name(self) -> str:
        """The model's name in the API; of a local path, its last part."""
        if self.server.served_model_name:
            return self.server.served_model_name[0]
        is_path = self.model.startswith(("/", "./", "../", "~"))
        return self.model.rstrip("/").rsplit("/", 1)[-1] if is_path else self.model

    @property
    def model_names(self) -> tuple[str, ...]:
        """All names that requests may use: those served, the configured model, and SGLang's "default"."""
        names = (self.model_name, *self.server.served_model_name[1:], self.model, "default")
        return tuple(dict.fromkeys((*names, *map(_other_spelling, names))))


def _other_spelling(name: str) -> str:
    """The hub knows Llama 3 under two names, with and without `Meta-`; other names have one."""
    owner, slash, base = name.rpartition("/")
    if base.startswith("Meta-Llama-"):
        return owner + slash + base.removeprefix("Meta-")
    return f"{owner}{slash}Meta-{base}" if base.startswith("Llama-") else name
