"""Two drafters for one request: n-grams draft where its last tokens were seen before, a model everywhere else.

Where text is copied, a long match is right more often, and further ahead, than a draft model. Not here: either drafter.
"""

from collections.abc import Sequence
from dataclasses import replace

from specray.config import SpeculativeConfig
from specray.spec_decode.draft_tree import DraftTree
from specray.spec_decode.drafter import Drafter, ProposeContext
from specray.spec_decode.ngram import NgramDrafter
from specray.spec_decode.ngram_rules import ngram_rules


def with_override(drafter: Drafter, config: SpeculativeConfig) -> Drafter:
    """`drafter`, in whose place n-grams draft if the configuration says so."""
    if config.ngram_override_min_match is None:
        return drafter
    rules = replace(ngram_rules(config), max_drafts=drafter.max_draft_tokens)
    return CombinedDrafter(drafter, NgramDrafter(rules), config.ngram_override_min_match)


class CombinedDrafter:
    """Drafter that takes the n-grams' tree of each row with a match of at least `min_match` tokens."""

    def __init__(self, drafter: Drafter, ngrams: NgramDrafter, min_match: int) -> None:
        self.max_draft_tokens = drafter.max_draft_tokens
        self.aux_hidden_state_layers = drafter.aux_hidden_state_layers
        self.reads_next_token = drafter.reads_next_token
        self._drafter = drafter
        self._ngrams = ngrams
        self._min_match = min_match

    def propose(self, context: ProposeContext) -> DraftTree:
        trees = self._drafter.propose(context).rows()  # of all rows: its state has to follow those it loses, too
        found = self._ngrams.draft(context.rows)
        pairs = zip(trees, found, strict=True)
        return DraftTree.of([ngram.tree if ngram.match_length >= self._min_match else tree for tree, ngram in pairs])

    def release(self, slots: Sequence[int]) -> None:
        self._drafter.release(slots)
        self._ngrams.release(slots)
