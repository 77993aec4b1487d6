"""Replies of SGLang's /generate."""

import time
from typing import Any

from cluster.api.replies import Json, ReplyMetadata, TokenTexts, accept_length, empty_choices, finite
from specray.outputs import Completion, FinishReason, RequestOutput, TokenLogprob
from specray.sampling_params import SamplingParams


class GenerateReply:
    """SGLang's /generate. Chunks repeat the text so far, as SGLang's do."""

    def __init__(
        self, metadata: ReplyMetadata, num_prompts: int, params: SamplingParams, tokens: TokenTexts, is_list: bool
    ) -> None:
        self.choices = empty_choices(num_prompts, params)
        self._metadata = metadata
        self._tokens = tokens
        self._is_list = is_list
        self._started = time.monotonic()

    def opening(self) -> list[Json]:
        return []

    def chunks(self, choice: Completion, output: RequestOutput) -> list[Json]:
        if not output.token_ids and output.finish_reason is None:
            return []
        return [self._choice(choice) | ({"index": choice.index} if self._is_list else {})]

    def closing(self) -> list[Json]:
        return []

    def whole(self) -> Json | list[Json]:
        replies = [self._choice(choice) for choice in self.choices]
        return replies if self._is_list else replies[0]

    def _choice(self, choice: Completion) -> Json:
        return {"text": choice.text, "output_ids": choice.token_ids, "meta_info": self._meta(choice)}

    def _meta(self, choice: Completion) -> Json:
        counts = choice.usage
        assert counts is not None
        meta = {
            "id": f"{self._metadata.request_id}-{choice.index}" if self._is_list else self._metadata.request_id,
            "finish_reason": _sglang_finish(choice),
            "prompt_tokens": counts.num_prompt_tokens,
            "completion_tokens": counts.num_completion_tokens,
            "cached_tokens": counts.num_cached_tokens,
            "spec_verify_ct": counts.num_verify_steps,
            "spec_draft_token_num": counts.num_draft_tokens,
            "spec_accept_token_num": counts.num_accepted,
            "spec_accept_length": accept_length(counts.num_accepted, counts.num_verify_steps),
            "spec_accept_histogram": list(counts.accept_histogram),
            "spec_lossy": counts.is_lossy,
            **self._metadata.warnings,
            "e2e_latency": time.monotonic() - self._started,
            "seed": choice.seed,
        }
        return meta if choice.logprobs is None else meta | self._logprobs(choice.logprobs)

    def _logprobs(self, logprobs: list[TokenLogprob]) -> Json:
        return {
            "output_token_logprobs": [self._entry(entry.token_id, entry.logprob) for entry in logprobs],
            "output_top_logprobs": [[self._entry(*pair) for pair in entry.top] for entry in logprobs],
        }

    def _entry(self, token_id: int, logprob: float) -> list[Any]:
        return [finite(logprob), token_id, self._tokens(token_id).text]


def _sglang_finish(choice: Completion) -> Json | None:
    if choice.finish_reason is None:
        return None
    if choice.finish_reason is FinishReason.LENGTH:
        return {"type": "length", "length": len(choice.token_ids)}
    return {"type": choice.finish_reason.value, "matched": choice.stop_reason}
