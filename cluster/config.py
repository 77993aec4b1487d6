"""The configuration of a Serve application (`args:` in its YAML file).

Engine options (`specray.config`) are at the top level; those of the HTTP server (`specray.server.config`), of placement
and of scaling are in groups. The HTTP server's host and port belong to Ray Serve: `http_options` in the YAML file.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from specray.config import Options, SpeculativeConfig
from specray.errors import ConfigError
from specray.server.config import ServingConfig
from specray.spec_decode import splits_draft_models
from specray.worker.remote_drafter.handshake import DraftPlacement


class DraftConfig(Options):
    """Where the drafter runs."""

    placement: Literal["auto"] | DraftPlacement = Field(
        "auto",
        description="colocated: in a process beside each rank, whose failure does not stop the "
        "engine; separate: the same on a GPU of its own; inline: in the rank's "
        "process; auto: inline on a GPU unless server.admin_key_file or cuda_ipc is set, else colocated.",
    )
    cpus: float = Field(
        0.1,
        ge=0.0,
        le=1024.0,
        description="CPUs that Ray reserves for the colocated drafter; with server.admin_key_file, for two together.",
    )
    gpu_share: float = Field(
        0.2,
        gt=0.0,
        lt=1.0,
        description="Share of a rank's GPU that Ray reserves for the colocated drafter, like cpus.",
    )
    cuda_ipc: bool = Field(
        False,
        description="Exchange hidden states, outcomes and trees with a colocated drafter in the GPU's memory (CUDA "
        "IPC). Needs MPS and an allocator without expandable_segments.",
    )
    mps: Literal["auto", "off"] = Field(
        "auto",
        description="auto: start an MPS daemon of NVIDIA's, if installed, for an engine with a drafter colocated on a "
        "GPU, unless CUDA_MPS_PIPE_DIRECTORY names another one. A GPU fault of the drafter then ends the rank, too.",
    )

    @model_validator(mode="after")
    def _shares_a_gpu(self) -> Self:
        if self.cuda_ipc and self.placement not in ("auto", "colocated"):
            raise ConfigError(
                f"draft.cuda_ipc needs a drafter on rank 0's GPU in its own process, and draft.placement="
                f"{self.placement}; set draft.placement: colocated, or cuda_ipc: false"
            )
        if self.cuda_ipc and self.mps == "off":
            raise ConfigError(
                "draft.cuda_ipc has no effect with draft.mps=off: a target that waits for trees would hold the GPU; "
                "set mps: auto, or cuda_ipc: false"
            )
        return self


class PlacementConfig(Options):
    """Which nodes of the cluster an engine's ranks run on."""

    across_nodes: bool = Field(
        False,
        description="Allow the ranks of an engine to run on several nodes, as few as possible. "
        "Their traffic needs a private network.",
    )
    rank_resources: dict[str, Annotated[float, Field(gt=0.0, le=1_000_000.0)]] = Field(
        {},
        description="Custom Ray resources that each rank reserves besides CPUs and GPUs (`ray start --resources`).",
    )

    @model_validator(mode="after")
    def _check_rank_resources(self) -> Self:
        if taken := sorted(self.rank_resources.keys() & {"CPU", "GPU", "memory", "object_store_memory"}):
            raise ConfigError(
                f"placement.rank_resources names {', '.join(taken)}, which Ray manages itself; name only custom "
                "resources, and set server.rank_cpus for CPUs"
            )
        return self


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


class AppConfig(ServingConfig):
    """An application: its engines, their HTTP server, and where and in what number they run."""

    draft: DraftConfig = DraftConfig()
    placement: PlacementConfig = PlacementConfig()
    autoscaling: AutoscalingOptions = AutoscalingOptions()

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
        if self.draft.cuda_ipc and self.placement.across_nodes:
            raise ConfigError(
                "draft.cuda_ipc needs MPS, which does not serve ranks of several nodes (placement.across_nodes); set "
                "cuda_ipc: false, or across_nodes: false"
            )
        if self.draft.cuda_ipc and not self.has_draft_actor:
            raise ConfigError(
                "draft.cuda_ipc has no effect without a drafter; name a speculative.algorithm, or set cuda_ipc: false"
            )
        if self.draft.cuda_ipc and self.disable_cuda_graph and self.speculative.budget == "auto":
            raise ConfigError(
                "without CUDA graphs, speculative.budget=auto cuts trees by scores, which draft.cuda_ipc does not "
                "exchange; set budget: static, disable_cuda_graph: false, or cuda_ipc: false"
            )
        return self

    def draft_ranks(self, speculative: SpeculativeConfig) -> int:
        """See ServingConfig. A draft model is split like the target, unless it has a GPU of its own."""
        is_split = self.draft_placement != "separate" and splits_draft_models(speculative)
        return self.tp_size if is_split else super().draft_ranks(speculative)

    @property
    def draft_placement(self) -> DraftPlacement:
        """`draft.placement`, and what `auto` is with this device: inline is faster on a GPU (docs/benchmarks.md)."""
        if self.draft.placement != "auto":
            return self.draft.placement
        needs_process = self.server.admin_key_file is not None or self.draft.cuda_ipc
        return "inline" if self.device == "cuda" and not needs_process else "colocated"

    @property
    def has_draft_actor(self) -> bool:
        """Whether drafters run in separate processes, or may do so later (`replaces_drafters`)."""
        is_wanted = self.speculative.has_drafter or self.replaces_drafters
        return is_wanted and self.draft_placement != "inline"

    @property
    def has_draft_gpu(self) -> bool:
        """Whether drafters have a bundle of their own, with a GPU where ranks have one."""
        return self.has_draft_actor and self.draft_placement == "separate"

    @property
    def replaces_drafters(self) -> bool:
        """Whether an operator can replace the drafter while serving."""
        return self.server.admin_key_file is not None and self.draft_placement != "inline"

    @property
    def fixed_drafter(self) -> str:
        if self.draft_placement != "inline":
            return ""
        return (
            f"draft.placement={self.draft_placement}: the drafter runs in the target's process and cannot be replaced; "
            "deploy with draft.placement=colocated or separate to replace drafters while serving"
        )

    @property
    def max_replicas(self) -> int:
        """The largest number of engines that may run at once."""
        return self.autoscaling.max_replicas if self.autoscaling.enabled else self.server.num_replicas
