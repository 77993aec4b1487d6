"""What `args:` of a Serve application holds: every engine option at the top level and the group `server`.

What lives here: the server's options with their bounds and safe defaults. Not here: engine options
(`specray.config`), Ray Serve's own (host, port: the `http_options` of the YAML file).
"""

from typing import Literal, Self

from pydantic import Field, model_validator

from cluster.autoscaling import AutoscalingOptions
from cluster.routing import RoutingOptions
from specray.config import EngineConfig, Options
from specray.errors import ConfigError


class ServerConfig(Options):
    """Options of the processes around the engine."""

    served_model_name: str | None = Field(
        None, min_length=1, max_length=256, description="Model name that clients send; null takes the model's."
    )
    request_timeout_s: float = Field(
        600.0, gt=0.0, le=86_400.0, description="Longest a request may take; a client's `timeout` can only shorten it."
    )
    max_body_bytes: int = Field(2 * 2**20, ge=1024, le=2**30, description="Longest request body; longer ones get 413.")
    default_max_tokens: int | None = Field(
        None, ge=1, le=10_000_000, description="max_tokens of chat requests without one; null: to the context's end."
    )
    log_interval_s: float = Field(10.0, ge=0.1, le=3600.0, description="Seconds between log lines under traffic.")
    metrics_interval_s: float = Field(1.0, ge=0.1, le=60.0, description="Seconds between exports to Ray's metrics.")
    lease_s: float = Field(
        10.0, ge=1.0, le=300.0, description="Silence after which router and ingress give each other up for dead."
    )
    failover_s: float = Field(
        30.0, ge=0.0, le=3600.0, description="Longest that requests whose engine was lost wait for another to go on."
    )
    drain_s: float = Field(
        60.0, ge=1.0, le=3600.0, description="Longest that a replica which is to stop may go on with what it has begun."
    )
    num_replicas: int = Field(1, ge=1, le=1024, description="Engines; each has a router, its ranks and their drafters.")
    num_ingress_replicas: int = Field(1, ge=1, le=64, description="Replicas of the HTTP front.")
    ingress_cpus: float = Field(0.1, ge=0.0, le=64.0, description="CPU share that Ray reserves for an ingress replica.")
    router_cpus: float = Field(0.1, ge=0.0, le=64.0, description="CPU share that Ray reserves for the router.")
    rank_cpus: float = Field(0.1, ge=0.0, le=1024.0, description="CPU share that Ray reserves for a target rank.")


class DraftConfig(Options):
    """Where drafts are made."""

    placement: Literal["colocated", "inline"] = Field(
        "colocated",
        description="colocated: in a process of its own beside the target's rank, which can fail alone; inline: in the "
        "rank's process. Output is the same.",
    )
    cpus: float = Field(0.1, ge=0.0, le=1024.0, description="CPU share that Ray reserves for a colocated drafter.")
    gpu_share: float = Field(
        0.2, gt=0.0, lt=1.0, description="Share of the rank's GPU that Ray reserves for a colocated drafter."
    )


class AppConfig(EngineConfig):
    """A whole application: one engine and its server."""

    draft: DraftConfig = DraftConfig()
    routing: RoutingOptions = RoutingOptions()
    autoscaling: AutoscalingOptions = AutoscalingOptions()
    server: ServerConfig = ServerConfig()

    @model_validator(mode="after")
    def _one_owner_of_the_number_of_engines(self) -> Self:
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

    @property
    def has_draft_actor(self) -> bool:
        return self.speculative.algorithm is not None and self.draft.placement == "colocated"

    @property
    def engine(self) -> EngineConfig:
        """The engine's part alone, as ranks get it."""
        return EngineConfig(**{name: getattr(self, name) for name in EngineConfig.model_fields})

    @property
    def model_name(self) -> str:
        """The name clients use; of a local path, its last part only."""
        if self.server.served_model_name is not None:
            return self.server.served_model_name
        is_path = self.model.startswith(("/", "./", "../", "~"))
        return self.model.rstrip("/").rsplit("/", 1)[-1] if is_path else self.model
