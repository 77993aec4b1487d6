"""Drafts from the output that a client predicts (OpenAI's `prediction`), in place of the configured drafter's trees.

While a request's output follows its prediction, the next predicted tokens are the draft. Where the two differ, the
drafter's own trees are used until the last `MIN_MATCH` output tokens occur in the prediction again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from specray.spec_decode.draft_tree import NONE, DraftTree, TreeLists
from specray.spec_decode.drafter import Drafter, ProposeContext
from specray.spec_decode.request_table import RequestState
from specray.spec_decode.tree_edits import replace_trees

MIN_MATCH = 2  # with one token, a frequent word would lead to the wrong place


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
        prediction.follow(state.token_ids[state.num_prompt_tokens + prediction.num_followed :])
        return prediction.next_tokens(self.max_draft_tokens)


@dataclass(slots=True, eq=False)
class Prediction:
    """A predicted output, and the place in it that the real output has reached."""

    token_ids: Sequence[int]
    num_followed: int = 0  # output tokens
    _next: int | None = 0  # place of the token expected next; None away from the prediction
    _left_at: int = 0  # where the output last left it
    _last: list[int] = field(default_factory=list)  # the last MIN_MATCH output tokens
    _places: dict[tuple[int, ...], list[int]] = field(default_factory=dict)  # after each n-gram, ascending

    def __post_init__(self) -> None:
        for end in range(MIN_MATCH, len(self.token_ids) + 1):
            self._places.setdefault(tuple(self.token_ids[end - MIN_MATCH : end]), []).append(end)

    def follow(self, output: Sequence[int]) -> None:
        """Read the next output tokens."""
        for token in output:
            self._last = [*self._last[1 - MIN_MATCH :], token]
            if self._next is not None and list(self.token_ids[self._next : self._next + 1]) == [token]:
                self._next += 1
                continue
            self._left_at = self._left_at if self._next is None else self._next
            self._next = self._found()
        self.num_followed += len(output)

    def next_tokens(self, most: int) -> list[int]:
        """Up to `most` tokens that are expected next; none away from the prediction."""
        return [] if self._next is None else list(self.token_ids[self._next : self._next + most])

    def _found(self) -> int | None:
        """The place after the last output tokens: the first one past where the output left, or the last one before."""
        places = self._places.get(tuple(self._last), [])
        return next((place for place in places if place >= self._left_at), places[-1] if places else None)
