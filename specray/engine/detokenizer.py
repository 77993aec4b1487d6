"""Incremental detokenization and stop conditions.

Tokens are processed one by one, however many a step accepted. Text, ids, logprobs and usage therefore end at the same
token for any split of the same output into steps. Text that may be the start of a stop string is held back. Stop
strings act on the answer, not on the reasoning before it.
"""

from collections.abc import Sequence
from typing import NamedTuple

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from specray.engine.decode_streams import decode_afresh, stream_after
from specray.engine.stop_strings import AnswerStart, StopPrefixes, cut_at_stop
from specray.outputs import FinishReason
from specray.sampling_params import SamplingParams

_MOST_UNDECODED = 64  # tokens without a whole character: a stream decodes all of them again with each further one


class Cut(NamedTuple):
    """The outcome of feeding tokens: the first `num_kept` of them are kept, and `text` can be sent."""

    num_kept: int
    text: str
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    text_lengths: list[int]  # characters that each kept token added to the text, sent or not; empty if not asked for


class TextStream:
    """One request's output text: what its tokens add to the text of `prompt_token_ids`.

    Many tokenizers remove the first space of a text, so an output must not be decoded alone. `max_tokens` is the
    resolved limit. `records_lengths` asks for `Cut.text_lengths`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        eos_token_ids: Sequence[int],
        max_tokens: int,
        records_lengths: bool = False,
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._params = params
        # A grammar that is complete allows only end tokens, so they end the request even with ignore_eos.
        ignores_eos = params.ignore_eos and params.grammar is None
        self._stop_ids = frozenset(params.stop_token_ids) | frozenset(() if ignores_eos else eos_token_ids)
        self._max_tokens = max_tokens
        self._records_lengths = records_lengths
        self._stream = stream_after(prompt_token_ids, tokenizer, params.skip_special_tokens)
        self._longest_stop = max(map(len, params.stop), default=0)
        self._prefixes = StopPrefixes(params.stop) if params.stop else None
        self._answer = AnswerStart(params.reasoning)
        self.num_reasoning_tokens = 0
        self._num_tokens = 0
        self._text = ""  # all text so far, or its last part when there are no stop strings
        self._num_answer = 0  # characters at its end that belong to the answer
        self._num_sent = 0  # characters of `_text` that were returned
        self._undecoded: list[int] = []  # tokens whose characters are incomplete

    def feed(self, token_ids: Sequence[int]) -> Cut:
        """Process emitted tokens; those after the one that ends the output are dropped."""
        if self._max_tokens == 0:
            return Cut(0, "", FinishReason.LENGTH, None, [])
        lengths: list[int] = []
        for index, token_id in enumerate(token_ids):
            before = len(self._text)
            reason, stop = self._feed_one(token_id)
            if self._records_lengths:
                lengths.append(max(0, len(self._text) - before))  # a stop string may have begun in an earlier token
            if reason is not None:
                return Cut(index + 1, self._take(len(self._text)), reason, stop, lengths)
        return Cut(len(token_ids), self._take(self._num_safe()), None, None, lengths)

    def _feed_one(self, token_id: int) -> tuple[FinishReason | None, str | int | None]:
        self._num_tokens += 1
        may_stop = self._num_tokens >= max(1, self._params.min_tokens)
        if may_stop and token_id in self._stop_ids:
            if self._params.include_stop_str_in_output:
                self._decode(token_id)
            self._flush()
            return FinishReason.STOP, token_id
        new_text = self._decode(token_id)
        at_limit = self._num_tokens >= self._max_tokens
        if at_limit:
            new_text += self._flush()
        if self._prefixes is not None and may_stop and new_text:
            answer_start = len(self._text) - self._num_answer
            if cut := cut_at_stop(self._text[answer_start:], len(new_text), self._params):
                answer, stop = cut
                self._text = self._text[:answer_start] + answer
                return FinishReason.STOP, stop
        return (FinishReason.LENGTH, None) if at_limit else (None, None)

    def _decode(self, token_id: int) -> str:
        self._undecoded.append(token_id)
        try:
            new_text: str | None = self._stream.step(self._tokenizer, token_id)
        except Exception:  # the library raises nothing narrower
            self._stream, new_text = decode_afresh(self._undecoded, self._tokenizer, self._params.skip_special_tokens)
        if new_text is None:
            if len(self._undecoded) < _MOST_UNDECODED:
                return ""
            self._stream = DecodeStream(skip_special_tokens=self._params.skip_special_tokens)
            return self._flush()  # they are parts of no character
        self._undecoded.clear()
        return self._append(new_text)

    def _flush(self) -> str:
        """Decode the bytes of an incomplete character as U+FFFD."""
        rest = self._tokenizer.decode(self._undecoded, skip_special_tokens=self._params.skip_special_tokens)
        self._undecoded.clear()
        return self._append(rest)

    def _append(self, text: str) -> str:
        """Returns what may be the end of a stop string: the new part of the answer."""
        self._text += text
        if self._answer.is_answer:
            answer = text
        else:
            answer = self._answer.feed(text)
            self.num_reasoning_tokens = self._num_tokens if self._answer.has_reasoning else 0
        self._num_answer += len(answer)
        if self._prefixes is not None:
            self._prefixes.feed(answer)
        return answer

    def _num_safe(self) -> int:
        """How many characters cannot be part of a stop string that is not complete yet."""
        if self._prefixes is None:
            return len(self._text)
        if not (self._answer.is_answer or self._answer.has_reasoning):
            return self._num_sent  # what may be the start of reasoning may also be that of an answer
        num_held = self._prefixes.num_held
        return max(self._num_sent, len(self._text) - num_held)

    def _take(self, end: int) -> str:
        text = self._text[self._num_sent : end]
        keep = max(0, end - self._longest_stop)
        self._text = self._text[keep:]
        self._num_answer = min(self._num_answer, len(self._text))
        self._num_sent = end - keep
        return text
