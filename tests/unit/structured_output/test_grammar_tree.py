"""Draft trees under a grammar: what is cut, what is added, and what is allowed at each node."""

from collections.abc import Callable
from concurrent.futures import Future
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLParserLimits
from torch import Tensor

from specray.grammar import GRAMMAR_LIMIT_EXCEEDED, GrammarKind, make_grammar
from specray.models.tokenizer import load_tokenizer
from specray.spec_decode.draft_tree import NONE, TreeLists
from specray.step import DraftLimit
from specray.structured_output.compilation import GrammarTools, make_tools
from specray.structured_output.compiler import GrammarMatcher
from specray.structured_output.forced_text import Encode
from specray.structured_output.grammar_tree import allowed_tokens, constrained
from specray.structured_output.matchers import SlotGrammar
from tests.support.json_toy import BYTES_END, byte_tokenizer, write_json_toy
from tests.support.toy import EOS, VOCAB_SIZE

WORDS = VOCAB_SIZE // 32
MANY = DraftLimit(40, 40)
OBJECT = {"type": "object", "properties": {"ab": {"type": "boolean"}, "c": {"const": 1}}, "required": ["ab", "c"]}

Start = Callable[[GrammarKind, object], GrammarMatcher]


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> GrammarTools:
    return make_tools(load_tokenizer(write_json_toy(tmp_path_factory.mktemp("toy"))), VOCAB_SIZE, [EOS])


@pytest.fixture(scope="module")
def start(tools: GrammarTools) -> Start:
    return lambda kind, value: tools.compiler.compile(make_grammar(kind, value)).matcher()


@pytest.fixture(scope="module")
def encode(tools: GrammarTools) -> Encode:
    return tools.forced.encode


def advance(matcher: GrammarMatcher, token_ids: list[int]) -> None:
    assert all(map(matcher.accept, token_ids))


def ids_of(bits: Tensor) -> list[int]:
    return np.flatnonzero(np.unpackbits(bits.numpy().view(np.uint8), bitorder="little")).tolist()


def test_forced_tokens_become_a_chain_and_forbidden_drafts_go(
    start: Start, tools: GrammarTools, encode: Encode
) -> None:
    """Below the forced tokens there is a choice; a branch of the drafter that leads elsewhere is cut as a whole."""
    [wrong, *_], forced = encode("x"), encode('{"ab": ')
    drafts = TreeLists([9, wrong, forced[0], wrong], [NONE, 0, 0, 1])
    tree, bits = constrained(start("json_schema", OBJECT), drafts, MANY, WORDS, tools.forced)
    assert tree.tokens == [9, *forced]
    assert tree.parents == [NONE, *range(len(forced))]
    assert ids_of(bits[-1]) == sorted(encode("t") + encode("f") + encode("true")[:1] + encode("tr"))


def test_drafts_are_extended_to_the_end(start: Start, tools: GrammarTools, encode: Encode) -> None:
    """A draft decides what follows; the end token is drafted too."""
    path = encode('{"ab": ') + encode("true")
    tree, bits = constrained(
        start("json_schema", OBJECT), TreeLists([9, *path], [NONE, *range(len(path))]), MANY, WORDS, tools.forced
    )
    assert tree.tokens == [9, *path, *encode(', "c": 1}'), EOS]
    assert ids_of(bits[-2]) == [EOS]
    assert len(ids_of(bits[-1])) == VOCAB_SIZE  # nothing is emitted there


def test_drafts_that_the_vocabulary_cannot_continue_are_cut(start: Start, tools: GrammarTools, encode: Encode) -> None:
    """No token is allowed after "a", so a walk that accepts it could choose none."""
    a, b = (encode(letter)[0] for letter in "ab")
    tree, bits = constrained(
        start("regex", "aé|bb"), TreeLists([9, a, b], [NONE, 0, 0]), DraftLimit(2, 1), WORDS, tools.forced
    )
    assert tree == TreeLists([9, b], [NONE, 0])
    assert [ids_of(row) for row in bits] == [sorted([a, b]), [b]]


def test_nothing_is_forced_within_a_character() -> None:
    """A token may end within a character; the rest of that character is not text. It ended the engine."""
    tools = make_tools(byte_tokenizer(), BYTES_END + 1, [BYTES_END])
    matcher = tools.compiler.compile(make_grammar("regex", "éa|b")).matcher()
    advance(matcher, tools.forced.encode("é")[:1])
    tree, bits = constrained(matcher, TreeLists([9], [NONE]), MANY, tools.compiler.num_words, tools.forced)
    assert (tree, len(bits)) == (TreeLists([9], [NONE]), 1)


@pytest.mark.parametrize("limit", [DraftLimit(3, 40), DraftLimit(40, 2), DraftLimit(0, 40), DraftLimit(1, 1)])
def test_limits_hold(limit: DraftLimit, start: Start, tools: GrammarTools) -> None:
    tree, bits = constrained(start("json_schema", OBJECT), TreeLists([9], [NONE]), limit, WORDS, tools.forced)
    assert len(tree.tokens) == 1 + min(limit.num_tokens, limit.num_steps)
    assert len(bits) == len(tree.tokens)


def test_a_complete_grammar_allows_only_the_end(start: Start, tools: GrammarTools, encode: Encode) -> None:
    matcher = start("choice", ["ab"])
    advance(matcher, encode("ab"))
    tree, bits = constrained(matcher, TreeLists([9, 20], [NONE, 0]), MANY, WORDS, tools.forced)
    assert tree == TreeLists([9, EOS], [NONE, 0])
    assert ids_of(bits[0]) == [EOS]


