"""Streamed text and stop conditions do not depend on how tokens are grouped into steps.

The reference decodes the whole text after each token.
"""

from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from specray.engine.detokenizer import TextStream
from specray.outputs import FinishReason
from specray.sampling_params import ReasoningMarks, SamplingParams
from tests.support.stories import stories_tokenizer
from tests.support.toy import toy_tokenizer

TOKENIZERS: dict[str, Tokenizer] = {
    "byte-level": toy_tokenizer().backend_tokenizer,  # é, ☃ and 😀 have two to four tokens
    "byte-fallback": stories_tokenizer().backend_tokenizer,  # words include their spaces; the first space is stripped
}
EOS = {"byte-level": [1], "byte-fallback": [2]}
WORDS = ["the", "a", "aa", "aab", "é", "☃", "😀", " ", "\n", "on", "in", ". "]
STOPS = ["a", "aa", "aab", "b", "the", "he ", "é", "☃a", "😀", "�", "\n\n", " a", "nin"]
SPLIT_CHARACTER = "�"


class Case(NamedTuple):
    kind: str
    token_ids: list[int]
    params: SamplingParams
    max_tokens: int


class StreamResult(NamedTuple):
    token_ids: list[int]
    text: str
    reason: FinishReason | None
    stop: str | int | None


@st.composite
def cases(draw: st.DrawFn, any_tokens: bool, kinds: tuple[str, ...] = ("byte-level", "byte-fallback")) -> Case:
    kind = draw(st.sampled_from(kinds))
    tokenizer = TOKENIZERS[kind]
    if any_tokens:  # incomplete and invalid characters, and special tokens
        token_ids = draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), min_size=1, max_size=24))
    else:
        words = draw(st.lists(st.sampled_from(WORDS), min_size=1, max_size=10))
        token_ids = tokenizer.encode("".join(words), add_special_tokens=False).ids
        if draw(st.booleans()):
            token_ids.insert(draw(st.integers(0, len(token_ids))), EOS[kind][0])
    params = SamplingParams(
        stop=draw(st.lists(st.sampled_from(STOPS), max_size=3, unique=True)),
        stop_token_ids=draw(st.lists(st.sampled_from(token_ids), max_size=1)),
        ignore_eos=draw(st.booleans()),
        min_tokens=draw(st.integers(0, 6)),
        include_stop_str_in_output=draw(st.booleans()),
        skip_special_tokens=draw(st.booleans()),
    )
    return Case(kind, token_ids, params, draw(st.integers(1, 26)))


START, ENDS = "☃", ["é", "aab"]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_stop_strings_act_on_the_answer_after_the_reasoning(data: st.DataObject) -> None:
    """Whatever the steps; the reference looks at the whole text after each token."""
    kind = data.draw(st.sampled_from(sorted(TOKENIZERS)))
    words = data.draw(
        st.lists(st.sampled_from(["the", "a", "aab", " ", "\n", "in", START, "é"]), min_size=1, max_size=12)
    )
    token_ids = TOKENIZERS[kind].encode("".join(words), add_special_tokens=False).ids
    ends = tuple(data.draw(st.lists(st.sampled_from(ENDS), min_size=1, unique=True)))
    marks = ReasoningMarks(START, ends, data.draw(st.booleans()))
    stops = data.draw(st.lists(st.sampled_from(["a", "aab", "he", "\n", "é", "nin"]), max_size=3, unique=True))
    params = SamplingParams(stop=stops, reasoning=marks)
    stream = TextStream(TOKENIZERS[kind], params, [], 1000)
    text, rest, num_kept, is_ended = "", list(token_ids), 0, False
    while rest and not is_ended:
        size = data.draw(st.integers(1, len(rest)))
        cut = stream.feed(rest[:size])
        rest, text, num_kept, is_ended = rest[size:], text + cut.text, num_kept + cut.num_kept, bool(cut.finish_reason)
    expected, num_expected = stopped_answer(Case(kind, token_ids, params, 1000), marks)
    assert num_kept == num_expected
    assert text == expected if is_ended else expected.startswith(text)
    texts = [decode(Case(kind, token_ids, params, 1000), token_ids[:count]) for count in range(num_kept + 1)]
    begun = [answer_of(shown, marks)[1] and not shown.endswith(SPLIT_CHARACTER) for shown in texts]
    has_reasoning = answer_of(texts[-1], marks)[2]
    num_reasoning = begun.index(True) if any(begun) else num_kept
    assert stream.num_reasoning_tokens == (num_reasoning if has_reasoning else 0)


