"""Decode streams of the tokenizers library: how one starts behind a prompt, and what replaces one that cannot go on."""

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_CONTEXT_TOKENS = (8, 64, 512)  # of the prompt; more of them while they have no text
_MOST_INCOMPLETE = 8  # tokens at their end without a whole character; one has four bytes at most


def stream_after(token_ids: Sequence[int], tokenizer: Tokenizer, skips_special_tokens: bool) -> DecodeStream:
    """A stream that continues the text of `token_ids`, of which it needs the last ones that have a text.

    An incomplete character at their end is left out: the stream would return the text before it once more. Steps
    wait for this, so of a prompt whose end has no text at all, a bounded part is looked at.
    """
    ids, text = list[int](), ""
    for length in _CONTEXT_TOKENS:
        ids = list(token_ids[-length:])
        for _ in range(_MOST_INCOMPLETE + 1):
            text = tokenizer.decode(ids, skip_special_tokens=skips_special_tokens)
            if text and not text.endswith("\ufffd"):
                return DecodeStream(ids=ids, skip_special_tokens=skips_special_tokens)
            if not text:
                break
            ids.pop()
    return DecodeStream(ids=[] if text else ids, skip_special_tokens=skips_special_tokens)


def decode_afresh(
    token_ids: Sequence[int], tokenizer: Tokenizer, skips_special_tokens: bool
) -> tuple[DecodeStream, str]:
    """(a stream over `token_ids` as a separate text, that text), for those at which another stream has raised.

    Byte-fallback decoders replace a run of byte tokens by U+FFFD once a later byte makes it invalid, including
    characters that were already sent. The stream then raises. Text that was sent is not changed.
    """
    stream = DecodeStream(skip_special_tokens=skips_special_tokens)
    return stream, "".join(stream.step(tokenizer, token_id) or "" for token_id in token_ids)
