"""Trees from n-gram matches: SGLang's BFS and PROB, the chain of suffix decoding, and trees to merge. Pure functions.

A node of the trie that the matches represent is the list of texts that follow there, the most recent first. Its
children are their next symbols, and the frequency of a child is the number of texts that begin with it.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import count, islice
from typing import NamedTuple

from specray.spec_decode.draft_tree import NONE, ROOT, TreeLists
from specray.spec_decode.ngram_index import Match
from specray.spec_decode.ngram_rules import NgramRules
from specray.spec_decode.tree_merge import LEAST_SURVIVAL, Rate

Texts = list[list[int]]  # what follows an n-gram at each of its places, the most recent first
Children = dict[int, Texts]  # next symbol -> what follows it, the most recent first


class Level(NamedTuple):
    """Matches of `length` to 2 * `length` - 1 symbols."""

    length: int
    # Matches by place, latest first, in each kind of text: the request's own, those of finished requests, and corpora.
    # The first kind wins ties.
    places: tuple[dict[int, Match], dict[int, Match], dict[int, Match]]


def draft(levels: Iterable[Level], root: int, rules: NgramRules) -> TreeLists:
    """The tree of `rules.match_type` below `root`; `levels` are ordered by length of match, longest first."""
    return _GROW[rules.match_type](levels, root, rules)


class _TreeBuilder:
    """A tree of up to `most` nodes below its root, without equal siblings."""

    def __init__(self, root: int, most: int) -> None:
        self.tree = TreeLists([root], [NONE])
        self._most = most
        self._nodes: dict[tuple[int, int], int] = {}

    @property
    def is_full(self) -> bool:
        return len(self._nodes) >= self._most

    def add(self, parent: int, token: int) -> int | None:
        """The child's number, old or new; None if the tree is full."""
        node = self._nodes.get((parent, token))
        if node is None and not self.is_full:
            node = self._nodes[parent, token] = len(self.tree.tokens)
            self.tree.tokens.append(token)
            self.tree.parents.append(parent)
        return node


Grow = Callable[[_TreeBuilder, Texts, int, NgramRules], None]


def _grow_windows(levels: Iterable[Level], root: int, rules: NgramRules, grow: Grow) -> TreeLists:
    """Grow the tree from each length of match, longest first, until it is full."""
    builder, longest = _TreeBuilder(root, 0), 0
    seen: tuple[dict[int, Match], ...] = ({}, {}, {})
    for level in levels:
        for places, new in zip(seen, level.places, strict=True):
            places |= new
        matches = [match for places in seen for match in latest_first(places)]
        if not longest and matches:
            longest = max(match.length for match in matches)
            builder = _TreeBuilder(root, rules.max_draft_tokens_of(longest))
        for window in _windows(level, rules):
            texts = [match.follows[: rules.depth - window] for match in matches if match.length >= window]
            if texts:
                grow(builder, texts, window, rules)
            if longest and builder.is_full:
                return builder.tree
    return builder.tree


def _grow_bfs(builder: _TreeBuilder, texts: Texts, window: int, rules: NgramRules) -> None:
    """Level by level, the most recent children of each node."""
    queue = deque([(ROOT, texts, 0)])
    while queue:
        parent, followers, depth = queue.popleft()
        for token, after in islice(_children(followers, depth).items(), rules.breadth(window, depth)):
            node = builder.add(parent, token)
            if node is None:
                return
            queue.append((node, after, depth + 1))


def _grow_prob(builder: _TreeBuilder, texts: Texts, window: int, rules: NgramRules) -> None:  # noqa: ARG001
    """The most likely node first. Its probability is its share among the most frequent children, times its parent's."""
    heap: list[tuple[float, int, int, int, Texts, int]] = []
    order = count()  # ties go to the first one found

    def push_children(probability: float, parent: int, followers: Texts, depth: int) -> None:
        children = _most_frequent(_children(followers, depth), rules.max_breadth)
        total = sum(len(after) for _, after in children)
        for token, after in children:
            heappush(heap, (-probability * len(after) / total, next(order), parent, token, after, depth + 1))

    push_children(1.0, ROOT, texts, 0)
    while heap:
        negative, _, parent, token, after, depth = heappop(heap)
        node = builder.add(parent, token)
        if node is None:
            return
        push_children(-negative, node, after, depth)


def _suffix_chain(levels: Iterable[Level], root: int, rules: NgramRules) -> TreeLists:
    """The chain with the highest sum of probabilities over all lengths of match; ties go to the first kind of text.

    Each length's chain takes the most frequent child at every node, and ends where its probability, the product of
    the shares along it, falls below `min_token_prob`.
    """
    best: tuple[float, int] = (0.0, 0)  # score, and minus the number of the kind
    chain: list[int] = []
    seen: tuple[dict[int, Match], ...] = ({}, {}, {})
    for level in levels:
        windows = _windows(level, rules)
        if best >= (rules.max_draft_tokens_of(windows[0]), 0):  # a probability is at most 1: shorter ones cannot win
            break
        for kind, (places, new) in enumerate(zip(seen, level.places, strict=True)):
            places |= new
            for candidate, score in _chains(places, windows, rules):
                if (score, -kind) > best:
                    best, chain = (score, -kind), candidate
    return TreeLists([root, *chain], [NONE, *range(len(chain))])


