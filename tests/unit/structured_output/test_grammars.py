"""Regular expressions, EBNF and structural tags: what they match, and what is refused and why."""

import pytest
import torch
from llguidance import LLParserLimits

from specray.errors import InvalidRequestError
from specray.grammar import GRAMMAR_LIMIT_EXCEEDED, GrammarKind, make_grammar
from specray.structured_output.compilation import Compilation, GrammarTools
from specray.structured_output.compiler import GrammarCompiler
from specray.structured_output.forced_text import ForcedText
from tests.support.json_toy import BYTES_END, byte_tokenizer

TOKENIZER = byte_tokenizer()
SPECIAL = byte_tokenizer()
SPECIAL.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER, BYTES_END + 1, [BYTES_END])


def accepts(compiler: GrammarCompiler, kind: GrammarKind, value: object, text: str) -> bool:
    matcher = compiler.compile(make_grammar(kind, value)).matcher()
    return all(map(matcher.accept, [*TOKENIZER.encode(text), BYTES_END]))


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("Answer: .{1,200}", ["Answer: yes"], ["Answer: ", "Answer: a\nb", "Answer: a\rb"]),
        (r"^\d{3}$", ["123"], ["\u0661\u0662\u0663", "12"]),
        (r"\D", ["a"], ["1", "\u0661"]),
        (r"\w+", ["a_1"], ["é", "a b"]),
        (r"[^\s\W]+", ["ab"], ["a b", "-"]),
        (r"[^\d]", ["a"], ["1", "\u0661"]),
        (r"[[&~|^-]+", ["[&~|^-"], ["]"]),
        (r"a{x}", ["a{x}"], ["a"]),
        (r"(?P<name>a)|(?<other>b)", ["a", "b"], ["ab"]),
        (r"a+?b", ["aab"], ["b"]),
        (r"\u0041\x42\/\cJ", ["AB/\n"], ["ab/\n"]),
        (r"\ud83d\ude00", ["😀"], []),
        ("(?i)^ab$", ["AB"], ["abc"]),
        ("(?s)a.b", ["a\nb"], ["ab"]),
        (r"\p{Lu}\P{Lu}", ["Éa"], ["éa"]),
        ("^a|b$", ["a", "b"], ["ab"]),
        ("(?:ab){50000}", [], ["ab"]),
    ],
)
def test_a_regular_expression_matches_the_whole_output(
    pattern: str, matching: list[str], others: list[str], compiler: GrammarCompiler
) -> None:
    assert [text for text in matching if not accepts(compiler, "regex", pattern, text)] == []
    assert [text for text in others if accepts(compiler, "regex", pattern, text)] == []


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(?=a)b", "look-ahead"),
        ("(?<!a)b", "look-behind"),
        (r"\bword\b", "escape that is not supported"),
        (r"(a)\1", "back-reference"),
        ("a++", "possessive"),
        ("[]a]", "begins with ]"),
        ("[a", "ends within a class"),
        ("[z-a]", "range z-a"),
        ("a{1000000}", "repeats more than 100000 times"),
        ("a*" * 1001, "more than 1000 quantifiers"),
        ("a$b", "lookarounds not supported"),
        ("(a", "unclosed group"),
        ("*", "missing expression"),
    ],
)
def test_a_regular_expression_that_is_not_supported_is_refused(
    pattern: str, reason: str, compiler: GrammarCompiler
) -> None:
    with pytest.raises(InvalidRequestError, match=f"the regex cannot be compiled: (?s:.*){reason}"):
        compiler.compile(make_grammar("regex", pattern))


