"""What `args:` of a Serve application holds: every engine option at the top level and the group `server`.

What lives here: the server's options with their bounds and safe defaults. Not here: engine options
(`specray.config`), Ray Serve's own (host, port: the `http_options` of the YAML file).
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from cluster.routing.autoscaling import AutoscalingOptions
from cluster.routing.policy import RoutingOptions
from specray.config import EngineConfig, Options
from specray.errors import ConfigError


class ServerConfig(Options):
    """Options of the processes around the engine."""

    served_model_name: str | None = Field(
        None, min_length=1, max_length=256, description="Model name that clients send; null takes the model's."
    )
    api_key_file: str | None = Field(
        None,
        min_length=1,
        description="File with a line `NAME KEY` for each client, closed to other users; null: no key is asked for.",
    )
    admin_key_file: str | None = Field(
        None,
        min_length=1,
        description="File like api_key_file with the keys for /admin, which replaces drafters while serving; null: "
        "there is no /admin.",
    )
    open_metrics: bool = Field(False, description="Whether /metrics needs no key where others do.")
    request_timeout_s: float = Field(
        600.0, gt=0.0, le=86_400.0, description="Longest a request may take; a client's `timeout` can only shorten it."
    )
    max_body_bytes: int = Field(2 * 2**20, ge=1024, le=2**30, description="Longest request body; longer ones get 413.")
    default_max_tokens: int | None = Field(
        None, ge=1, le=10_000_000, description="max_tokens of chat requests without one; null: to the context's end."
    )
    log_level: Literal["debug", "info", "warning", "error", "critical"] = Field(
        "info", description="Least severe log lines that all processes of the application write."
    )
    log_interval_s: float = Field(10.0, ge=0.1, le=3600.0, description="Seconds between log lines under traffic.")
    metrics_interval_s: float = Field(1.0, ge=0.1, le=60.0, description="Seconds between exports to Ray's metrics.")
    lease_s: float = Field(
        10.0, ge=1.0, le=300.0, description="Silence after which router and ingress give each other up for dead."
    )
    failover_s: float = Field(
        30.0, ge=0.0, le=3600.0, description="Longest that requests whose engine was lost wait for another to go on."
    )
    step_timeout_s: float = Field(
        60.0,
        ge=1.0,
        le=3600.0,
        description="Seconds in one step after which the ranks count as deadlocked and are replaced; has to be more "
        "than the slowest step takes, such as a whole chunk of prompts on a CPU.",
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
    cpus: float = Field(
        0.1,
        ge=0.0,
        le=1024.0,
        description="CPU share that Ray reserves for the colocated drafter; each of two has half of it where drafters "
        "can be replaced while serving (server.admin_key_file).",
    )
    gpu_share: float = Field(
        0.2, gt=0.0, lt=1.0, description="Share of rank 0's GPU that Ray reserves for the colocated drafter, as `cpus`."
    )


class PlacementConfig(Options):
    """On which nodes of the cluster an engine's ranks run."""

    across_nodes: bool = Field(
        False,
        description="Ranks may run on several nodes, as few as have room. They then talk over the network, neither "
        "encrypted nor authenticated: a private one is required. Off: an engine keeps to one node.",
    )
    rank_resources: dict[str, Annotated[float, Field(gt=0.0, le=1_000_000.0)]] = Field(
        {},
        description="Custom Ray resources that each rank reserves beside CPUs and GPUs, by name. They choose nodes: "
        "those started with them (`ray start --resources`) and not all taken.",
    )

    @model_validator(mode="after")
    def _one_owner_of_cpus_and_gpus(self) -> Self:
        if taken := sorted(self.rank_resources.keys() & {"CPU", "GPU", "memory", "object_store_memory"}):
            raise ConfigError(
                f"placement.rank_resources names {', '.join(taken)}, which Ray counts by itself; name custom resources "
                "here, and set server.rank_cpus for CPUs"
            )
        return self


class AppConfig(EngineConfig):
    """A whole application: one engine and its server."""

    draft: DraftConfig = DraftConfig()
    placement: PlacementConfig = PlacementConfig()
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

    @model_validator(mode="after")
    def _one_rank_has_one_node(self) -> Self:
        if self.placement.across_nodes and self.tp_size == 1:
            raise ConfigError(
                "placement.across_nodes has no effect with tp_size=1, for one rank is on one node; raise tp_size, or "
                "set server.num_replicas for an engine on each node"
            )
        return self

    @property
    def has_draft_actor(self) -> bool:
        """Whether drafters run in processes of their own, or may come to."""
        is_wanted = self.speculative.algorithm is not None or self.replaces_drafters
        return is_wanted and self.draft.placement == "colocated"

    @property
    def replaces_drafters(self) -> bool:
        """Whether an operator may put another drafter in place while serving."""
        return self.server.admin_key_file is not None and self.draft.placement == "colocated"

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
