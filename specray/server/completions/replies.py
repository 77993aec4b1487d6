"""Replies of /v1/completions."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from specray.engine.detokenizer import TextStream
from specray.outputs import Completion, RequestOutput, TokenLogprob
from specray.sampling_params import SamplingParams
from specray.server.completions.protocol import CompletionRequest
from specray.server.replies import Json, OpenAIReply, ReplyMetadata, finite
from specray.server.tokenization import TokenTexts

MakeText = Callable[[list[int]], TextStream]


class EchoedPrompt(NamedTuple):
    """A prompt that is repeated before its output."""

    text: str
    token_ids: list[int]
    text_lengths: list[int]  # characters of the text by token


class CompletionReply(OpenAIReply):
    """/v1/completions. `echoed` are the prompts to repeat, or none.

    `make_text` makes the text of an output after a prompt's token ids, from which offsets of tokens follow.
    """

    kind = chunk_kind = "text_completion"

    def __init__(
        self,
        body: CompletionRequest,
        metadata: ReplyMetadata,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        tokens: TokenTexts,
        make_text: MakeText,
        echoed: Sequence[EchoedPrompt],
    ) -> None:
        super().__init__(metadata, prompts, params, tokens, body.reply_options)
        self._echoed = echoed
        self._num_shown = body.num_choices
        self._shows_logprobs = body.logprobs is not None  # `params` have them to rank choices, too
        self._scores_prompts = self._shows_logprobs and params.prompt_logprobs is not None
        self._make_text = make_text
        self._offsets = {choice.index: self._offsets_of(choice) for choice in self.choices if self._shows_logprobs}
        self._begun: set[int] = set()  # choices that were sent in part

    def opening(self) -> list[Json]:
        """Echoed prompts, unless their log probabilities are still to come."""
        if self._scores_prompts or not self._echoed:
            return []
        return [
            self._chunk(c, {"text": self._echo(c).text, "logprobs": None, "finish_reason": None}) for c in self.choices
        ]

    def chunks(self, choice: Completion, output: RequestOutput) -> list[Json]:
        if not self._echoed or not self._scores_prompts or output.prompt_logprobs is None:
            return super().chunks(choice, output)
        echo = self._echo(choice)
        delta = self._scored(choice, echo.text, output.prompt_logprobs, echo)
        return [self._chunk(choice, delta), *super().chunks(choice, output)]

    def _token_ids(self, choice: Completion, token_ids: list[int]) -> Json:
        """The choice's token ids; in its first chunk also those of the prompt."""
        prompt = {} if choice.index in self._begun else {"prompt_token_ids": self._prompt_of(choice)}
        self._begun.add(choice.index)
        return prompt | super()._token_ids(choice, token_ids)

    def _extras(self, choice: Completion) -> Json:
        scores = self._prompt_logprobs(choice) if self._options.prompt_logprobs else None
        return super()._extras(choice) | {"prompt_logprobs": scores}

    def _offsets_of(self, choice: Completion) -> "TextOffsets":
        prompt = self._prompt_of(choice)
        return TextOffsets(self._make_text(prompt), self._echo(choice).text if self._echoed else "")

    def _echo(self, choice: Completion) -> EchoedPrompt:
        return self._echoed[choice.index // self._n]

    def _deltas(self, choice: Completion, output: RequestOutput) -> list[Json]:
        has_content = output.text or self._shows(output)
        return [self._scored(choice, output.text, output.logprobs)] if has_content else []

    def _scored(
        self, choice: Completion, text: str, logprobs: list[TokenLogprob] | None, echo: EchoedPrompt | None = None
    ) -> Json:
        shown = None if logprobs is None else self._logprobs(logprobs, self._offsets[choice.index], echo)
        return {"text": text, "logprobs": shown, "finish_reason": None}

    def _last(self, choice: Completion) -> Json:
        return {"text": "", "logprobs": None, **self._ending(choice)}

    def _whole_choice(self, choice: Completion) -> Json:
        text, logprobs, echo = choice.text, choice.logprobs, None
        if self._echoed:
            text = self._echo(choice).text + text
            if self._scores_prompts and choice.prompt_logprobs is not None:
                logprobs, echo = choice.prompt_logprobs + (logprobs or []), self._echo(choice)
        is_shown = self._shows_logprobs and logprobs is not None
        shown = self._logprobs(logprobs or [], self._offsets_of(choice), echo) if is_shown else None
        return {"index": choice.index, "text": text, "logprobs": shown}

    def _logprobs(self, logprobs: list[TokenLogprob], offsets: "TextOffsets", echo: EchoedPrompt | None) -> Json:
        """OpenAI's log probabilities. The tokens of `echo` come first, and the very first one has no value."""
        prompt = echo.token_ids if echo else []
        output = [entry.token_id for entry in logprobs[max(0, len(prompt) - 1) :]]
        nothing = [None] if echo else []
        return {
            "tokens": [self._tokens(token_id).text for token_id in [*prompt, *output]],
            "token_logprobs": nothing + [finite(entry.logprob) for entry in logprobs],
            "top_logprobs": nothing + [self._top(entry) for entry in logprobs],
            "text_offset": (_starts(echo.text_lengths) if echo else []) + offsets.of(output),
        }

    def _top(self, entry: TokenLogprob) -> Json:
        pairs = [
            (entry.token_id, entry.logprob),
            *reversed(entry.chosen or entry.top),
        ]  # of tokens with equal text, the most likely one is kept
        return {self._tokens(token_id).text: finite(value) for token_id, value in pairs}


class TextOffsets:
    """Where the text of each output token begins, counted from the start of the echoed prompt."""

    def __init__(self, text: TextStream, echoed: str) -> None:
        self._text = text
        self._end = len(echoed)

    def of(self, token_ids: list[int]) -> list[int]:
        """The offsets of the next tokens. Tokens inside a character begin where it does."""
        lengths = self._text.feed(token_ids).text_lengths if token_ids else []
        starts = [self._end + start for start in _starts(lengths)]
        self._end += sum(lengths)
        return starts


def _starts(lengths: Sequence[int]) -> list[int]:
    return list(accumulate(lengths, initial=0))[: len(lengths)]


class BestOfReply(CompletionReply):
    """A complete reply with the best of more choices, by mean log probability of their tokens, best first."""

    def whole(self) -> Json:
        groups = [self.choices[first : first + self._n] for first in range(0, len(self.choices), self._n)]
        best = [
            choice for group in groups for choice in sorted(group, key=_mean_logprob, reverse=True)[: self._num_shown]
        ]
        choices = [
            self._whole_choice(choice) | self._ending(choice) | self._extras(choice) | {"index": index}
            for index, choice in enumerate(best)
        ]
        return self._metadata.fields(self.kind) | {"choices": choices, **self._totals()}


def _mean_logprob(choice: Completion) -> float:
    logprobs = [entry.logprob for entry in choice.logprobs or []]
    return sum(logprobs) / max(1, len(logprobs))
