"""Two drafters for one request: n-grams where a long match exists, a draft model otherwise.

Where text is copied, a long match predicts more tokens correctly than a draft model.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from specray.config import SpeculativeConfig
from specray.spec_decode.draft_tree import DraftTree
from specray.spec_decode.drafter import Drafter
from specray.spec_decode.ngram import NgramDrafter
from specray.spec_decode.ngram_rules import ngram_rules
from specray.spec_decode.propose_context import ProposeContext
from specray.spec_decode.tree_edits import replace_trees


def with_override(drafter: Drafter, config: SpeculativeConfig) -> Drafter:
    """`drafter`, overridden by n-grams if `ngram_override_min_match` is set."""
    if config.ngram_override_min_match is None:
        return drafter
    rules = replace(ngram_rules(config), max_draft_tokens=drafter.max_draft_tokens)
    return CombinedDrafter(drafter, NgramDrafter(rules), config.ngram_override_min_match)


class CombinedDrafter:
    """Drafter that takes the n-gram tree of each request with a match of at least `min_match` tokens."""

    def __init__(self, drafter: Drafter, ngrams: NgramDrafter, min_match: int) -> None:
        self.max_draft_tokens = drafter.max_draft_tokens
        self.aux_hidden_state_layers = drafter.aux_hidden_state_layers
        self.reads_next_token = drafter.reads_next_token
        self.drafter = drafter
        self._ngrams = ngrams
        self._min_match = min_match

    def propose(self, context: ProposeContext) -> DraftTree:
        tree = self.drafter.propose(context)  # for all requests, so that its state stays up to date
        found = self._ngrams.draft(context)
        places = [
            place
            for place, ngram in enumerate(found)
            if ngram.match_length >= self._min_match and len(ngram.tree.tokens) > 1
        ]
        if not places:
            return tree
        device = context.table.device
        ngrams = DraftTree.from_lists([found[place].tree for place in places], device)
        return replace_trees(tree, torch.tensor(places, device=device), ngrams)

    def release(self, slots: Sequence[int]) -> None:
        self.drafter.release(slots)
        self._ngrams.release(slots)