def answer_of(text: str, marks: ReasoningMarks) -> tuple[str, bool, bool]:
    """(the answer so far, whether it has begun, whether there is reasoning)."""
    first = text.lstrip()
    if not marks.is_open and not first.startswith(marks.start):
        return (text, bool(first), False)
    inside = text if marks.is_open else first.removeprefix(marks.start)
    parts = [inside.partition(end) for end in marks.ends if end in inside]
    return (min(parts, key=lambda part: len(part[0]))[2], True, True) if parts else ("", False, True)


def stopped_answer(case: Case, marks: ReasoningMarks) -> tuple[str, int]:
    """The text up to the first stop string in the answer, and how many tokens it takes."""
    for count in range(1, len(case.token_ids) + 1):
        text = decode(case, case.token_ids[:count])
        answer, has_begun, _ = answer_of(text, marks)
        if has_begun and not text.endswith(SPLIT_CHARACTER):
            starts = [(answer.find(stop), len(stop)) for stop in case.params.stop if stop in answer]
            if starts:
                return text[: len(text) - len(answer) + min(starts)[0]], count
    return decode(case, case.token_ids), len(case.token_ids)


def reference(case: Case) -> StreamResult:
    """The expected result: decode all tokens after each one, and return whole characters except at the end.

    Text once returned stays, even if a byte-fallback decoder would change it: then the later tokens are decoded alone.
    """
    kind, token_ids, params, max_tokens = case
    stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else EOS[kind])}
    shown, num_shown_tokens = "", 0
    for count, token_id in enumerate(token_ids, 1):
        kept, may_stop = token_ids[:count], count >= max(1, params.min_tokens)
        if may_stop and token_id in stop_ids:
            shows_stop = params.include_stop_str_in_output
            text = extend(case, shown, kept if shows_stop else kept[:-1], num_shown_tokens)
            return StreamResult(kept, text, FinishReason.STOP, token_id)
        whole = extend(case, shown, kept, num_shown_tokens)
        if whole.endswith(SPLIT_CHARACTER) and count < max_tokens:
            continue
        stop = first_stop(whole, len(shown), params.stop) if may_stop else None
        if stop is not None:
            start, text = stop
            end = start + (len(text) if params.include_stop_str_in_output else 0)
            return StreamResult(kept, whole[:end], FinishReason.STOP, text)
        shown, num_shown_tokens = whole, count
        if count == max_tokens:
            return StreamResult(kept, whole, FinishReason.LENGTH, None)
    return StreamResult(token_ids, shown, None, None)


def extend(case: Case, shown: str, token_ids: list[int], num_shown_tokens: int) -> str:
    """`shown`, the text of the first `num_shown_tokens` tokens, extended by the text of the others."""
    whole = decode(case, token_ids)
    if whole.startswith(shown):
        return whole
    anchor = TOKENIZERS[case.kind].encode("a", add_special_tokens=False).ids  # a decoder strips a first space
    later = decode(case, [*anchor, *token_ids[num_shown_tokens:]])
    return shown + later.removeprefix(decode(case, anchor))


def decode(case: Case, token_ids: list[int]) -> str:
    text: str = TOKENIZERS[case.kind].decode(token_ids, skip_special_tokens=case.params.skip_special_tokens)
    return text


def first_stop(text: str, num_old: int, stops: list[str]) -> tuple[int, str] | None:
    """The start and text of the first stop string that ends after `num_old` characters; the shorter of two."""
    starts = range(len(text))
    found = [(s, stop) for s in starts for stop in stops if text.startswith(stop, s) and s + len(stop) > num_old]
    return min(found, key=lambda match: (match[0], len(match[1])), default=None)


def feed(case: Case, cuts: list[int]) -> tuple[StreamResult, list[str]]:
    """The result and text deltas of a stream whose tokens arrive in the groups between `cuts`."""
    kind, token_ids, params, max_tokens = case
    stream = TextStream(TOKENIZERS[kind], params, EOS[kind], max_tokens)
    kept: list[int] = []
    deltas: list[str] = []
    for start, end in pairwise(sorted({0, len(token_ids), *cuts})):
        cut = stream.feed(token_ids[start:end])
        kept += token_ids[start : start + cut.num_kept]
        deltas.append(cut.text)
        if cut.finish_reason is not None:
            return StreamResult(kept, "".join(deltas), cut.finish_reason, cut.stop_reason), deltas
    return StreamResult(kept, "".join(deltas), None, None), deltas


def cut_lists() -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(1, 24), max_size=6)


# Two stop strings end with the same token; the one that begins first counts.
TWO_STOPS = Case(
    "byte-level",
    TOKENIZERS["byte-level"].encode("aab", add_special_tokens=False).ids,
    SamplingParams(stop=["b", "aab"]),
    9,
)


# An end token breaks a character, and a space follows its rest.
SPACE_AFTER_BYTES = Case(
    "byte-fallback",
    [410, 229, 155, 134, 229, 2, 155, 134, 426, 410],
    SamplingParams(ignore_eos=True, skip_special_tokens=False),
    10,
)


