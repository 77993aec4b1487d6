"""Replies of /v1/completions."""

from cluster.api.replies import Json, OpenAIReply, ReplyMetadata, TokenTexts, ending, finite
from specray.outputs import Completion, RequestOutput, TokenLogprob
from specray.sampling_params import SamplingParams


class CompletionReply(OpenAIReply):
    """/v1/completions."""

    kind = chunk_kind = "text_completion"

    def __init__(
        self, metadata: ReplyMetadata, num_prompts: int, params: SamplingParams, tokens: TokenTexts, include_usage: bool
    ) -> None:
        super().__init__(metadata, num_prompts, params, tokens, include_usage)
        self._offsets = [0] * len(self.choices)  # characters of logprob tokens already sent, per choice

    def _delta(self, choice: Completion, output: RequestOutput) -> Json:
        logprobs = self._logprobs(output.logprobs, self._offsets[choice.index])
        self._offsets[choice.index] += sum(len(token) for token in logprobs["tokens"]) if logprobs else 0
        return {"text": output.text, "logprobs": logprobs, "finish_reason": None}

    def _last(self, choice: Completion) -> Json:
        return {"text": "", "logprobs": None, **ending(choice)}

    def _whole_choice(self, choice: Completion) -> Json:
        return {"index": choice.index, "text": choice.text, "logprobs": self._logprobs(choice.logprobs, 0)}

    def _logprobs(self, logprobs: list[TokenLogprob] | None, offset: int) -> Json | None:
        if logprobs is None:
            return None
        tokens = [self._tokens(entry.token_id).text for entry in logprobs]
        offsets = [offset + sum(map(len, tokens[:i])) for i in range(len(tokens))]
        return {
            "tokens": tokens,
            "token_logprobs": [finite(entry.logprob) for entry in logprobs],
            "top_logprobs": [self._top(entry) for entry in logprobs],
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprob) -> Json:
        pairs = [
            (entry.token_id, entry.logprob),
            *reversed(entry.top),
        ]  # of tokens with equal text, the most likely one is kept
        return {self._tokens(token_id).text: finite(value) for token_id, value in pairs}
