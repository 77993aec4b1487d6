"""BFS, PROB and SUFFIX drafts, compared with a trie that is built node by node."""

from collections import deque
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from specray.config import SpeculativeConfig
from specray.spec_decode import ngram_index
from specray.spec_decode.draft_tree import NONE, TreeLists
from specray.spec_decode.ngram import NgramDrafter
from specray.spec_decode.ngram_rules import NgramRules, ngram_rules
from tests.support.drafters import Tokens, make_context, paths_of


@dataclass
class Node:
    """A node of the reference trie. Children are in order of recency."""

    freq: int = 0
    children: dict[int, "Node"] = field(default_factory=dict)

    def insert(self, tokens: list[int]) -> None:
        node = self
        for token in tokens:
            child = node.children.pop(token, Node())
            node.children = {token: child, **node.children}
            child.freq += 1
            node = child

    def at(self, tokens: list[int]) -> "Node | None":
        node: Node | None = self
        for token in tokens:
            node = node and node.children.get(token)
        return node if node and node.children else None


def trie(texts: list[list[int]], depth: int) -> Node:
    root = Node()
    for text in texts:
        for start in range(len(text)):
            root.insert(text[start : start + depth])
    return root


def naive_draft(shared: list[list[int]], own: list[int], rules: NgramRules) -> list[tuple[int, ...]]:
    """Paths of the expected tree's nodes, in order."""
    if rules.match_type == "SUFFIX":
        return naive_suffix(shared, own, rules)
    root = trie([*shared, own], rules.depth)
    paths: list[tuple[int, ...]] = []
    most = None
    for window in range(min(len(own), rules.max_window), rules.min_window - 1, -1):
        anchor = root.at(own[-window:])
        if anchor is None:
            continue
        if most is None:
            most = rules.max_draft_tokens
            if rules.max_spec_factor is not None:
                most = min(most, int(window * rules.max_spec_factor))
        visit = bfs_order if rules.match_type == "BFS" else prob_order
        for path in visit(anchor, window, rules):
            if path not in paths:
                if len(paths) == most:
                    return paths
                paths.append(path)
    return paths


def bfs_order(anchor: Node, window: int, rules: NgramRules) -> list[tuple[int, ...]]:
    scale = Fraction(rules.max_breadth - rules.min_breadth, rules.max_window - rules.min_window + 1)
    breadth = (rules.max_window - window) * scale + rules.min_breadth
    queue: deque[tuple[Node, tuple[int, ...], Fraction]] = deque([(anchor, (), breadth)])
    order: list[tuple[int, ...]] = []
    while queue:
        node, path, breadth = queue.popleft()
        for token, child in list(node.children.items())[: max(1, int(breadth))]:
            order.append((*path, token))
            queue.append((child, (*path, token), breadth - scale))
    return order


def prob_order(anchor: Node, window: int, rules: NgramRules) -> list[tuple[int, ...]]:  # noqa: ARG001
    frontier: list[tuple[float, tuple[int, ...], Node]] = [(1.0, (), anchor)]
    order = []
    while frontier:
        best = max(frontier, key=lambda entry: entry[0])
        frontier.remove(best)
        probability, path, node = best
        order.append(path)
        top = sorted(node.children.items(), key=lambda item: -item[1].freq)[: rules.max_breadth]
        total = sum(child.freq for _, child in top)
        frontier += [(probability * child.freq / total, (*path, token), child) for token, child in top]
    return order[1:]


def naive_suffix(shared: list[list[int]], own: list[int], rules: NgramRules) -> list[tuple[int, ...]]:
    best: tuple[float, bool, int] = (0.0, False, 0)
    chain: list[int] = []
    for root, is_own in ((trie([own], rules.depth), True), (trie(shared, rules.depth), False)):
        for window in range(min(len(own), rules.max_window), rules.min_window - 1, -1):
            tokens, score = greedy_path(root.at(own[-window:]), window, rules)
            if (score, is_own, window) > best:
                best, chain = (score, is_own, window), tokens
    return [tuple(chain[: n + 1]) for n in range(len(chain))]


def greedy_path(node: Node | None, window: int, rules: NgramRules) -> tuple[list[int], float]:
    tokens: list[int] = []
    probability, score = 1.0, 0.0
    most = rules.max_draft_tokens
    if rules.max_spec_factor is not None:
        most = min(most, int(window * rules.max_spec_factor))
    while node and node.children and len(tokens) < most:
        token, child = max(node.children.items(), key=lambda item: item[1].freq)
        probability *= child.freq / sum(other.freq for other in node.children.values())
        if probability < rules.min_token_prob:
            break
        tokens.append(token)
        score += probability
        node = child
    return tokens, score


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    """Any valid options."""
    match_type = draw(st.sampled_from(["BFS", "PROB", "SUFFIX"]))
    least, most = sorted(draw(st.tuples(st.integers(1, 9), st.integers(1, 9))))
    narrow, wide = sorted(draw(st.tuples(st.integers(1, 6), st.integers(1, 6))))
    chosen: dict[str, Any] = {
        "ngram_match_type": match_type,
        "num_draft_tokens": draw(st.integers(2, 30)),
        "ngram_min_match_window_size": least,
        "ngram_max_match_window_size": most,
        "ngram_branch_length": draw(st.integers(most + 1, most + 8)),
        "ngram_max_spec_factor": draw(st.sampled_from([None, 0.5, 1.0, 1.5, 2.0, 4.0])),
    }
    if match_type == "BFS":
        chosen |= {"ngram_min_bfs_breadth": narrow}
    if match_type != "SUFFIX":
        return chosen | {"ngram_max_bfs_breadth": wide}
    return chosen | {"ngram_min_token_prob": draw(st.sampled_from([0.0, 0.1, 0.3, 0.5, 1.0]))}


