"""Streamed text with the embedded model's tokenizer of 49,152 tokens, many of which are parts of characters."""

from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from specray.config import EMBEDDED_MODEL
from specray.engine.detokenizer import TextStream
from specray.errors import ConfigError
from specray.models.files import resolve_model
from specray.models.tokenizer import load_tokenizer
from specray.outputs import FinishReason
from specray.sampling_params import SamplingParams

NO_LIMIT = 10_000
FRAGMENTS = ["Hello, world. ", "  ", "\n\n", "the ", "naïve ", "日本語", "한국어", "مرحبا ", "👩‍🚀", "🇨🇭", "x = 3;"]
texts = st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=4)), min_size=1, max_size=8).map("".join)
cut_lists = st.lists(st.integers(1, 60), max_size=8)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    try:
        return load_tokenizer(resolve_model(EMBEDDED_MODEL, None, "auto", progress=False)).backend_tokenizer
    except ConfigError as error:
        pytest.skip(str(error))


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a text. Rejects texts that do not survive encoding: the vocabulary lacks a few bytes."""
    token_ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    assume("�" not in text and tokenizer.decode(token_ids) == text)
    return token_ids


def stream(
    tokenizer: Tokenizer, token_ids: list[int], params: SamplingParams, cuts: list[int], max_tokens: int = NO_LIMIT
) -> tuple[list[str], int, FinishReason | None, str | int | None]:
    """Deltas, number of kept tokens, finish reason and stop reason of a stream fed in the groups between `cuts`."""
    texts, deltas, num_kept = TextStream(tokenizer, params, [], max_tokens), [], 0
    for start, end in pairwise(sorted({0, len(token_ids), *(cut for cut in cuts if cut < len(token_ids))})):
        cut = texts.feed(token_ids[start:end])
        deltas.append(cut.text)
        num_kept += cut.num_kept
        if cut.finish_reason is not None:
            return deltas, num_kept, cut.finish_reason, cut.stop_reason
    return deltas, num_kept, None, None


@given(text=texts, cuts=cut_lists)
@settings(max_examples=100, deadline=None)
def test_deltas_contain_whole_characters_and_add_up_to_the_text(
    tokenizer: Tokenizer, text: str, cuts: list[int]
) -> None:
    token_ids = encode(tokenizer, text)
    deltas = stream(tokenizer, token_ids, SamplingParams(), cuts)[0]
    assert "".join(deltas) == text
    assert not any("�" in delta for delta in deltas)


@given(text=texts, cuts=cut_lists, place=st.integers(0, 40), length=st.integers(1, 6), include=st.booleans())
@settings(max_examples=100, deadline=None)
def test_text_ends_at_the_first_stop_string(
    tokenizer: Tokenizer, text: str, cuts: list[int], place: int, length: int, include: bool
) -> None:
    token_ids = encode(tokenizer, text)
    stop = text[place : place + length] or "not in the text"
    params = SamplingParams(stop=[stop], include_stop_str_in_output=include)
    deltas, num_kept, reason, stop_reason = stream(tokenizer, token_ids, params, cuts)
    assert (num_kept, reason, stop_reason) == stream(tokenizer, token_ids, params, list(range(99)))[1:]
    if stop not in text:
        assert reason is None
        assert text.startswith("".join(deltas))
        return
    assert (reason, stop_reason) == (FinishReason.STOP, stop)
    assert "".join(deltas) == text[: text.find(stop) + (len(stop) if include else 0)]
    assert stop in tokenizer.decode(token_ids[:num_kept])


@given(token_ids=st.lists(st.integers(0, 49_151), min_size=1, max_size=20), cuts=cut_lists, skip=st.booleans())
@settings(max_examples=100, deadline=None)
def test_any_tokens_end_at_the_limit_with_their_full_text(
    tokenizer: Tokenizer, token_ids: list[int], cuts: list[int], skip: bool
) -> None:
    params = SamplingParams(skip_special_tokens=skip)
    deltas, num_kept, reason, _ = stream(tokenizer, token_ids, params, cuts, max_tokens=len(token_ids))
    assert (num_kept, reason) == (len(token_ids), FinishReason.LENGTH)
    assert "".join(deltas) == tokenizer.decode(token_ids, skip_special_tokens=skip)
