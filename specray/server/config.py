"""Options of the HTTP server, and the configuration of an engine that it serves.

Engine options live in `specray.config`; where the processes run and how many there are, in `cluster.config`.
"""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from specray.config import EngineConfig, Options, SpeculativeConfig
from specray.engine.request_log import EVERY_TENANT
from specray.errors import ConfigError

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
    "gpt-oss",
    "openai",
    "gemma4",
]
ReasoningParserName = Literal["deepseek-r1", "deepseek_r1", "qwen3", "gpt-oss", "openai_gptoss", "gemma4"]


def _listed(value: object) -> object:
    return [] if value is None else [value] if isinstance(value, str) else value


ServedName = Annotated[str, Field(min_length=1, max_length=256)]


class ServerConfig(Options):
    """The HTTP API, request limits, timeouts, replicas and their CPU reservations."""

    served_model_name: Annotated[list[ServedName], BeforeValidator(_listed)] = Field(
        [],
        max_length=64,
        description="Names of the model in the API; replies show the first. Without any, the model's own.",
    )
    any_model_name: bool = Field(
        False, description="Answer requests for any model name, as SGLang does; else others get a 404."
    )
    api_key_file: str | None = Field(
        None,
        min_length=1,
        description="File with a line `NAME KEY` per client, not readable by other users; null requires no key.",
    )
    admin_key_file: str | None = Field(
        None,
        min_length=1,
        description="File like api_key_file with the keys for /admin and /flush_cache; null disables them.",
    )
    open_metrics: bool = Field(False, description="Serve /metrics without a key even if the API requires one.")
    metric_aliases: bool = Field(
        False,
        description="Serve /metrics also under the names of vLLM (`vllm:`) and SGLang (`sglang:`).",
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
        description="Host names that a server without API keys answers to, besides addresses, the "
        "machine's own name, names without a dot and private ones; `*` allows all.",
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
        description="auto: defaults of temperature, top_p, top_k, min_p and repetition_penalty "
        "from the model's generation_config.json; none: the API's own.",
    )
    response_store_mib: int = Field(
        0,
        ge=0,
        le=65_536,
        description="MiB of responses that each ingress replica keeps in memory for "
        "`previous_response_id`; 0 keeps none.",
    )
    tool_call_parser: ToolCallParserName | None = Field(
        None, description="Format in which the model writes tool calls; null recognizes it by the chat template."
    )
    reasoning_parser: ReasoningParserName | None = Field(
        None,
        description="Format of the model's reasoning, which replies then separate from the "
        "answer; null leaves it in the text.",
    )
    log_level: Literal["debug", "info", "warning", "error", "critical"] = Field(
        "info", description="Minimum severity of log messages, in all processes of the application."
    )
    access_log: bool = Field(
        False, description="Log one line per request: its ID (X-Request-Id), route, status and duration."
    )
    request_log: str | None = Field(
        None,
        min_length=1,
        description="Folder for logs of finished requests, which `specray replay` reads: prompts, options, texts and "
        "accepted drafts; null writes none.",
    )
    request_log_tenants: list[Annotated[str, Field(min_length=1, max_length=64)]] = Field(
        [],
        max_length=1024,
        description="Names in api_key_file whose clients agreed to be logged; `*`: all, as without keys.",
    )
    request_log_mib: int = Field(
        256, ge=1, le=1_048_576, description="Maximum size of an engine's request log; the oldest half is dropped."
    )
    request_log_redacted: bool = Field(
        False, description="Leave all texts out of the request log, which then has lengths and accepted drafts only."
    )
    audit: float = Field(
        0.0,
        ge=0.0,
        le=1.0,
        description="Share of finished requests that idle engines compute again without drafts, to compare the texts.",
    )
    otlp_traces_endpoint: str | None = Field(
        None,
        min_length=1,
        max_length=2048,
        pattern="^https?://",
        description="URL that receives traces by OTLP over HTTP, such as "
        "`http://127.0.0.1:4318/v1/traces`; null disables them. Needs the extra "
        "`otel`.",
    )
    log_interval_s: float = Field(
        10.0, ge=0.1, le=3600.0, description="Seconds between statistics in the log while there is traffic."
    )
    stream_interval_ms: float = Field(
        20.0,
        ge=0.0,
        le=1000.0,
        description="Milliseconds for which tokens of a stream may be held, so that a chunk has "
        "those of several fast steps; 0 sends each step's at once.",
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
        description="Seconds that requests of a lost engine wait for another one, and new "
        "requests for the next engine while a new version replaces the only one.",
    )
    step_timeout_s: float = Field(
        60.0,
        ge=1.0,
        le=3600.0,
        description="Maximum duration of a step; after it the ranks are replaced. Must exceed the "
        "slowest step, such as a full prefill chunk on a CPU.",
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

    @model_validator(mode="after")
    def _check_request_log(self) -> Self:
        named = [name for name in self.request_log_tenants if name != EVERY_TENANT]
        if self.request_log is None and self.request_log_tenants:
            raise ConfigError(
                "server.request_log_tenants has no effect without server.request_log; name a folder there"
            )
        if self.request_log is not None and not Path(self.request_log).is_absolute():
            raise ConfigError(
                f"server.request_log={self.request_log} is relative, and engines may run in another folder; "
                "give an absolute path"
            )
        if self.request_log is not None and not self.request_log_tenants:
            raise ConfigError(
                "server.request_log writes what clients send and receive, and no client has agreed; list those that "
                f"have in server.request_log_tenants, or set it to ['{EVERY_TENANT}']"
            )
        if named and self.api_key_file is None:
            raise ConfigError(
                f"server.request_log_tenants names {named[0]}, but without server.api_key_file clients have no names; "
                f"set the key file, or ['{EVERY_TENANT}']"
            )
        return self


class RoutingOptions(Options):
    """Which engines an ingress uses, and how much imbalance of load a cached prefix or a session may cause."""

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
    engines_per_ingress: int = Field(
        16,
        ge=1,
        le=1024,
        description="Number of engines that an ingress connects to if there are more; "
        "each engine has at least two ingresses.",
    )


class ServingConfig(EngineConfig):
    """An engine and its HTTP server."""

    routing: RoutingOptions = RoutingOptions()
    server: ServerConfig = ServerConfig()

    @model_validator(mode="after")
    def _check_audit(self) -> Self:
        if self.server.audit and not self.speculative.ignores_drafts:
            raise ConfigError(
                f"server.audit={self.server.audit:g} compares texts with and without drafts, which differ when "
                "verification is not coupled, is lossy or simulated; set server.audit: 0"
            )
        return self

    @model_validator(mode="after")
    def _check_promotion(self) -> Self:
        if self.speculative.shadow.promotes and (self.server.admin_key_file is None or self.fixed_drafter):
            why = self.fixed_drafter or "needs server.admin_key_file, with which drafters can be replaced"
            raise ConfigError(f"speculative.shadow.promotes: {why}")
        return self

    def draft_ranks(self, speculative: SpeculativeConfig) -> int:
        """Number of ranks that draft together with such a drafter."""
        return int(speculative.has_drafter)

    @property
    def fixed_drafter(self) -> str:
        """Why an operator cannot replace the drafter while serving, and what to change; empty if one can."""
        return ""

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
