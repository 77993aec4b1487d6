"""What a step does on a device: forward pass, verification, and the commit of accepted paths.

A backend is chosen once, when a worker starts: torch's operations (`torch_backend.py`), the CPU kernels
(`kernel_backend.py`), or CUDA graphs (`graph_backend.py`). The worker does not ask which one it has.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from specray.spec_decode.draft_tree import DraftTree
from specray.spec_decode.drafter import UnsizedTrees
from specray.step import BucketSeconds, DraftLimit
from specray.worker.input_batch import StepBatch
from specray.worker.model_runner import ForwardOutput, ModelRunner
from specray.worker.step_output import StepOutput


@dataclass(frozen=True, slots=True)
class StepWants:
    """What a step computes beside its tokens."""

    aux_hidden_state_layers: Sequence[int]  # see TargetModel; empty if nobody reads them
    has_grammar: bool  # any request has one. Rank 0 alone knows the masks, but all ranks must make the same choices
    draft_limits: Sequence[DraftLimit]  # of the trees after this step; empty: some rows may get none


@dataclass(slots=True)
class Pass:
    """The forward pass of a step, started and perhaps not finished."""

    batch: StepBatch
    computed: ForwardOutput
    # Trees for the next step, which are made after this one without the host; None: `DraftSource.submit` makes them.
    drafts: DraftTree | None = field(default=None, kw_only=True)


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """A step on the host."""

    batch: StepBatch  # the step's rows, the trees' numbers of nodes among them
    output: StepOutput
    computed: ForwardOutput
    end: float  # time of `time.perf_counter` when the host saw the end of the pass
    replay: Callable[[], DraftTree] | None = None  # drafts for the next step, see ProposeContext


class StepBackend(Protocol):
    """One device's way to run a step. `begin` starts it, `finish` has the one copy to the host.

    Steps are finished in the order in which they began. One more may begin before the oldest is finished, by
    `begin_after`, if `can_begin_after`: it takes its tokens, and `Pass.drafts` if there are any, from the device.
    """

    @property
    def runner(self) -> ModelRunner: ...

    @property
    def starts_passes(self) -> bool:
        """Whether `begin` returns while the pass still runs."""

    @property
    def knows_tree_sizes(self) -> bool:
        """Whether trees may be passed to `begin` before the host knows their sizes (`StepBatch.wait_for_sizes`)."""

    @property
    def compiles_kernels(self) -> bool:
        """Whether a kernel is compiled when it is called for the first time."""

    def prepare(self) -> None:
        """What must be ready before the first step, for the present drafter; all ranks call it together."""

    def measure(self) -> list[BucketSeconds]:
        """What steps in CUDA graphs take, after `prepare`; all ranks call it together."""

    def begin(self, batch: StepBatch, wants: StepWants) -> Pass: ...

    def can_begin_after(self, before: Pass) -> bool:
        """Whether a step of the same requests can take its tokens from a pass that still runs.

        It can if there are `Pass.drafts`, or if the trees of this pass are roots. Ranks agree on this. If it is True,
        they exchange nothing in `finish`.
        """

    def begin_after(self, before: Pass, drafted: UnsizedTrees | None, draft_limits: Sequence[DraftLimit]) -> Pass:
        """Start such a step. The table has its KV slots.

        `drafted` are its trees, taken from `before.drafts`; None: it verifies none. `draft_limits`: see StepWants.
        """

    def has_ended(self, started: Pass) -> bool:
        """Whether `finish` would return without waiting for the device; True where the host helps to compute."""

    def wait(self, started: Pass) -> None:
        """Until the pass has ended, where the host can tell before it reads the outcome."""

    def finish(self, started: Pass) -> StepOutcome:
        """Verify the trees, keep the accepted paths, and copy the outcome to the host."""
