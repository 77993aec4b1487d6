"""The input of a drafter: requests after a step, with what the step committed."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from specray.spec_decode.draft_tree import DraftTree
from specray.spec_decode.request_table import RequestTable
from specray.spec_decode.tree_noise import TreeNoise
from specray.spec_decode.tree_shape import TreeShape
from specray.step import DraftLimit


class DraftRequest(NamedTuple):
    """One request after a step.

    The step committed the tokens at positions `start` … `end - 1`. The token at `end` is also known: the bonus token,
    or the next one of the prompt. A drafter that pairs the hidden states of a token with the next token therefore has
    all its pairs. A drafter's KV of a token may lie in the same KV slot as the target's: blocks are shared and freed
    together.
    """

    slot: int
    start: int
    end: int
    draft_limit: DraftLimit  # nodes and levels beyond it will not be verified


def bounds_on_host(requests: Sequence[DraftRequest]) -> tuple[list[int], list[int], list[int]]:
    """Slots, starts and ends."""
    return [each.slot for each in requests], [each.start for each in requests], [each.end for each in requests]


@dataclass(frozen=True, eq=False)
class ProposeContext:
    """Input for the next step's drafts."""

    table: RequestTable  # token ids, KV slots, seeds and sampling options by slot
    requests: list[DraftRequest]  # each gets a tree, whose root is its last known token, at `end`
    # Requests that get no tree: their prompt is not complete, or their limit allows no drafts.
    unfinished: list[DraftRequest] = field(default_factory=list)
    gather_aux_hidden_states: Callable[[], Tensor] | None = None  # None: the drafter asked for none
    # KV slots of tokens that the target computed in steps that the drafter did not see: they hold other KV of its own.
    missed_kv_slots: Collection[int] = ()
    # `DeviceDrafter.draft` for `requests` as a CUDA graph, which is faster. It reads the tokens that the step committed
    # and nothing else. None: it was not captured, or some request is unfinished or committed tokens of its prompt.
    replay: Callable[[], DraftTree] | None = None
    # The trees of `replay` were taken on the device by the next step, which has begun. Drafters only record what they
    # have read.
    are_drafts_taken: bool = False
    known_bounds: Tensor | None = None  # `bounds`, if they are on the device already

    @property
    def draft_limits(self) -> list[DraftLimit]:
        """Those of `requests`."""
        return [request.draft_limit for request in self.requests]

    @cached_property
    def aux_hidden_states(self) -> Tensor | None:
        """[sum of end - start, len(aux_hidden_state_layers) * hidden] of the computed tokens.

        First of `requests`, then of `unfinished`.
        """
        return None if self.gather_aux_hidden_states is None else self.gather_aux_hidden_states()

    def token_ids(self, request: DraftRequest) -> list[int]:
        """A request's known tokens up to `end`, on the host."""
        return self.table.states[request.slot].token_ids

    def are_sampled(self, requests: Sequence[DraftRequest]) -> list[bool]:
        """Which requests have a temperature above 0."""
        return [self.table.states[request.slot].sampling.is_sampled for request in requests]

    def noise(self, requests: Sequence[DraftRequest], slots: Tensor, ends: Tensor, num_levels: int) -> TreeNoise | None:
        """The noise of `requests`, whose `slots` and `ends` are int64 [B]; None if all are greedy."""
        is_sampled = any(self.are_sampled(requests))
        return TreeNoise.of(self.table, slots, ends, num_levels) if is_sampled else None

    def limited(self, shape: TreeShape, requests: Sequence[DraftRequest]) -> TreeShape:
        """`shape` within the limits of these requests, of which there is one at least."""
        limits = [request.draft_limit for request in requests]
        return shape.limited(max(limit.num_steps for limit in limits), max(limit.num_tokens for limit in limits))

    @cached_property
    def bounds(self) -> Tensor:
        """`bounds_of` of `requests` and then `unfinished`."""
        return self.bounds_of(self.requests + self.unfinished) if self.known_bounds is None else self.known_bounds

    def roots(self) -> Tensor:
        """The last known tokens of `requests`, int64 [B]."""
        slots, _, ends = (column[: len(self.requests)] for column in self.bounds)
        return self.table.tokens_at(slots, ends)

    def bounds_of(self, requests: Sequence[DraftRequest]) -> Tensor:
        """`bounds_on_host`, int64 [3, n] on the device."""
        return self.table.numbers(*bounds_on_host(requests))