def test_what_may_end_is_not_forced_to(start: Start, tools: GrammarTools, encode: Encode) -> None:
    matcher = start("regex", "a+")
    advance(matcher, encode("a"))
    tree, _ = constrained(matcher, TreeLists([9], [NONE]), MANY, WORDS, tools.forced)
    assert tree.tokens == [9]


def test_long_forced_text_is_searched_up_to_the_limit(
    start: Start, tools: GrammarTools, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole text was looked for at each node: of a million characters, in every step."""
    matcher, accepted = start("regex", "(?:ab){50000}"), list[int]()
    accept = GrammarMatcher.accept
    monkeypatch.setattr(GrammarMatcher, "accept", lambda *args: accepted.append(args[1]) or accept(*args))
    tree, _ = constrained(matcher, TreeLists([9], [NONE]), DraftLimit(5, 40), WORDS, tools.forced)
    assert len(tree.tokens) == 6
    assert len(accepted) <= 2 * 5


def test_a_draft_that_exceeds_a_limit_leaves_the_matcher_where_it_was(
    start: Start, tools: GrammarTools, encode: Encode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the output was taken back with the draft, and the request ended with an error of the engine."""
    monkeypatch.setattr("specray.structured_output.compiler.LIMITS", LLParserLimits(max_lexer_states=2000))
    monkeypatch.setattr("specray.structured_output.compiler._MAX_RENEWAL_S", 0.0)
    matcher, random, num_tokens = start("regex", ".*a.{200}.*b.{200}"), Random(0), 0
    while matcher.error is None and num_tokens < 2000:
        drafted = random.choices(encode("abc"), k=8)
        parents = [NONE] + [random.randrange(node) for node in range(1, 9)]
        constrained(matcher, TreeLists([9, *drafted], parents), MANY, WORDS, tools.forced)
        assert matcher.num_tokens == num_tokens
        num_tokens += matcher.accept(random.choice(drafted))
    assert matcher.error == GRAMMAR_LIMIT_EXCEEDED


def test_drafting_stops_when_its_time_is_over(
    start: Start, tools: GrammarTools, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each draft of an ambiguous grammar may cost a quarter of a second."""
    monkeypatch.setattr("specray.structured_output.grammar_tree._MAX_DRAFTING_S", 0.0)
    tree, bits = constrained(start("json_schema", OBJECT), TreeLists([9], [NONE]), MANY, WORDS, tools.forced)
    assert tree.tokens == [9]
    assert ids_of(bits[0])


def test_a_grammar_that_takes_too_much_time_for_its_tokens_ends_its_request(
    start: Start, encode: Encode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`s ::= s s s | s s | [a-z] | ""` took 49 s for 71 tokens, in the steps of all requests."""
    matcher = start("regex", "a*")
    clock = iter([0.0, 0.15, 1.0, 1.1, 2.0, 2.1])
    monkeypatch.setattr("specray.structured_output.matchers.time.thread_time", lambda: next(clock))
    grammar = SlotGrammar(make_grammar("regex", "a*"), Future(), [], matcher)
    with grammar.measured():
        advance(matcher, encode("aaaaaaa"))
    with grammar.measured():
        pass
    assert grammar.error is None
    with grammar.measured():
        pass
    assert grammar.error == GRAMMAR_LIMIT_EXCEEDED


@st.composite
def drafts(draw: st.DrawFn) -> TreeLists:
    size = draw(st.integers(0, 12))
    parents = [NONE] + [draw(st.integers(0, node)) for node in range(size)]
    return TreeLists([9] + [draw(st.integers(0, VOCAB_SIZE - 1)) for _ in range(size)], parents)


@given(drafts(), st.integers(0, 14), st.integers(0, 6), st.sampled_from(["", '{"', '{"ab": ', '{"ab": true, "c": 1}']))
def test_every_node_is_a_path_of_the_grammar(
    start: Start, tools: GrammarTools, encode: Encode, drafted: TreeLists, num_tokens: int, num_steps: int, prefix: str
) -> None:
    """Compared with a fresh matcher for every node. The matcher that was used is where it was."""
    used = start("json_schema", OBJECT)
    advance(used, encode(prefix))
    tree, bits = constrained(used, drafted, DraftLimit(num_tokens, num_steps), WORDS, tools.forced)
    untouched = allowed_tokens(used, drafted, WORDS)
    assert len(tree.tokens) <= 1 + num_tokens

    def expected(lists: TreeLists, node: int) -> list[int] | None:
        path = []
        while node:
            path.insert(0, lists.tokens[node])
            node = lists.parents[node]
        assert len(path) <= num_steps or lists is drafted
        matcher, row = start("json_schema", OBJECT), torch.zeros(WORDS, dtype=torch.int32)
        advance(matcher, encode(prefix))
        if not all(map(matcher.accept, path)):
            return None
        if matcher.has_ended:
            return list(range(VOCAB_SIZE))
        matcher.fill(row)
        return ids_of(row)

    for node in range(len(tree.tokens)):
        assert ids_of(bits[node]) == expected(tree, node)
    for node in range(len(drafted.tokens)):
        wanted = expected(drafted, node)
        assert ids_of(untouched[node]) == (list(range(VOCAB_SIZE)) if wanted is None else wanted)