@pytest.mark.parametrize(
    ("grammar", "matching", "others"),
    [
        ('root ::= "ab" root | "c"', ["c", "ababc"], ["ab", "abab"]),
        ('root ::= "(" root ")" | [a-z]+ # letters', ["((abc))", "x"], ["((a)", "()"]),
        ('root ::= word " " word\nword ::= [a-z]* "b"', ["ab abcb"], ["a b", "ab"]),
        ('root ::= "a"{2,3} ("x" | )\n', ["aa", "aaax"], ["a", "aaaa"]),
        (r'root ::= "\u00e9\x41\n\"" [^"\\] .', ['éA\n"ab'], ['éA\n""b']),
        ('root ::= "a" x | "b"\nx ::= x "y"', ["b"], ["a", "ay"]),
        ('root-1 ::= "a"\nroot ::=\n  root-1\n  | "b"', ["a", "b"], ["ab"]),
        ('root ::= root root | "a"', ["a", "aaa"], ["", "b"]),
    ],
)
def test_ebnf_matches_the_whole_output(
    grammar: str, matching: list[str], others: list[str], compiler: GrammarCompiler
) -> None:
    assert [text for text in matching if not accepts(compiler, "ebnf", grammar, text)] == []
    assert [text for text in others if accepts(compiler, "ebnf", grammar, text)] == []


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ('root ::= "ab" root', "no finite text matches: the rule 'root' requires itself"),
        ('root ::= [a-z] more\nmore ::= "a" more', "no finite text matches: the rule 'more'"),
        ('root ::= a\na ::= "x" b\nb ::= a+', "no finite text matches: the rule"),
        ("root ::= other", "'other' is not defined"),
        ('root ::= "a"\nroot ::= "b"', "defined twice"),
        ('start ::= "a"', "no rule named 'root'"),
        ('root ::= "a', "ends within"),
        ("root ::= [b-a]", "range b-a is empty"),
        ('root ::= ("a"', r"'\)' is expected"),
        ('root ::= (= "a")', "'=' is not expected"),
        ("root ::= " + "(" * 200, "more than 100 parentheses"),
        ("\n".join(f'r{n} ::= "a"' for n in range(1001)), "more than 1000"),
    ],
)
def test_ebnf_without_finite_text_or_with_errors_is_refused(
    grammar: str, reason: str, compiler: GrammarCompiler
) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        compiler.compile(make_grammar("ebnf", grammar))


INTEGER = {"type": "json_schema", "json_schema": {"type": "integer"}}
TEXT = {"type": "any_text"}


def tag(begin: str, content: object, end: object) -> dict[str, object]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def sequence(*elements: object) -> dict[str, object]:
    return {"format": {"type": "sequence", "elements": list(elements)}}


CALLS = {"type": "triggered_tags", "triggers": ["<f="], "tags": [tag("<f=a>", INTEGER, "</f>")]}


@pytest.mark.parametrize(
    ("value", "matching", "others"),
    [
        (sequence(tag("<a>", TEXT, "</a>"), INTEGER), ["<a>x <b</a>3"], ["<a>x</a></a>3", "3"]),
        (sequence(tag("<a>", TEXT, ["</a>", "</b>"]), INTEGER), ["<a>x</b>3"], ["<a>x</c>3"]),
        ({"format": CALLS}, ["", "hi <f=a>3</f> ok <f=a>4</f>", "<f"], ["<f=b", "<f=a>x</f>"]),
        ({"format": {**CALLS, "at_least_one": True, "stop_after_first": True}}, ["a<f=a>3</f>"], ["", "<f=a>3</f>b"]),
        (
            {"structures": [{"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}], "triggers": ["<f"]},
            ["a <f=a>3</f>"],
            ["<f=a>true</f>"],
        ),
        (
            {"format": {"type": "tags_with_separator", "tags": [tag("<", INTEGER, ">")], "separator": ";"}},
            ["", "<1>", "<1>;<2>"],
            ["<1><2>"],
        ),
        (sequence({"type": "regex", "pattern": "[a-z]+"}, {"type": "const_string", "value": "abc"}), ["xabc"], ["abc"]),
        (
            sequence({"type": "grammar", "grammar": 'root ::= "(" root ")" | "x"'}, INTEGER),
            ["((x))3"],
            ["((x)3"],
        ),
        (
            sequence(
                {"type": "optional", "content": INTEGER},
                {"type": "star", "content": {"type": "const_string", "value": "a"}},
                {"type": "repeat", "min": 1, "max": 2, "content": {"type": "const_string", "value": "b"}},
            ),
            ["b", "3aabb"],
            ["3a", "bbb"],
        ),
        (sequence({"type": "any_text", "excludes": ["no"]}), ["n o"], ["a no"]),
        ({"format": {"type": "or", "elements": [INTEGER, TEXT]}}, ["3", "abc"], []),
    ],
)
def test_a_structural_tag_matches_the_whole_output(
    value: object, matching: list[str], others: list[str], compiler: GrammarCompiler
) -> None:
    assert [text for text in matching if not accepts(compiler, "structural_tag", value, text)] == []
    assert [text for text in others if accepts(compiler, "structural_tag", value, text)] == []


def test_special_tokens_stand_for_their_text_in_tags_only() -> None:
    compiler = GrammarCompiler(SPECIAL, len(SPECIAL), [BYTES_END])
    begin, end = SPECIAL.convert_tokens_to_ids(["<think>", "</think>"])
    spec = make_grammar("structural_tag", sequence(tag("<think>", TEXT, "</think>"), INTEGER))
    spelled = TOKENIZER.encode("<think>"), TOKENIZER.encode("</think>")
    for first in ([begin], spelled[0]):
        for last in ([end], spelled[1]):
            matcher = compiler.compile(spec).matcher()
            assert all(map(matcher.accept, [*first, *TOKENIZER.encode("a"), *last, *TOKENIZER.encode("3"), BYTES_END]))
    matcher = compiler.compile(make_grammar("json_schema", {"type": "string"})).matcher()
    assert matcher.accept(TOKENIZER.encode('"')[0])
    assert not matcher.accept(begin)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"format": {"type": "poem"}}, "at format: its type is 'poem'"),
        ({"format": 3}, "at format: its type is 'None'"),
        (sequence({"type": "tag", "begin": "a"}), r"at format.elements\[0\]: 'tag' has no member 'content'"),
        (sequence({**INTEGER, "style": "qwen_xml"}), "the style 'qwen_xml' is not supported"),
        (sequence({**INTEGER, "any_order": True}), "the member 'any_order'"),
        (sequence({"type": "any_text", "max_tokens": 5}), "the member 'max_tokens'"),
        (sequence({"type": "regex", "pattern": "(?=a)"}), "look-ahead"),
        (sequence({"type": "grammar", "grammar": 'root ::= "a" root'}), "no finite text matches"),
        (sequence({"type": "token", "token": "<none>"}), "is not the id or the text of a special token"),
        ({"format": {**CALLS, "triggers": ["<g"]}}, "does not begin with one of the triggers"),
        ({"x": 1}, "triggers: a list of one or more"),
    ],
)
def test_a_structural_tag_that_cannot_be_compiled_is_refused_with_the_place(
    value: object, reason: str, compiler: GrammarCompiler
) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        compiler.compile(make_grammar("structural_tag", value))


