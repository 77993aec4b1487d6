"""NGRAM: drafts are copies of what followed the same words before, in this request or in earlier outputs.

No model: a bigram index finds earlier places that end like the request does now; the longest common
suffixes come first, their continuations are merged into one tree. A match of m tokens earns at most
2 m drafts, so weak evidence costs little (the rule of suffix decoding, arXiv:2411.04975).
"""

from collections.abc import Iterator, Sequence

from specray.config import SpeculativeConfig
from specray.spec_decode.draft_tree import NONE, ROOT, DraftTree, RowTree
from specray.spec_decode.drafter import DraftRow, ProposeContext

DEFAULT_NUM_DRAFT_TOKENS = 12  # SGLang's speculative_num_draft_tokens for NGRAM, root included
_MAX_MATCH = 12  # tokens of suffix compared
_DRAFTS_PER_MATCHED_TOKEN = 2
_PLACES = 8  # most recent places of a bigram that are looked at
_SHARED_TOKENS = 100_000  # of earlier outputs remembered for each cache salt
_SALTS = 16  # salts whose outputs are remembered, those taught last
_GAP = -2  # stands between texts; no token id


class NgramDrafter:
    """Drafter by lookup; shares what finished requests of the same cache salt have said."""

    feature_layers: tuple[int, ...] = ()
    reads_next_token = False

    def __init__(self, config: SpeculativeConfig) -> None:
        self.max_draft_tokens = (config.num_draft_tokens or DEFAULT_NUM_DRAFT_TOKENS) - 1
        self._own: dict[int, SuffixIndex] = {}
        self._shared: dict[str, SuffixIndex] = {}
        self._rows: dict[int, DraftRow] = {}

    def propose(self, context: ProposeContext) -> DraftTree:
        return DraftTree.of([self._propose_row(row) for row in context.rows])

    def release(self, slots: Sequence[int]) -> None:
        """Outputs of ended requests become common knowledge of their salt."""
        for slot in slots:
            self._own.pop(slot, None)
            if row := self._rows.pop(slot, None):
                self._teach(row.cache_salt, row.token_ids[row.num_prompt_tokens :])

    def _propose_row(self, row: DraftRow) -> RowTree:
        own = self._own.setdefault(row.slot, SuffixIndex())
        own.extend(row.token_ids[own.num_tokens :])
        self._rows[row.slot] = row
        suffix = row.token_ids[-_MAX_MATCH:]
        matches = list(own.matches(suffix))
        if shared := self._shared.get(row.cache_salt):
            matches += shared.matches(suffix)
        return _merge(suffix[-1], matches, self.max_draft_tokens)

    def _teach(self, salt: str, output: Sequence[int]) -> None:
        shared = self._shared.pop(salt, None) or SuffixIndex(_SHARED_TOKENS)
        shared.extend([*output, _GAP])
        self._shared[salt] = shared  # behind all others
        if len(self._shared) > _SALTS:  # or a client with a new salt in every request would fill the memory
            del self._shared[next(iter(self._shared))]


class SuffixIndex:
    """A text and the places where each pair of its tokens ends. `capacity` bounds the text, oldest half out."""

    def __init__(self, capacity: int | None = None) -> None:
        self._capacity = capacity
        self._tokens: list[int] = []
        self._places: dict[tuple[int, int], list[int]] = {}

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    def extend(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self._append(token_id)
        if self._capacity is not None and len(self._tokens) > self._capacity:
            kept = self._tokens[len(self._tokens) // 2 :]
            self._tokens, self._places = [], {}
            self.extend(kept)

    def matches(self, suffix: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
        """(tokens in common, what followed) for recent places that end like `suffix`, most recent first."""
        if len(suffix) < 2:
            return
        for end in reversed(self._places.get((suffix[-2], suffix[-1]), [])):
            length = self._common_suffix(suffix, end)
            continuation = self._tokens[end + 1 : end + 1 + _DRAFTS_PER_MATCHED_TOKEN * length]
            if _GAP in continuation:
                continuation = continuation[: continuation.index(_GAP)]
            if continuation:
                yield length, continuation

    def _append(self, token_id: int) -> None:
        if self._tokens:
            places = self._places.setdefault((self._tokens[-1], token_id), [])
            places.append(len(self._tokens))
            if len(places) > _PLACES:
                del places[0]
        self._tokens.append(token_id)

    def _common_suffix(self, suffix: Sequence[int], end: int) -> int:
        length = 2
        while length < min(len(suffix), end + 1) and suffix[-1 - length] == self._tokens[end - length]:
            length += 1
        return length


def _merge(root: int, matches: list[tuple[int, list[int]]], max_drafts: int) -> RowTree:
    """One tree of the matches' continuations, longest match first, with as many drafts as the best one earns."""
    tokens, parents = [root], [NONE]
    children: dict[tuple[int, int], int] = {}
    best = max((length for length, _ in matches), default=0)
    max_drafts = min(max_drafts, _DRAFTS_PER_MATCHED_TOKEN * best)
    for _, continuation in sorted(matches, key=lambda match: -match[0]):
        node = ROOT
        for token_id in continuation:
            if (node, token_id) not in children:
                if len(tokens) > max_drafts:
                    return RowTree(tokens, parents)
                children[node, token_id] = len(tokens)
                tokens.append(token_id)
                parents.append(node)
            node = children[node, token_id]
    return RowTree(tokens, parents)