def _chains(places: dict[int, Match], windows: Sequence[int], rules: NgramRules) -> Iterator[tuple[list[int], float]]:
    """(chain, score) of each window with a match."""
    matches = latest_first(places)
    num_seen, path = 0, _Path([], [])
    for window in windows:
        texts = [match.follows for match in matches if match.length >= window]
        if len(texts) > num_seen:  # otherwise the places are those of the longer window
            num_seen, path = len(texts), _most_frequent_path(texts, rules)
        if texts:
            end = min(rules.max_draft_tokens_of(window), rules.depth - window)
            yield path.tokens[:end], sum(path.probabilities[:end])


class _Path(NamedTuple):
    tokens: list[int]
    probabilities: list[float]


def _most_frequent_path(texts: Texts, rules: NgramRules) -> _Path:
    path, probability = _Path([], []), 1.0
    while children := _children(texts, len(path.tokens)):
        num_seen = sum(map(len, children.values()))
        token, texts = max(children.items(), key=lambda child: len(child[1]))  # ties go to the more recent one
        probability *= len(texts) / num_seen
        if probability < rules.min_token_prob:
            break
        path.tokens.append(token)
        path.probabilities.append(probability)
        if len(texts) == 1:  # only one child remains
            rest = texts[0][len(path.tokens) :]
            return _Path(path.tokens + rest, path.probabilities + [probability] * len(rest))
    return path


def grow_matches(matches: Sequence[Match], rate: Rate, most: int) -> tuple[TreeLists, list[int]]:
    """At most `most` nodes below matches, which are in order, the longest first; and the evidence of each.

    `rate` is how often nodes follow their parents, by evidence (`ngram_evidence`).
    """
    tree, evidence = TreeLists([0], [NONE]), [0]
    heap: list[tuple[float, int, int, int, int, Sequence[Match], int]] = []
    order = count()  # ties go to the first one found

    def push_children(survival: float, parent: int, texts: Sequence[Match], depth: int) -> None:
        children: dict[int, list[Match]] = {}
        for match in texts:
            if depth < len(match.follows):
                children.setdefault(match.follows[depth], []).append(match)
        for place, (token, after) in enumerate(children.items()):
            own = ngram_evidence(after[0].length + depth, len(after), len(children), place)
            heappush(heap, (-survival * rate(own), next(order), parent, token, own, after, depth + 1))

    push_children(1.0, ROOT, matches, 0)
    while heap and -heap[0][0] >= LEAST_SURVIVAL and len(tree.tokens) <= most:
        negative, _, parent, token, own, after, depth = heappop(heap)
        tree.tokens.append(token)
        tree.parents.append(parent)
        evidence.append(own)
        push_children(-negative, len(tree.tokens) - 1, after, depth)
    return tree, evidence


def ngram_evidence(length: int, num_texts: int, num_siblings: int, place: int) -> int:
    """What speaks for a node: the `length` of the longest match with it, and what its `num_siblings` are.

    Nodes are alone, found in one text or in several; or the one with the longest match, at `place` 0; or another one.
    """
    if num_siblings == 1:
        return 4 * length.bit_length() + (num_texts > 1)
    return 4 * length.bit_length() + (2 if place == 0 else 3)


def ngram_prior(evidence: int) -> float:
    """A guess of how often nodes follow their parents."""
    length, kind = divmod(evidence, 4)
    return min(0.95, 1 - 0.65**length) * (1.0, 1.0, 0.7, 0.25)[kind]


def _windows(level: Level, rules: NgramRules) -> range:
    """Lengths of match for which this level has all places, longest first."""
    return range(min(2 * level.length - 1, rules.max_window), max(level.length, rules.min_window) - 1, -1)


def latest_first(places: dict[int, Match]) -> list[Match]:
    """The matches at some places."""
    return [places[place] for place in sorted(places, reverse=True)]


def _children(texts: Texts, depth: int) -> Children:
    """The symbols at `depth` of the texts, in order of recency."""
    if len(texts) == 1:  # most nodes: quicker
        return {texts[0][depth]: texts} if depth < len(texts[0]) else {}
    children: Children = {}
    for text in texts:
        if depth < len(text):
            children.setdefault(text[depth], []).append(text)
    return children


def _most_frequent(children: Children, most: int) -> list[tuple[int, Texts]]:
    """The `most` most frequent children; ties go to the more recent one."""
    return sorted(children.items(), key=lambda child: -len(child[1]))[:most]


_GROW: dict[str, Callable[[Iterable[Level], int, NgramRules], TreeLists]] = {
    "BFS": lambda levels, root, rules: _grow_windows(levels, root, rules, _grow_bfs),
    "PROB": lambda levels, root, rules: _grow_windows(levels, root, rules, _grow_prob),
    "SUFFIX": _suffix_chain,
}