tokens = st.lists(st.integers(0, 2), min_size=1, max_size=40)
DEFAULTS = {"ngram_match_type": "BFS"}


@given(st.lists(tokens, max_size=3), tokens, options())
@example([], [1, 2, 5, 6, 0, 1, 2, 5, 7, 0, 1, 2], DEFAULTS)
@example([[1, 2, 3, 4, 5]], [9, 1, 2, 3], {"ngram_match_type": "SUFFIX"})
@example([[1, 2, 3] * 5], [1, 2, 3] * 4, {"ngram_match_type": "PROB", "ngram_max_spec_factor": None})
def test_trees_equal_those_of_the_reference_trie(
    shared: list[list[int]], own: list[int], options: dict[str, Any]
) -> None:
    config = SpeculativeConfig(algorithm="NGRAM", **options)
    rules = ngram_rules(config)
    with pytest.MonkeyPatch.context() as patch:  # the reference considers all matches
        patch.setattr(ngram_index, "MOST_PLACES", 1000)
        patch.setattr(ngram_index, "_MOST_STEPS", 1000)
        drafter = NgramDrafter(rules)
        for text in shared:
            drafter.propose(make_context([Tokens(0, text)]))
            drafter.release([0])
        [tree] = drafter.propose(make_context([Tokens(1, own)])).to_lists()
    assert paths_of(tree) == naive_draft(shared, own, rules)
    assert (tree.tokens[0], tree.parents[0]) == (own[-1], NONE)


# ---- effects of options ---------------------------------------------------------------------------------------------


def tree_of(text: list[int], **options: Any) -> TreeLists:
    config = SpeculativeConfig(**{"algorithm": "NGRAM", "num_draft_tokens": 12, **options})
    drafter = NgramDrafter(ngram_rules(config))
    [tree] = drafter.propose(make_context([Tokens(0, text)])).to_lists()
    return tree


def test_bfs_prefers_recent_tokens_and_prob_frequent_ones() -> None:
    text = [1, 2, 5, 1, 2, 5, 1, 2, 6, 1, 2]
    assert tree_of(text, ngram_max_match_window_size=2, ngram_max_bfs_breadth=1).tokens[1] == 6
    assert tree_of(text, ngram_match_type="PROB").tokens[1] == 5


def test_max_spec_factor_limits_drafts_by_the_length_of_the_match() -> None:
    text = [1, 2, 5, 6, 7, 8, 9, 3, 1, 2]
    assert tree_of(text).tokens == [2, 5, 6, 7, 8]
    assert tree_of(text, ngram_max_spec_factor=1.0).tokens == [2, 5, 6]
    assert tree_of(text, ngram_max_spec_factor=None).tokens == [2, 5, 6, 7, 8, 9, 3, 1, 2]


def test_matches_outside_the_window_sizes_are_ignored() -> None:
    text = [1, 2, 5, 6, 3, 1, 2]
    assert tree_of(text, ngram_min_match_window_size=3) == TreeLists([2], [NONE])
    assert tree_of(text, ngram_max_match_window_size=1).tokens == [2, 5, 6]


def test_branch_length_includes_match_and_drafts() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 2, 3]
    options: dict[str, Any] = {"ngram_min_match_window_size": 3, "ngram_max_match_window_size": 3}
    assert tree_of(text, **options, ngram_branch_length=5).tokens == [3, 4, 5]
    assert tree_of(text, **options, ngram_branch_length=7).tokens == [3, 4, 5, 6, 7]


def test_max_trie_depth_sets_branch_length_and_window() -> None:
    rules = ngram_rules(SpeculativeConfig(algorithm="NGRAM", ngram_max_trie_depth=8))
    assert (rules.depth, rules.min_window, rules.max_window, rules.max_draft_tokens) == (8, 1, 7, 7)


def test_the_defaults_are_those_of_sglang() -> None:
    rules = ngram_rules(SpeculativeConfig(algorithm="NGRAM"))
    assert (rules.match_type, rules.max_draft_tokens + 1, rules.depth) == ("BFS", 12, 18)
    assert (rules.min_window, rules.max_window, rules.min_breadth, rules.max_breadth) == (1, 12, 1, 10)
    assert rules.capacity == 10_000_000 // 18


def test_suffix_stops_below_min_token_prob() -> None:
    text = [1, 2, 5, 0, 1, 2, 6, 0, 1, 2, 5, 7, 0, 1, 2]
    suffix = {"ngram_match_type": "SUFFIX", "ngram_max_match_window_size": 2}
    assert tree_of(text, **suffix).tokens == [2, 5, 7, 0, 1]
    assert tree_of(text, **suffix, ngram_min_token_prob=0.5).tokens == [2, 5]
    assert tree_of(text, **suffix, ngram_min_token_prob=0.9).tokens == [2]


def test_suffix_prefers_the_requests_own_text_if_scores_are_equal() -> None:
    drafter = NgramDrafter(ngram_rules(SpeculativeConfig(algorithm="NGRAM", ngram_match_type="SUFFIX")))
    drafter.propose(make_context([Tokens(0, [1, 2, 8, 8, 8, 8])]))
    drafter.release([0])
    [tree] = drafter.propose(make_context([Tokens(1, [1, 2, 9, 9, 9, 9, 1, 2])])).to_lists()
    assert tree.tokens == [2, 9, 9, 9, 9]