@given(cases(any_tokens=False), cut_lists())
@settings(max_examples=250)
@example(TWO_STOPS, [])
@example(SPACE_AFTER_BYTES, [])
def test_groups_of_any_length_give_the_result_of_single_tokens(case: Case, cuts: list[int]) -> None:
    expected, (result, _) = reference(case), feed(case, cuts)
    assert (result.token_ids, result.reason, result.stop) == (expected.token_ids, expected.reason, expected.stop)
    if expected.reason is not None:
        assert result.text == expected.text
    else:  # a possible start of a stop string is withheld
        assert expected.text.startswith(result.text)


@given(cases(any_tokens=True, kinds=("byte-level",)), cut_lists())
@settings(max_examples=250)
def test_groups_with_invalid_characters_and_special_tokens_give_the_same_result(case: Case, cuts: list[int]) -> None:
    """Byte-level only: an invalid byte changes how a byte-fallback decoder decodes the bytes before it."""
    expected, (result, _) = reference(case), feed(case, cuts)
    assert result.token_ids == expected.token_ids
    if expected.reason is not None:
        assert result == expected


@given(cases(any_tokens=True), cut_lists(), cut_lists())
@settings(max_examples=200)
@example(Case("byte-fallback", [3, 131, 0], SamplingParams(), 4), [], [])  # <0x00> <0x80> <unk>
@example(Case("byte-fallback", [100, 3, 131, 131, 300, 131, 261], SamplingParams(), 9), [], [2, 5])
def test_the_result_does_not_depend_on_the_grouping(case: Case, cuts: list[int], other_cuts: list[int]) -> None:
    assert feed(case, cuts)[0] == feed(case, other_cuts)[0]


@given(cases(any_tokens=False), cut_lists())
@settings(max_examples=200)
def test_deltas_contain_whole_characters(case: Case, cuts: list[int]) -> None:
    if SPLIT_CHARACTER not in reference(case).text:
        assert SPLIT_CHARACTER not in "".join(feed(case, cuts)[1])


@given(cases(any_tokens=False), cut_lists())
@settings(max_examples=200)
def test_stop_strings_are_excluded_unless_requested(case: Case, cuts: list[int]) -> None:
    params = case.params
    if params.min_tokens == 0 and not params.include_stop_str_in_output:
        text = feed(case, cuts)[0].text
        stops = [
            stop for stop in params.stop if stop != SPLIT_CHARACTER
        ]  # an end token may follow an incomplete character
        assert not any(stop in text for stop in stops)


def test_a_stop_token_is_shown_with_the_option_of_stop_strings() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer.encode("ab.").ids
    for shows, text in ((True, "ab."), (False, "ab")):
        params = SamplingParams(stop_token_ids=[ids[-1]], include_stop_str_in_output=shows)
        assert TextStream(tokenizer, params, [1], 100).feed(ids).text == text


def test_text_is_withheld_only_where_a_stop_string_may_begin() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    stream = TextStream(tokenizer, SamplingParams(stop=["xyz"]), [1], 100)
    ids = tokenizer.encode("abxyq").ids
    assert [stream.feed([token]).text for token in ids] == ["a", "b", "", "", "xyq"]


