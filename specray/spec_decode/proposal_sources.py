"""Trees that `MergedDrafter` merges with a drafter's: what n-grams and a predicted output propose for a request."""

from collections.abc import Callable, Sequence
from typing import Protocol

from specray.spec_decode.draft_tree import NONE, TreeLists
from specray.spec_decode.ngram import NgramDrafter, with_tokens
from specray.spec_decode.ngram_tree import grow_matches
from specray.spec_decode.prediction import Prediction
from specray.spec_decode.request_state import RequestState
from specray.spec_decode.tree_merge import Proposal, Rate

PREDICTION, TEXTS = "prediction", ("own text", "finished texts", "corpora")


class Source(Protocol):
    """Proposes trees of host data."""

    def propose(self, state: RequestState, rate_of: Callable[[str], Rate], most: int) -> list[Proposal]:
        """Trees of up to `most` nodes; `rate_of` has the rates of each source."""

    def release(self, slots: Sequence[int]) -> None:
        """Forget the requests of these slots."""


class NgramSource:
    """What followed the last tokens before, in the three kinds of text."""

    def __init__(self, ngrams: NgramDrafter) -> None:
        self._ngrams = ngrams
        self.release = ngrams.release

    def propose(self, state: RequestState, rate_of: Callable[[str], Rate], most: int) -> list[Proposal]:
        proposals = []
        for name, matches in zip(TEXTS, self._ngrams.matches(state), strict=True):
            if matches:
                tree, evidence = grow_matches(matches, rate_of(name), most)
                proposals.append(Proposal(name, with_tokens(tree, state.token_ids[-1]), evidence))
        return proposals


class PredictionSource:
    """The output that a client predicts (OpenAI's `prediction`), while the request's output follows it."""

    def __init__(self) -> None:
        self._predictions: dict[int, Prediction] = {}  # by slot

    def propose(self, state: RequestState, rate_of: Callable[[str], Rate], most: int) -> list[Proposal]:  # noqa: ARG002
        prediction = self._predictions.get(state.slot)
        if prediction is None:
            prediction = self._predictions[state.slot] = Prediction(state.predicted_token_ids)
        prediction.advance(state.token_ids[state.num_prompt_tokens + prediction.num_followed :])
        chain = prediction.next_tokens(most)
        tree = TreeLists([state.token_ids[-1], *chain], [NONE, *range(len(chain))])
        followed = prediction.num_in_row
        return [Proposal(PREDICTION, tree, [(followed + depth).bit_length() for depth in range(len(tree.tokens))])]

    def release(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._predictions.pop(slot, None)
