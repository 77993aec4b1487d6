"""A drafter whose requests may have a predicted output. A step in which none has one is the drafter's alone."""

from specray.spec_decode.draft_tree import DraftTree
from specray.spec_decode.drafter import Drafter
from specray.spec_decode.merged import MergedDrafter
from specray.spec_decode.proposal_sources import PredictionSource
from specray.spec_decode.propose_context import ProposeContext
from specray.spec_decode.request_state import RequestState


class PredictedOutputs(MergedDrafter):
    """Merges the trees of requests with a predicted output; the others have trees of `drafter` alone."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter, PredictionSource(), drafter.max_draft_tokens)
        self._gives_scores = False  # merged trees have scores if all others have them

    def propose(self, context: ProposeContext) -> DraftTree:
        states = context.table.states
        if any(states[request.slot].predicted_token_ids for request in context.requests + context.unfinished):
            return super().propose(context)
        return self.drafter.propose(context)

    def _covers(self, state: RequestState) -> bool:
        return bool(state.predicted_token_ids)
