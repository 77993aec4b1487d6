"""NGRAM: drafts are continuations of earlier occurrences of the last tokens, in this request or in finished ones.

There is no model. `ngram_index` finds earlier occurrences of the request's last tokens, and `ngram_tree` makes a tree
of what follows them. A symbol is a token combined with the number of its cache salt, so that texts of different salts
never match.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from specray.config import SpeculativeConfig
from specray.spec_decode.draft_tree import DraftTree, TreeLists
from specray.spec_decode.ngram_index import GAP, SuffixIndex, num_levels
from specray.spec_decode.ngram_rules import NgramRules, ngram_rules
from specray.spec_decode.ngram_tree import Level, NgramDraft, draft
from specray.spec_decode.propose_context import ProposeContext
from specray.spec_decode.request_state import RequestState

_LEAST_OWN_CAPACITY = 1024  # initial capacity for a request's tokens; doubled as it grows
_MOST_SALTS = 10_000
_TOKEN_BITS = 32  # bits of the token in a symbol; the salt's number is above


class NgramDrafter:
    """Drafter by lookup. The outputs of finished requests are shared with requests of the same cache salt."""

    aux_hidden_state_layers: tuple[int, ...] = ()
    reads_next_token = False
    reason_without_graphs = "n-grams are looked up on the host"

    def __init__(self, rules: NgramRules) -> None:
        self.max_draft_tokens = rules.max_draft_tokens
        self._rules = rules
        self._levels = [level for level in range(num_levels(rules.max_window)) if 2 << level > rules.min_window]
        self._shared = self._index(rules.capacity)
        self._texts: dict[int, _Text] = {}
        self._ended: list[list[int]] = []
        self._salts: dict[str, int] = {}
        self._salt_numbers = count(1)

    @classmethod
    def of(cls, config: SpeculativeConfig) -> "NgramDrafter":
        return cls(ngram_rules(config))

    def propose(self, context: ProposeContext) -> DraftTree:
        return DraftTree.from_lists([found.tree for found in self.draft(context)], context.table.device)

    def draft(self, context: ProposeContext) -> list[NgramDraft]:
        """The tree of each of `context.requests`, and the length of the match behind it."""
        for text in self._ended:
            self._shared.extend(text)
        self._ended.clear()
        return [self._draft_one(context.table.states[request.slot]) for request in context.requests]

    def release(self, slots: Sequence[int]) -> None:
        """Share the outputs of finished requests, and the last tokens of their prompts, with requests of the same salt.

        They are indexed in the next `propose`, because a step waits for this call.
        """
        for slot in slots:
            if text := self._texts.pop(slot, None):
                start = max(0, text.request.num_prompt_tokens - self._rules.max_window)
                self._ended.append([*text.symbols(start), GAP])

    def _draft_one(self, request: RequestState) -> NgramDraft:
        text = self._read(request)
        found = draft(self._search(text), 0, self._rules)
        tokens = [symbol & (1 << _TOKEN_BITS) - 1 for symbol in found.tree.tokens]
        tokens[0] = request.token_ids[-1]
        return NgramDraft(TreeLists(tokens, found.tree.parents), found.match_length)

    def _read(self, request: RequestState) -> "_Text":
        """The request's text, extended by the tokens since the last call."""
        text = self._texts.get(request.slot)
        if text is None:
            text = _Text(request, self._salt_number(request.cache_salt), self._index(_LEAST_OWN_CAPACITY))
        text.request = request
        if len(request.token_ids) > text.index.capacity:
            text.index = self._index(2 * len(request.token_ids))
        text.index.extend(text.symbols(len(text.index)))
        self._texts[request.slot] = text
        return text

    def _search(self, text: "_Text") -> Iterator[Level]:
        """Matches, longest first."""
        window = self._rules.max_window
        last = text.symbols(max(0, len(text.request.token_ids) - window))[::-1]
        suffix = np.array(last + [GAP] * (window - len(last)), dtype=np.int64)
        for level in reversed(self._levels):
            key = text.index.end_keys[level]
            yield Level(1 << level, text.index.find(level, key, suffix), self._shared.find(level, key, suffix))

    def _index(self, capacity: int) -> SuffixIndex:
        return SuffixIndex(capacity, self._rules.max_window, self._rules.reach)

    def _salt_number(self, salt: str) -> int:
        """A number that was never assigned to another salt. The least recently used salt is evicted with its texts."""
        number = self._salts.pop(salt, None) or next(self._salt_numbers)
        self._salts[salt] = number  # move it to the end
        if len(self._salts) > _MOST_SALTS:  # a client may send a new salt with every request
            del self._salts[next(iter(self._salts))]
        return number


@dataclass(slots=True, eq=False)
class _Text:
    """A running request."""

    request: RequestState
    salt: int
    index: SuffixIndex

    def symbols(self, start: int) -> list[int]:
        """From token `start` on."""
        above = self.salt << _TOKEN_BITS
        return [above | token for token in self.request.token_ids[start:]]
