"""Text is attributed to its tokens, however late it is sent."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specray.draft_trace import DraftTrace, TokenSpan, VerifiedTree, merge_traces
from specray.engine.detokenizer import Cut, TextStream
from specray.engine.draft_tracer import MAX_TRACED_NODES, DraftTracer
from specray.sampling_params import SamplingParams
from tests.support.toy import toy_tokenizer
from tests.unit.engine.test_detokenizer import EOS, TOKENIZERS, Case, cases

NOTHING = Cut(0, "", None, None, [])
TOKENIZER = toy_tokenizer().backend_tokenizer


def chain(num_accepted: int) -> tuple[VerifiedTree, Sequence[int]]:
    """A tree of one branch, accepted as a whole."""
    return VerifiedTree([0] * (num_accepted + 1), list(range(-1, num_accepted))), range(1, num_accepted + 1)


@given(case=cases(any_tokens=True), sizes=st.lists(st.integers(1, 5), max_size=24))
@settings(max_examples=150, deadline=None)
def test_spans_add_up_to_the_text_and_name_every_token(case: Case, sizes: list[int]) -> None:
    texts, tracer = (
        TextStream(TOKENIZERS[case.kind], case.params, EOS[case.kind], case.max_tokens, True),
        DraftTracer(NOTHING),
    )
    spans: list[TokenSpan] = []
    num_kept, depths, start = 0, [], 0
    for size in [*sizes, *[1] * len(case.token_ids)]:
        group = case.token_ids[start : start + size]
        if not group:
            break
        cut = texts.feed(group)
        new = tracer.step(*chain(len(group) - 1), cut).spans
        assert "".join(span.text for span in new) == cut.text
        spans += new
        depths += [*range(1, len(group)), 0]
        num_kept, start = num_kept + cut.num_kept, start + size
        if cut.finish_reason is not None:
            assert sorted({span.token_index for span in spans}) == list(range(num_kept))
            break
    assert [span.token_index for span in spans] == sorted(span.token_index for span in spans)
    assert all(span.depth == depths[span.token_index] for span in spans)


def letters(text: str) -> list[int]:
    """One token for each character."""
    return [TOKENIZER.token_to_id(char) for char in text]


def test_a_held_back_token_keeps_its_depth_and_step() -> None:
    texts = TextStream(TOKENIZER, SamplingParams(stop=["bcx"]), [], 100, True)
    tracer = DraftTracer(NOTHING)
    first = tracer.step(*chain(2), texts.feed(letters("abc")))
    second = tracer.step(*chain(1), texts.feed(letters("de")))
    assert first.spans == [TokenSpan(0, 1, "a")]
    assert second.spans == [TokenSpan(1, 2, "b"), TokenSpan(2, 0, "c"), TokenSpan(3, 1, "d"), TokenSpan(4, 0, "e")]
    assert [step.token_index for trace in (first, second) for step in trace.steps] == [0, 3]


def test_tokens_of_a_stop_string_have_empty_spans() -> None:
    texts = TextStream(TOKENIZER, SamplingParams(stop=["bc"]), [], 100, True)
    trace = DraftTracer(NOTHING).step(*chain(3), texts.feed(letters("abcd")))
    assert trace.spans == [TokenSpan(0, 1, "a"), TokenSpan(1, 2, ""), TokenSpan(2, 3, "")]


def test_tokens_of_another_engine_have_no_depth() -> None:
    """The caller has their text, except for the part that may become a stop string."""
    texts = TextStream(TOKENIZER, SamplingParams(stop=["bx"]), [], 100, True)
    tracer = DraftTracer(texts.feed(letters("ab")))
    trace = tracer.step(*chain(1), texts.feed(letters("cd")))
    assert trace.spans == [TokenSpan(1, None, "b"), TokenSpan(2, 1, "c"), TokenSpan(3, 0, "d")]
    assert [step.token_index for step in trace.steps] == [2]


def test_the_trees_of_a_request_are_bounded() -> None:
    tracer, cut = DraftTracer(NOTHING), Cut(1, "a", None, None, [1])
    large = VerifiedTree([0] * (MAX_TRACED_NODES // 2), [])
    traces = [tracer.step(large, [], cut) for _ in range(3)]
    assert [len(trace.steps) for trace in traces] == [1, 1, 0]
    assert [trace.spans for trace in traces] == [[TokenSpan(index, 0, "a")] for index in range(3)]


@pytest.mark.parametrize("is_traced", [False, True])
def test_traces_of_two_outputs_are_merged_in_order(is_traced: bool) -> None:
    tracer, cut = DraftTracer(NOTHING), Cut(1, "a", None, None, [1])
    first, second = (tracer.step(*chain(0), cut) if is_traced else None for _ in range(2))
    merged = merge_traces(first, second)
    if first is None or second is None:
        assert merged is None
    else:
        assert merged == DraftTrace(first.spans + second.spans, first.steps + second.steps)
        assert merge_traces(None, second) == second
