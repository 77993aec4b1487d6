"""The interfaces of drafting: a `Drafter` is a method, a `DraftSource` is where it runs.

A method implements `Drafter` and is listed in `DRAFTERS`, or is a class outside this package that
`speculative.algorithm` names by its import path (`package.module:Class`). Such a class is called with (config:
SpeculativeConfig, target: TargetView). Wrong, late or missing drafts cost speed and never change the output.
`specray.testing` checks a drafter against this interface.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from specray.layers.parallel import RankGroup
from specray.models.target_model import ModelShape, TargetModel
from specray.spec_decode.draft_rows import DraftRows
from specray.spec_decode.draft_tree import DraftTree
from specray.spec_decode.propose_context import DraftRequest, ProposeContext
from specray.spec_decode.request_table import RequestTable
from specray.step import DrafterUse, DraftFault, DraftLimit


@dataclass(frozen=True, slots=True, eq=False)
class TargetView:
    """Properties and parts of the target that a drafter can use."""

    model: TargetModel | None  # None if the drafter has its own process
    kv_pool: Tensor | None  # the target's, on this rank; None likewise
    shape: ModelShape
    dtype: torch.dtype
    folder: Path
    load_format: str
    architecture: str
    eos_token_ids: list[int]
    context_length: int
    num_slots: int  # KV slots of the pool
    max_rows: int  # requests in a step
    attention_backend: str  # the drafter's
    device: torch.device
    quantization: str | None = None  # quantization of its linear layers
    moe_runner_backend: str = "auto"  # the drafter's
    group: RankGroup = field(default_factory=RankGroup)  # ranks that draft together, each with a part of the model


@dataclass(frozen=True, slots=True)
class TargetFiles:
    """What is known of a target before its weights are loaded."""

    folder: Path
    load_format: str
    shape: ModelShape
    eos_token_ids: list[int]
    tp_size: int = 1
    has_draft_process: bool = False  # the drafter runs in a process of its own


class DraftFaultError(Exception):
    """A drafter could not draft for this step."""

    def __init__(self, kind: DraftFault) -> None:
        super().__init__(kind)
        self.kind = kind


class Drafter(Protocol):
    """A drafting method with state per slot."""

    max_draft_tokens: int  # most nodes of a tree, without the root
    aux_hidden_state_layers: tuple[int, ...]  # layers of the target, see TargetModel
    reads_next_token: bool  # its KV of a token depends on the next token, which prefix cache keys then include

    def propose(self, context: ProposeContext) -> DraftTree:
        """Trees of `context.requests`, in their order.

        Steps may be missing: the `start` of a request is then larger than its last `end`. Raises DraftFaultError if
        there are no trees.
        """

    def release(self, slots: Sequence[int]) -> None:
        """Forget the requests of these slots."""


@runtime_checkable
class DeviceDrafter(Protocol):
    """A Drafter that computes its trees on the device without the host, so that a CUDA graph can record it.

    `propose` chooses what is read, and takes the trees of `ProposeContext.replay` if that is what a step committed.
    """

    reason_without_graphs: str | None  # why no graph can record it after all, in this configuration; None: one can

    def draft(self, rows: DraftRows) -> DraftTree:
        """The trees of `rows`, which may exceed draft limits: the caller truncates them."""


def device_drafter(drafter: Drafter) -> DeviceDrafter | str:
    """This drafter, or the one that it hands its contexts to as `drafter`, for CUDA graphs; or why it has none."""
    innermost: Drafter | None = drafter
    while innermost is not None and not isinstance(innermost, DeviceDrafter):
        drafter, innermost = innermost, getattr(innermost, "drafter", None)
    if innermost is None:
        reason: str = getattr(drafter, "reason_without_graphs", "the drafter has no `draft` (see DeviceDrafter)")
        return reason
    return innermost.reason_without_graphs or innermost


@runtime_checkable
class SharesKVSlots(Protocol):
    """A Drafter with KV in the target's slots that does not see all requests: others may reuse its slots."""

    def forget_kv(self, table: RequestTable, requests: Sequence[DraftRequest]) -> None:
        """These requests, which this drafter does not draft for, have written their KV slots from `start` on."""


@runtime_checkable
class CompositeDrafter(Protocol):
    """A Drafter that consists of several. Each gets a context of its own."""

    members: Mapping[str, Drafter]
    replays: dict[str, Callable[[ProposeContext], Callable[[], DraftTree] | None]]  # `replay` of members that have one

    def take_uses(self) -> list[DrafterUse]:
        """What each did since the last call."""


