"""What all drafters over a head share that reads the target's hidden states.

The head's KV of position i lies in the same KV slot as the target's, so blocks are shared, cached and freed together.
The drafter records which KV slots it has written and attends only to those, so it can join running requests and can
miss a step.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from specray.models.heads.served import DraftHead
from specray.spec_decode.draft_rows import DraftKV, DraftRows
from specray.spec_decode.draft_setup import attention_without_graphs
from specray.spec_decode.draft_tree import DraftTree
from specray.spec_decode.drafter import TargetView
from specray.spec_decode.propose_context import DraftRequest, ProposeContext
from specray.spec_decode.request_table import RequestTable
from specray.spec_decode.scheduled_rows import Reads, ScheduledRows
from specray.spec_decode.written_slots import WrittenSlots


class HeadDrafter(ABC):
    """Drafter over `head`, with its KV in `kv`."""

    def __init__(self, head: DraftHead, kv: DraftKV, target: TargetView) -> None:
        self.max_draft_tokens = kv.shape.num_draft_tokens - 1
        self.aux_hidden_state_layers = head.aux_hidden_state_layers
        self.reads_next_token = kv.reads_next_token
        self.reason_without_graphs = attention_without_graphs(kv.attention) or head.reason_without_graphs
        self._kv = kv
        self._written = WrittenSlots(target.num_slots)
        self._inference = torch.inference_mode()

    def propose(self, context: ProposeContext) -> DraftTree:
        with self._inference:
            self._written.read(context)
            requests = context.requests + context.unfinished
            if not requests:
                return DraftTree.from_lists([], context.table.device)
            if self._written.are_all(context.table, requests):
                if context.replay is not None:
                    return context.replay()
                if (tree := self._in_one_call(context)) is not None:
                    return tree
            visible = self._written.visible(context.table, context.bounds[0], requests)
            return self.draft(ScheduledRows(context, context.requests, [Reads(requests, context.bounds, *visible)]))

    @abstractmethod
    def draft(self, rows: DraftRows) -> DraftTree:
        """See DeviceDrafter."""

    def forget_kv(self, table: RequestTable, requests: Sequence[DraftRequest]) -> None:
        self._written.update(table, requests, [request.end for request in requests])

    def release(self, slots: Sequence[int]) -> None:  # noqa: B027
        """The only state is KV in the requests' blocks."""

    def _in_one_call(self, context: ProposeContext) -> DraftTree | None:  # noqa: ARG002
        """The trees by one call of the CPU kernels, if all KV is written; None if these cannot make them."""
        return None
