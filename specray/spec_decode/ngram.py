"""NGRAM: drafts are copies of what followed the same words before, in this request or in those that ended.

No model: places that end like the request does now are looked up (`ngram_index`), what follows them is put into a
tree (`ngram_tree`). Everything is one stream of symbols, a token beside the number of its cache salt, so that text of
one salt never equals another's. Not here: how the neural methods and this one go together (`combined`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from specray.config import SpeculativeConfig
from specray.spec_decode.draft_tree import DraftTree, RowTree
from specray.spec_decode.drafter import DraftRow, ProposeContext
from specray.spec_decode.ngram_index import GAP, SuffixIndex, num_levels
from specray.spec_decode.ngram_rules import NgramRules, ngram_rules
from specray.spec_decode.ngram_tree import Level, NgramDraft, draft

_LEAST_OWN_CAPACITY = 1024  # tokens of a request; doubled as it grows
_MOST_SALTS = 10_000
_TOKEN_BITS = 32  # of a symbol; the salt's number is above


class NgramDrafter:
    """Drafter by lookup; shares what ended requests of the same cache salt have said."""

    aux_hidden_state_layers: tuple[int, ...] = ()
    reads_next_token = False

    def __init__(self, rules: NgramRules) -> None:
        self.max_draft_tokens = rules.max_drafts
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
        return DraftTree.of([found.tree for found in self.draft(context.rows)])

    def draft(self, rows: Sequence[DraftRow]) -> list[NgramDraft]:
        """Each row's tree, and the length of the match behind it."""
        for text in self._ended:
            self._shared.extend(text)
        self._ended.clear()
        return [self._draft_row(row) for row in rows]

    def release(self, slots: Sequence[int]) -> None:
        """Outputs of ended requests, with the words before them, become common knowledge of their salt.

        They are read with the next drafts: a step waits for this.
        """
        for slot in slots:
            if text := self._texts.pop(slot, None):
                start = max(0, text.row.num_prompt_tokens - self._rules.max_window)
                self._ended.append([*text.symbols(start), GAP])

    def _draft_row(self, row: DraftRow) -> NgramDraft:
        text = self._read(row)
        found = draft(self._search(text), 0, self._rules)
        tokens = [symbol & (1 << _TOKEN_BITS) - 1 for symbol in found.tree.tokens]
        tokens[0] = row.token_ids[-1]
        return NgramDraft(RowTree(tokens, found.tree.parents), found.match_length)

    def _read(self, row: DraftRow) -> "_Text":
        """The row's text, with what it has said since the last time."""
        text = self._texts.get(row.slot)
        if text is None:
            text = _Text(row, self._salt_number(row.cache_salt), self._index(_LEAST_OWN_CAPACITY))
        if len(row.token_ids) > text.index.capacity:
            text.index = self._index(2 * len(row.token_ids))
        text.row = row
        text.index.extend(text.symbols(len(text.index)))
        self._texts[row.slot] = text
        return text

    def _search(self, text: "_Text") -> Iterator[Level]:
        """What is found, the longest matches first."""
        window = self._rules.max_window
        words = text.symbols(max(0, len(text.row.token_ids) - window))[::-1]
        suffix = np.array(words + [GAP] * (window - len(words)), dtype=np.int64)
        for level in reversed(self._levels):
            key = text.index.end_keys[level]
            yield Level(1 << level, text.index.find(level, key, suffix), self._shared.find(level, key, suffix))

    def _index(self, capacity: int) -> SuffixIndex:
        return SuffixIndex(capacity, self._rules.max_window, self._rules.reach)

    def _salt_number(self, salt: str) -> int:
        """A number that no other salt has had. One that was not used for long is forgotten, and with it its texts."""
        number = self._salts.pop(salt, None) or next(self._salt_numbers)
        self._salts[salt] = number  # behind all others
        if len(self._salts) > _MOST_SALTS:  # or a client with a new salt in every request would fill the memory
            del self._salts[next(iter(self._salts))]
        return number


@dataclass(slots=True, eq=False)
class _Text:
    """A running request."""

    row: DraftRow
    salt: int
    index: SuffixIndex

    def symbols(self, start: int) -> list[int]:
        """From token `start` on."""
        above = self.salt << _TOKEN_BITS
        return [above | token for token in self.row.token_ids[start:]]