def composite_of(drafter: Drafter | None) -> CompositeDrafter | None:
    """This drafter, or the one behind its `drafter`, if it consists of several."""
    while drafter is not None and not isinstance(drafter, CompositeDrafter):
        drafter = getattr(drafter, "drafter", None)
    return drafter


class UnsizedTrees(NamedTuple):
    """Trees of a step whose numbers of nodes may not be on the host yet."""

    tree: DraftTree
    most_nodes: list[int]  # upper bound of the nodes of each tree
    wait_for_sizes: Callable[[], tuple[DraftTree, list[int]]]  # the second half of `collect`

    @classmethod
    def roots(cls, tokens: Tensor) -> "UnsizedTrees":
        """See `DraftTree.roots`."""
        tree, num_nodes = DraftTree.roots(tokens), [1] * len(tokens)
        return cls(tree, num_nodes, lambda: (tree, num_nodes))


class EarlyStep(NamedTuple):
    """A step of R requests whose outcome is on the device, but not on the host yet."""

    requests: list[DraftRequest]  # their bounds are not known: 0
    outcome: Tensor  # int64 [R, 2 + 2 * N], see StepOutput
    # [R * N, any], the hidden states of the nodes that each request keeps, in order; None: the drafter reads none
    gather_states: Callable[[], Tensor] | None


class TreeRows(NamedTuple):
    """The B requests of a step."""

    slots: Tensor  # int64 [B]
    roots: Tensor  # int64 [B], their last known tokens
    host: list[tuple[int, int]]  # the host's copy of both


class DraftReport(NamedTuple):
    """What happened in a DraftSource; see StepResult."""

    faults: Sequence[DraftFault] = ()
    uses: Sequence[DrafterUse] = ()  # what each of several drafters did
    # A drafter that reads hidden states, in a new process, took over. Those of earlier steps are lost to it; a draft
    # model that reads tokens alone catches up.
    is_new: bool = False


class DraftSource(Protocol):
    """Where a drafter runs: `submit` starts drafting, `collect` takes the trees that are ready for the next step."""

    @property
    def max_draft_tokens(self) -> int: ...

    @property
    def aux_hidden_state_layers(self) -> tuple[int, ...]: ...

    @property
    def reads_next_token(self) -> bool: ...

    @property
    def reads_context(self) -> bool:
        """Whether `submit` reads its context. If not, it gets an empty one."""

    @property
    def waits_on_device(self) -> bool:
        """Whether the device waits for the trees of a drafter in another process, so that the host need not."""

    @property
    def seconds(self) -> float:
        """Time spent on the drafts that were collected last; 0 if they were made early (`draft_early`)."""

    @property
    def scores(self) -> list[list[float]]:
        """Of the drafts that were collected last, those that were too unlikely included; see `DraftTree.scores`.

        One list for each request; empty if no request had a `DraftLimit.min_score`, or if scores are not known.
        """

    def submit(self, context: ProposeContext) -> None: ...

    def draft_early(self, step: EarlyStep) -> DraftTree | None:
        """Let the drafter of another process draft after a step before the host has its outcome.

        Returns the trees, for `take_next` alone, because they are not complete yet. Then `submit` only tells the
        drafter what the step has committed. None: the drafter waits for `submit`.
        """

    def take_unsized(self, slots: Tensor, roots: Tensor, draft_limits: Sequence[DraftLimit]) -> "UnsizedTrees | None":
        """The first half of `collect`, which does not wait for the drafter; None if `collect` cannot be divided."""

    def take_next(
        self, tree: DraftTree, slots: Tensor, roots: Tensor, draft_limits: Sequence[DraftLimit]
    ) -> UnsizedTrees:
        """`take_unsized` of trees that the device has made for these requests: `Pass.drafts`."""

    def collect(self, rows: TreeRows, draft_limits: Sequence[DraftLimit]) -> tuple[DraftTree, list[int]]:
        """(trees, their numbers of nodes on the host) of these requests.

        A tree has at most `draft_limits[b].num_tokens` nodes beside its root, and
        none that is less likely than `min_score`. It is a root only if no tree is ready, or if the tree is invalid or
        was made for another last token.
        """

    def release(self, slots: Sequence[int]) -> None: ...

    def take_report(self) -> DraftReport:
        """What happened since the last call."""
