"""Drafts from the output that a client predicts (OpenAI's `prediction`), in place of the configured drafter's trees.

While a request's output follows its prediction, the next predicted tokens are the draft. Where the two differ, the
drafter's own trees are used until the last output tokens occur in the prediction again (`prediction`).
"""

from collections.abc import Sequence

import torch

from specray.spec_decode.draft_tree import NONE, DraftTree, TreeLists
from specray.spec_decode.drafter import Drafter
from specray.spec_decode.prediction import Prediction
from specray.spec_decode.propose_context import ProposeContext
from specray.spec_decode.request_state import RequestState
from specray.spec_decode.tree_edits import replace_trees


class PredictionDrafter:
    """`drafter`, overridden for requests whose output follows their prediction."""

    def __init__(self, drafter: Drafter) -> None:
        self.max_draft_tokens = drafter.max_draft_tokens
        self.aux_hidden_state_layers = drafter.aux_hidden_state_layers
        self.reads_next_token = drafter.reads_next_token
        self.drafter = drafter
        self._predictions: dict[int, Prediction] = {}  # by slot

    def propose(self, context: ProposeContext) -> DraftTree:
        tree = self.drafter.propose(context)  # for all requests, so that its state stays up to date
        states = [context.table.states[request.slot] for request in context.requests]
        chains = {place: self._chain(state) for place, state in enumerate(states) if state.predicted_token_ids}
        places = [place for place, chain in chains.items() if chain]
        if not places:
            return tree
        device = context.table.device
        trees = [TreeLists([states[p].token_ids[-1], *chains[p]], [NONE, *range(len(chains[p]))]) for p in places]
        return replace_trees(tree, torch.tensor(places, device=device), DraftTree.from_lists(trees, device))

    def release(self, slots: Sequence[int]) -> None:
        self.drafter.release(slots)
        for slot in slots:
            self._predictions.pop(slot, None)

    def _chain(self, state: RequestState) -> list[int]:
        prediction = self._predictions.get(state.slot)
        if prediction is None:
            prediction = self._predictions[state.slot] = Prediction(state.predicted_token_ids)
        prediction.advance(state.token_ids[state.num_prompt_tokens + prediction.num_followed :])
        return prediction.next_tokens(self.max_draft_tokens)
