"""Replies of /v1/completions."""

from collections.abc import Sequence
from typing import NamedTuple

from cluster.api.completion_protocol import CompletionRequest
from cluster.api.replies import Json, OpenAIReply, ReplyMetadata, finite
from cluster.api.tokenization import TokenTexts
from specray.outputs import Completion, RequestOutput, TokenLogprob
from specray.sampling_params import SamplingParams


class EchoedPrompt(NamedTuple):
    """A prompt that is repeated before its output."""

    text: str
    token_ids: list[int]


class CompletionReply(OpenAIReply):
    """/v1/completions. `echoed` are the prompts to repeat, or none."""

    kind = chunk_kind = "text_completion"

    def __init__(
        self,
        metadata: ReplyMetadata,
        num_prompts: int,
        params: SamplingParams,
        tokens: TokenTexts,
        include_usage: bool,
        echoed: Sequence[EchoedPrompt] = (),
    ) -> None:
        super().__init__(metadata, num_prompts, params, tokens, include_usage)
        self._echoed = echoed
        self._scores_prompts = params.prompt_logprobs is not None
        self._offsets = [0] * len(self.choices)  # characters of logprob tokens already sent, per choice

    def opening(self) -> list[Json]:
        """Echoed prompts, unless their log probabilities are still to come."""
        if self._scores_prompts or not self._echoed:
            return []
        return [
            self._chunk(c, {"text": self._echo(c).text, "logprobs": None, "finish_reason": None}) for c in self.choices
        ]

    def chunks(self, choice: Completion, output: RequestOutput) -> list[Json]:
        if not self._echoed or output.prompt_logprobs is None:
            return super().chunks(choice, output)
        echo = self._echo(choice)
        delta = self._scored(choice, echo.text, output.prompt_logprobs, echo.token_ids[0])
        return [self._chunk(choice, delta), *super().chunks(choice, output)]

    def _echo(self, choice: Completion) -> EchoedPrompt:
        return self._echoed[choice.index // self._n]

    def _deltas(self, choice: Completion, output: RequestOutput) -> list[Json]:
        has_content = output.text or output.logprobs or output.trace
        return [self._scored(choice, output.text, output.logprobs)] if has_content else []

    def _scored(
        self, choice: Completion, text: str, logprobs: list[TokenLogprob] | None, unscored: int | None = None
    ) -> Json:
        shown = self._logprobs(logprobs, self._offsets[choice.index], unscored)
        self._offsets[choice.index] += sum(len(token) for token in shown["tokens"]) if shown else 0
        return {"text": text, "logprobs": shown, "finish_reason": None}

    def _last(self, choice: Completion) -> Json:
        return {"text": "", "logprobs": None, **self._ending(choice)}

    def _whole_choice(self, choice: Completion) -> Json:
        text, logprobs, unscored = choice.text, choice.logprobs, None
        if self._echoed:
            echo = self._echo(choice)
            text = echo.text + text
            if choice.prompt_logprobs is not None:
                logprobs, unscored = choice.prompt_logprobs + (logprobs or []), echo.token_ids[0]
        return {"index": choice.index, "text": text, "logprobs": self._logprobs(logprobs, 0, unscored)}

    def _logprobs(self, logprobs: list[TokenLogprob] | None, offset: int, unscored: int | None = None) -> Json | None:
        """`unscored` is a prompt's first token, which comes before those of `logprobs` and has no log probability."""
        if logprobs is None:
            return None
        first = [] if unscored is None else [unscored]
        tokens = [self._tokens(token_id).text for token_id in [*first, *(entry.token_id for entry in logprobs)]]
        offsets = [offset + sum(map(len, tokens[:i])) for i in range(len(tokens))]
        nothing = [None] * len(first)
        return {
            "tokens": tokens,
            "token_logprobs": nothing + [finite(entry.logprob) for entry in logprobs],
            "top_logprobs": nothing + [self._top(entry) for entry in logprobs],
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprob) -> Json:
        pairs = [
            (entry.token_id, entry.logprob),
            *reversed(entry.top),
        ]  # of tokens with equal text, the most likely one is kept
        return {self._tokens(token_id).text: finite(value) for token_id, value in pairs}


class BestOfReply(CompletionReply):
    """A complete reply with the best of more choices, by mean log probability of their tokens, best first."""

    def __init__(
        self,
        body: CompletionRequest,
        metadata: ReplyMetadata,
        params: SamplingParams,
        tokens: TokenTexts,
        echoed: Sequence[EchoedPrompt],
    ) -> None:
        super().__init__(metadata, len(body.prompt.items), params, tokens, body.include_usage, echoed)
        self._num_shown = body.num_choices
        self._shows_logprobs = body.logprobs is not None

    def whole(self) -> Json:
        groups = [self.choices[first : first + self._n] for first in range(0, len(self.choices), self._n)]
        best = [
            choice for group in groups for choice in sorted(group, key=_mean_logprob, reverse=True)[: self._num_shown]
        ]
        choices = [self._whole_choice(c) | self._ending(c) | {"index": index} for index, c in enumerate(best)]
        return self._metadata.fields(self.kind) | {"choices": choices, "usage": self._usage()}

    def _whole_choice(self, choice: Completion) -> Json:
        shown = super()._whole_choice(choice)
        return shown if self._shows_logprobs else shown | {"logprobs": None}


def completion_reply(
    body: CompletionRequest,
    metadata: ReplyMetadata,
    params: SamplingParams,
    tokens: TokenTexts,
    echoed: Sequence[EchoedPrompt],
) -> CompletionReply:
    if body.num_generated > body.num_choices:
        return BestOfReply(body, metadata, params, tokens, echoed)
    return CompletionReply(metadata, len(body.prompt.items), params, tokens, body.include_usage, echoed)


def _mean_logprob(choice: Completion) -> float:
    logprobs = [entry.logprob for entry in choice.logprobs or []]
    return sum(logprobs) / max(1, len(logprobs))
