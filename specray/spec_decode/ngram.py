"""NGRAM: drafts are continuations of earlier occurrences of the last tokens, in this request or in finished ones.

There is no model. `ngram_index` finds earlier occurrences of the request's last tokens, and `ngram_tree` makes a tree
of what follows them. A symbol is a token combined with the number of its cache salt, so that texts of different salts
never match. A `Corpus` is a further text, which its tenants share.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from specray.spec_decode.corpus import Corpus
from specray.spec_decode.draft_tree import DraftTree, TreeLists
from specray.spec_decode.ngram_index import GAP, Match, SuffixIndex, num_levels
from specray.spec_decode.ngram_rules import NgramRules
from specray.spec_decode.ngram_tree import Level, draft, latest_first
from specray.spec_decode.propose_context import ProposeContext
from specray.spec_decode.request_state import RequestState
from specray.tenants import tenant_of

_LEAST_OWN_CAPACITY = 1024  # initial capacity for a request's tokens; doubled as it grows
_MOST_SALTS = 10_000
_TOKEN_BITS = 32  # bits of the token in a symbol; the salt's number is above


class NgramDrafter:
    """Drafter by lookup. The outputs of finished requests are shared with requests of the same cache salt."""

    aux_hidden_state_layers: tuple[int, ...] = ()
    reads_next_token = False
    reason_without_graphs = "n-grams are looked up on the host"

    def __init__(self, rules: NgramRules, corpora: Sequence[Corpus] = ()) -> None:
        self.max_draft_tokens = rules.max_draft_tokens
        self._rules = rules
        self._corpora = corpora
        self._levels = [level for level in range(num_levels(rules.max_window)) if 2 << level > rules.min_window]
        self._shared = self._index(rules.capacity)
        self._texts: dict[int, _Text] = {}
        self._ended: list[list[int]] = []
        self._salts: dict[str, int] = {}
        self._salt_numbers = count(1)

    def propose(self, context: ProposeContext) -> DraftTree:
        states = [context.table.states[request.slot] for request in context.requests]
        return DraftTree.from_lists([self._draft(state) for state in states], context.table.device)

    def matches(self, request: RequestState) -> list[list[Match]]:
        """Matches of a request's last tokens in each kind of text, see `Level`; the longest first. Symbols follow."""
        found: list[dict[int, Match]] = [{}, {}, {}]
        for level in self._search(request):
            for places, new in zip(found, level.places, strict=True):
                places |= new
        return [sorted(latest_first(places), key=lambda match: -match.length) for places in found]

    def release(self, slots: Sequence[int]) -> None:
        """Share the outputs of finished requests, and the last tokens of their prompts, with requests of the same salt.

        They are indexed in the next `propose`, because a step waits for this call.
        """
        for slot in slots:
            if text := self._texts.pop(slot, None):
                start = max(0, text.request.num_prompt_tokens - self._rules.max_window)
                self._ended.append([*text.symbols(start), GAP])

    def _draft(self, request: RequestState) -> TreeLists:
        return with_tokens(draft(self._search(request), 0, self._rules), request.token_ids[-1])

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

    def _search(self, request: RequestState) -> Iterator[Level]:
        """Matches, longest first."""
        for ended in self._ended:
            self._shared.extend(ended)
        self._ended.clear()
        text, window = self._read(request), self._rules.max_window
        last = text.symbols(max(0, len(request.token_ids) - window))[::-1]
        suffix = np.array(last + [GAP] * (window - len(last)), dtype=np.int64)
        quoted = self._find_in_corpora(text)
        for level in reversed(self._levels):
            key = text.index.end_keys[level]
            of_level = {place: match for place, match in quoted.items() if match.length >= 1 << level}
            own, shared = (index.find(level, key, suffix) for index in (text.index, self._shared))
            yield Level(1 << level, (own, shared, of_level))

    def _find_in_corpora(self, text: "_Text") -> dict[int, Match]:
        request, found = text.request, dict[int, Match]()
        for corpus in self._corpora:
            if corpus.serves(tenant_of(request.cache_salt)):
                found |= corpus.find(request.token_ids, self._rules.max_window, self._rules.reach)
        return {place: Match(match.length, text.as_symbols(match.follows)) for place, match in found.items()}

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
        return self.as_symbols(self.request.token_ids[start:])

    def as_symbols(self, token_ids: Sequence[int]) -> list[int]:
        above = self.salt << _TOKEN_BITS
        return [above | token for token in token_ids]


def with_tokens(tree: TreeLists, root: int) -> TreeLists:
    """A tree of symbols as one of tokens below the token `root`."""
    return TreeLists([root, *(symbol & (1 << _TOKEN_BITS) - 1 for symbol in tree.tokens[1:])], tree.parents)