@pytest.mark.parametrize("kind", sorted(TOKENIZERS))
def test_an_incomplete_character_at_the_end_becomes_a_replacement_character(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode("a😀", add_special_tokens=False).ids
    cut = TextStream(tokenizer, SamplingParams(), EOS[kind], len(ids) - 1).feed(ids)
    assert cut.finish_reason is FinishReason.LENGTH
    assert cut.text == tokenizer.decode(ids[:-1])
    assert SPLIT_CHARACTER in cut.text


def test_an_invalid_byte_changes_no_text_returned_before() -> None:
    """A byte-fallback decoder turns all adjacent bytes into U+FFFD, also those of a valid character."""
    tokenizer = TOKENIZERS["byte-fallback"]
    snowman = tokenizer.encode("☃", add_special_tokens=False).ids
    assert len(snowman) == 4  # a space and three bytes
    stream = TextStream(tokenizer, SamplingParams(), EOS["byte-fallback"], 100)
    word, broken = tokenizer.encode("the end", add_special_tokens=False).ids[-1], snowman[-1]
    shown = [stream.feed([token]).text for token in [*snowman, broken, word, word]]
    assert shown[3:5] == ["☃", ""]
    assert "".join(shown) == "☃" + SPLIT_CHARACTER + 2 * tokenizer.decode([broken, word]).removeprefix(SPLIT_CHARACTER)


@given(st.lists(st.sampled_from(WORDS), min_size=1, max_size=12), st.integers(0, 40), cut_lists(), st.booleans())
@settings(max_examples=250)
@example([" a", "the"], 1, [], True)
@example([" "], 1, [], False)
def test_a_prompt_and_its_output_are_the_text_of_all_tokens(
    words: list[str], place: int, cuts: list[int], starts_with_bos: bool
) -> None:
    """Also the first space of the output, which a decoder of the output alone removes."""
    for kind, tokenizer in TOKENIZERS.items():
        ids = tokenizer.encode("".join(words), add_special_tokens=False).ids
        ids = [EOS[kind][0] - 1] * starts_with_bos + ids
        prompt, output = ids[:place], ids[place:]
        if not output or SPLIT_CHARACTER in tokenizer.decode(prompt) + tokenizer.decode(output):
            continue
        stream = TextStream(tokenizer, SamplingParams(), [], len(output), prompt_token_ids=prompt)
        pieces = pairwise(sorted({0, len(output), *(cut for cut in cuts if cut < len(output))}))
        text = "".join(stream.feed(output[start:end]).text for start, end in pieces)
        assert tokenizer.decode(prompt) + text == tokenizer.decode(ids)


def test_a_stop_string_that_begins_with_a_space_ends_the_output_at_its_first_token() -> None:
    tokenizer = TOKENIZERS["byte-fallback"]
    prompt, whole = (tokenizer.encode(text, add_special_tokens=False).ids for text in ("a little", "a little girl"))
    stream = TextStream(tokenizer, SamplingParams(stop=[" girl"]), [2], 99, prompt_token_ids=prompt)
    cut = stream.feed(whole[len(prompt) :])
    assert (cut.text, cut.finish_reason, cut.stop_reason) == ("", FinishReason.STOP, " girl")


@pytest.mark.parametrize("kind", sorted(TOKENIZERS))
def test_a_prompt_that_ends_inside_a_character_is_not_part_of_the_output(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    prompt = tokenizer.encode("the 😀", add_special_tokens=False).ids[:-1]
    stream = TextStream(tokenizer, SamplingParams(), EOS[kind], 99, prompt_token_ids=prompt)
    text = stream.feed(tokenizer.encode(" on the", add_special_tokens=False).ids).text
    assert text.strip() == "on the"


def test_special_tokens_before_the_output_hide_no_earlier_text_of_the_prompt() -> None:
    tokenizer = TOKENIZERS["byte-fallback"]
    ids = tokenizer.encode("the end", add_special_tokens=False).ids
    stream = TextStream(tokenizer, SamplingParams(), [2], 99, prompt_token_ids=[ids[0], *[1] * 100])
    assert stream.feed(ids[-1:]).text == tokenizer.decode([ids[0], ids[-1]])[len(tokenizer.decode(ids[:1])) :]


class CountingTokenizer:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.num_decoded = 0

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        self.num_decoded += len(token_ids)
        return self._tokenizer.decode(token_ids, skip_special_tokens)


@pytest.mark.parametrize("kind", sorted(TOKENIZERS))
@pytest.mark.parametrize("end", ["incomplete", "special"])
def test_a_long_prompt_without_text_at_its_end_takes_no_step_of_other_requests(kind: str, end: str) -> None:
    """All of it was decoded once for each of its tokens; 8,191 parts of characters held all requests for 45 s."""
    tokenizer = TOKENIZERS[kind]
    token = tokenizer.encode("😀", add_special_tokens=False).ids[-2] if end == "incomplete" else EOS[kind][0]
    counting = CountingTokenizer(tokenizer)
    stream = TextStream(counting, SamplingParams(), [], 99, prompt_token_ids=[token] * 8191)  # type: ignore[arg-type]
    assert counting.num_decoded < 8191
    stream._tokenizer = tokenizer
    assert stream.feed(tokenizer.encode("the", add_special_tokens=False).ids).text.strip() == "the"


@pytest.mark.parametrize("kind", sorted(TOKENIZERS))
@pytest.mark.parametrize("skips", [False, True])
def test_an_output_of_parts_of_characters_is_sent_before_it_is_long(kind: str, skips: bool) -> None:
    """Each token took as long as all before it: an echo of 8,191 took more than a minute."""
    tokenizer, params = TOKENIZERS[kind], SamplingParams(skip_special_tokens=skips)
    part = tokenizer.encode("😀", add_special_tokens=False).ids[-2]
    stream = TextStream(tokenizer, params, [], 10_000)
    text = "".join(stream.feed([part]).text for _ in range(300))
    assert set(text) == {SPLIT_CHARACTER}
    assert len(text) > 200
    for special in [EOS[kind][0]] * 300:
        stream.feed([special])
        assert len(stream._undecoded) < 64
    assert stream.feed(tokenizer.encode("the", add_special_tokens=False).ids).text.strip(SPLIT_CHARACTER).strip()
