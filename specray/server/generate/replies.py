"""Replies of SGLang's /generate."""

import time
from collections.abc import Sequence
from typing import Any

from specray.outputs import Completion, FinishReason, RequestOutput, TokenLogprob
from specray.sampling_params import SamplingParams
from specray.server.choices import PreparedPrompt
from specray.server.replies import OPENAI_FRAMING, Json, ReplyMetadata, empty_choices, finite, spec_tokens_details
from specray.server.tokenization import TokenTexts


class GenerateReply:
    """SGLang's /generate. Chunks repeat the text so far, as SGLang's do."""

    framing = OPENAI_FRAMING

    def __init__(
        self,
        metadata: ReplyMetadata,
        prompts: Sequence[PreparedPrompt],
        tokens: TokenTexts,
        is_list: bool,
        shows_text: bool = True,
    ) -> None:
        """Log probabilities have their tokens' texts only with `shows_text`."""
        self.choices = empty_choices([prompt.params for prompt in prompts])
        self._prompts = [prompt for prompt in prompts for _ in prompt.names]  # of each choice
        self._names = [name for prompt in prompts for name in prompt.names]
        self._metadata = metadata
        self._tokens = tokens
        self._is_list = is_list
        self._shows_text = shows_text
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
            "id": self._names[choice.index],
            "finish_reason": _sglang_finish(choice),
            "prompt_tokens": counts.num_prompt_tokens,
            "completion_tokens": counts.num_completion_tokens,
            "cached_tokens": counts.num_cached_tokens,
            **spec_tokens_details(counts),
            "spec_draft_token_num": counts.num_draft_tokens,
            "spec_accept_token_num": counts.num_accepted,
            "spec_undrafted_steps": counts.undrafted.counts(),
            "spec_accept_histogram": list(counts.accept_histogram),
            "spec_lossy": counts.is_lossy,
            **({"spec_drafter": counts.drafter} if counts.drafter else {}),
            **self._metadata.warnings,
            "e2e_latency": time.monotonic() - self._started,
            "seed": choice.seed,
        }
        if choice.logprobs is not None:
            meta |= self._logprobs("output", choice.logprobs) | self._logprobs("input", [])
            if self._prompts[choice.index].params.logprob_token_ids:
                chosen = [[self._entry(*pair) for pair in entry.chosen] for entry in choice.logprobs]
                meta |= {"output_token_ids_logprobs": chosen, "input_token_ids_logprobs": []}
        if choice.prompt_logprobs is not None:
            meta |= self._logprobs("input", choice.prompt_logprobs, *self._unscored(choice))
        return meta

    def _logprobs(self, kind: str, logprobs: list[TokenLogprob], *unscored: int) -> Json:
        """`unscored` tokens come before the others and have no log probability."""
        tokens: list[Any] = [self._entry(token_id, None) for token_id in unscored]
        tops: list[Any] = [None for _ in unscored]
        return {
            f"{kind}_token_logprobs": tokens + [self._entry(entry.token_id, entry.logprob) for entry in logprobs],
            f"{kind}_top_logprobs": tops + [[self._entry(*pair) for pair in entry.top] for entry in logprobs],
        }

    def _unscored(self, choice: Completion) -> list[int]:
        """The prompt's token from which log probabilities start; none if the prompt ends before it."""
        prompt = self._prompts[choice.index]
        start = prompt.params.prompt_logprobs_start
        return prompt.token_ids[start : start + 1]

    def _entry(self, token_id: int, logprob: float | None) -> list[Any]:
        text = self._tokens(token_id).text if self._shows_text else None
        return [None if logprob is None else finite(logprob), token_id, text]


def choice_names(
    request_id: str, names: Sequence[str] | None, params: Sequence[SamplingParams], is_list: bool
) -> list[list[str]]:
    """The IDs of each prompt's choices: the client's name for the prompt, or one of our own for each choice."""
    if names is not None:
        return [[name] * options.n for name, options in zip(names, params, strict=True)]
    if not is_list:
        return [[request_id]]
    n = params[0].n
    return [[f"{request_id}-{prompt * n + index}" for index in range(n)] for prompt in range(len(params))]


def _sglang_finish(choice: Completion) -> Json | None:
    if choice.finish_reason is None:
        return None
    if choice.finish_reason is FinishReason.LENGTH:
        return {"type": "length", "length": len(choice.token_ids)}
    return {"type": choice.finish_reason.value, "matched": choice.stop_reason}