def test_a_matcher_goes_back_from_the_end_a_dead_end_and_an_error(compiler: GrammarCompiler) -> None:
    bits = torch.zeros(compiler.num_words, dtype=torch.int32)
    a, b = TOKENIZER.encode("ab")
    matcher = compiler.compile(make_grammar("regex", "ab?")).matcher()
    assert matcher.accept(a)
    assert matcher.accept(BYTES_END)
    assert not matcher.accept(b)
    matcher.rollback(1)
    assert matcher.accept(b)
    assert matcher.accept(BYTES_END)
    matcher.rollback(3)
    assert matcher.accept(a)

    matcher = compiler.compile(make_grammar("ebnf", 'root ::= "a" root | "b"')).matcher()
    assert all(matcher.accept(a) for _ in range(2500))
    assert not matcher.accept(b)  # all rules that are open end here
    assert matcher.error == GRAMMAR_LIMIT_EXCEEDED
    matcher.fill(bits)
    assert not bits.any()
    matcher.rollback(2000)
    assert matcher.error is None
    assert matcher.accept(b)


def test_an_older_release_of_llguidance_compiles_nothing(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It accepts some of what a grammar forbids; vLLM requires one."""
    monkeypatch.setattr("specray.structured_output.compiler._OLDER", "structured output needs llguidance 1.9")
    with pytest.raises(InvalidRequestError, match="needs llguidance"):
        compiler.compile(make_grammar("choice", ["a"]))


def test_a_grammar_serves_any_number_of_outputs(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its outputs share the states of one lexer: once these were used up, each request with it got a 400."""
    monkeypatch.setattr("specray.structured_output.compiler.LIMITS", LLParserLimits(max_lexer_states=1000))
    compiled = compiler.compile(make_grammar("regex", "a{900}|b{900}|c{900}"))
    early = compiled.matcher()
    for letter in "abcabc":
        matcher = compiled.matcher()
        assert all(map(matcher.accept, TOKENIZER.encode(letter * 800))), matcher.error
    assert all(map(early.accept, TOKENIZER.encode("b" * 800))), early.error


def test_a_grammar_that_compiles_slowly_is_compiled_again_beside_the_steps(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specray.structured_output.compiler.LIMITS", LLParserLimits(max_lexer_states=1000))
    monkeypatch.setattr("specray.structured_output.compiler._MAX_RENEWAL_S", 0.0)
    compilation = Compilation(lambda: GrammarTools(compiler, ForcedText([], TOKENIZER.encode)))
    spec, letters = make_grammar("regex", "a{2000}"), TOKENIZER.encode("a" * 2000)
    first = compilation.start(spec).result(timeout=60)
    assert compilation.start(spec).result() is first
    matcher = first.matcher()
    assert not all(map(matcher.accept, letters))
    assert matcher.error == GRAMMAR_LIMIT_EXCEEDED
    again = compilation.start(spec).result(timeout=60).matcher()
    assert all(map(again.accept, letters[:800]))
