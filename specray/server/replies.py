"""Replies, complete or as the chunks of a stream: what the APIs share. Each API's own replies are in its package.

Both forms are built from the same parts, so the concatenated chunks equal the complete reply. Replies are plain dicts,
because a chunk is written per step and request and must keep the nulls that clients expect. Sending lives in `streams`.
"""

import json
import time
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple, Protocol

from specray.outputs import (
    Completion,
    RequestOutput,
    RequestUsage,
    TokenLogprob,
    Undrafted,
    acceptance_per_depth,
    add_histograms,
)
from specray.sampling_params import SamplingParams
from specray.server.choices import seed_of
from specray.server.draft_trace import trace_fields
from specray.server.errors import ApiError
from specray.server.schemas.body import ReplyOptions
from specray.server.tokenization import TokenTexts

MIN_LOGPROB = -9999.0  # JSON has no -Infinity

Json = dict[str, Any]


class Framing(NamedTuple):
    """How the server-sent events of one API are written, ended and, after a failure, reported."""

    encode: Callable[[Json], bytes]  # one chunk
    done: bytes  # event after the last chunk of a complete reply
    error: Callable[[ApiError], list[Json]]  # the chunks that end a failed reply


class Reply(Protocol):
    """One request's reply. `choices` hold what has arrived so far, in the order of the reply."""

    @property
    def framing(self) -> Framing:
        """How the chunks are written to a stream."""

    @property
    def choices(self) -> Sequence[Completion]: ...

    def opening(self) -> list[Json]:
        """Chunks before the first output."""

    def chunks(self, choice: Completion, output: RequestOutput) -> list[Json]:
        """Chunks of one output, which is already included in `choice`."""

    def closing(self) -> list[Json]:
        """Chunks after the last output."""

    def whole(self) -> Json | list[Json]: ...


class ReplyMetadata:
    """Fields that all objects of one reply share."""

    def __init__(
        self,
        request_id: str,
        model: str,
        fingerprint: str,
        seed: int,
        is_simulated: bool = False,
        max_draft_tokens: int = 0,
    ) -> None:
        """`max_draft_tokens` are those of the server's largest tree."""
        self.request_id = request_id
        self.created = int(time.time())
        self.model = model
        self.fingerprint = fingerprint
        self.seed = seed
        self.max_draft_tokens = max_draft_tokens
        self.warnings: Json = {"simulated_acceptance": True} if is_simulated else {}  # part of every object sent

    def fields(self, kind: str) -> Json:
        return {
            **self.warnings,
            "id": self.request_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "seed": self.seed,
        }


def empty_choices(params: Sequence[SamplingParams]) -> list[Completion]:
    """`n` choices for each prompt's options, prompt by prompt, each with its own seed."""
    pairs = [(options, index) for options in params for index in range(options.n)]
    return [
        Completion(place, logprobs=None if options.logprobs is None else [], seed=seed_of(options, index))
        for place, (options, index) in enumerate(pairs)
    ]


def extend(choice: Completion, output: RequestOutput) -> None:
    """Append one output to a choice."""
    choice.token_ids += output.token_ids
    choice.text += output.text
    if choice.logprobs is not None:
        choice.logprobs += output.logprobs or []
    if output.prompt_logprobs is not None:
        choice.prompt_logprobs = output.prompt_logprobs
    choice.finish_reason = output.finish_reason
    choice.stop_reason = output.stop_reason
    choice.usage = output.usage


def dumps(value: Any) -> bytes:
    """JSON in UTF-8. Where a reply repeats unpaired surrogates of its request, escapes in ASCII, as they came."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    try:
        return text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def data_event(chunk: Json) -> bytes:
    """An event without a name."""
    return b"data: " + dumps(chunk) + b"\n\n"


def named_event(chunk: Json) -> bytes:
    """An event named by the chunk's type."""
    return f"event: {chunk['type']}\n".encode() + data_event(chunk)


OPENAI_FRAMING = Framing(data_event, b"data: [DONE]\n\n", lambda error: [error.body])


class OpenAIReply:
    """Shared by chat and text completions: envelopes, final and usage chunks."""

    framing = OPENAI_FRAMING
    kind: str
    chunk_kind: str

    def __init__(
        self,
        metadata: ReplyMetadata,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        tokens: TokenTexts,
        options: ReplyOptions,
    ) -> None:
        """`prompts` are the token ids of each prompt."""
        self.choices = empty_choices([params] * len(prompts))
        self._prompts = prompts
        self._metadata = metadata
        self._n = params.n
        self._stop_token_ids = params.stop_token_ids
        self._tokens = tokens
        self._options = options

    def opening(self) -> list[Json]:
        return []

    def chunks(self, choice: Completion, output: RequestOutput) -> list[Json]:
        deltas = self._deltas(choice, output)
        if self._options.token_ids and output.token_ids:
            deltas[0] |= self._token_ids(choice, output.token_ids)
        if output.trace is not None:
            deltas[0] |= trace_fields(output.trace, self._tokens)
        chunks = [self._chunk(choice, delta) for delta in deltas]
        if choice.finish_reason is not None:
            chunks.append(self._chunk(choice, self._last(choice)))
        return chunks

    def closing(self) -> list[Json]:
        fields, details = self._metadata.fields(self.chunk_kind) | {"choices": []}, self._spec_tokens_details()
        chunks = [fields | details] if details else []
        return chunks + [fields | {"usage": self._usage(), **self._metrics()}] * self._options.usage

    def whole(self) -> Json:
        choices = [self._whole_choice(choice) | self._ending(choice) | self._extras(choice) for choice in self.choices]
        return self._metadata.fields(self.kind) | {"choices": choices, **self._totals()}

    def _totals(self) -> Json:
        """What a whole reply says of all its choices."""
        return {"usage": self._usage(), **self._metrics(), **self._spec_tokens_details()}

    def _metrics(self) -> Json:
        """vLLM's figures of a request's drafts, of replies with one choice."""
        counts = [choice.usage for choice in self.choices if choice.usage is not None]
        if len(self.choices) != 1 or not counts or not self._metadata.max_draft_tokens:
            return {}
        return {"metrics": {"speculative_decoding": acceptance_metrics(counts[0], self._metadata.max_draft_tokens)}}

    def _spec_tokens_details(self) -> Json:
        """SGLang's figures of a request's drafts, if it asks for them; a list with several choices."""
        if not self._options.spec_tokens_details or not self._metadata.max_draft_tokens:
            return {}
        details = [spec_tokens_details(choice.usage) for choice in self.choices if choice.usage is not None]
        return {"sglext": {"spec_tokens_details": details[0] if self._n == 1 and details else details}}

    def _extras(self, choice: Completion) -> Json:
        """Fields that the request's options add to a whole choice."""
        return self._token_ids(choice, choice.token_ids) if self._options.token_ids else {}

    def _token_ids(self, _: Completion, token_ids: list[int]) -> Json:
        return {"token_ids": token_ids}

    def _prompt_of(self, choice: Completion) -> list[int]:
        return self._prompts[choice.index // self._n]

    def _shows(self, output: RequestOutput) -> bool:
        """Whether an output needs a chunk even if it has no text."""
        return bool(output.logprobs or output.trace or (self._options.token_ids and output.token_ids))

    def _prompt_logprobs(self, choice: Completion) -> list[Json | None]:
        """vLLM's form: by position, the token and the most likely ones. Other tokens have no `rank`."""
        scored = [None, *(self._ranked(entry) for entry in choice.prompt_logprobs or [])]
        return scored[: len(self._prompt_of(choice))]

    def _ranked(self, entry: TokenLogprob) -> Json:
        ranks = {token_id: rank for rank, (token_id, _) in enumerate(entry.top, 1)}
        pairs = dict(entry.top) | {entry.token_id: entry.logprob}
        return {
            str(token_id): {
                "logprob": finite(logprob),
                "rank": ranks.get(token_id),
                "decoded_token": self._tokens(token_id).text,
            }
            for token_id, logprob in pairs.items()
        }

    def _chunk(self, choice: Completion, fields: Json) -> Json:
        fields = {"index": choice.index, **fields}
        usage = {"usage": self._usage() if self._options.continuous_usage else None} if self._options.usage else {}
        return self._metadata.fields(self.chunk_kind) | {"choices": [fields], **usage}

    def _usage(self) -> Json:
        return usage(self.choices, self._n)

    def _ending(self, choice: Completion) -> Json:
        return ending(choice, self._stop_token_ids)

    def _deltas(self, choice: Completion, output: RequestOutput) -> list[Json]:
        """The choice's fields in each chunk of one output."""
        raise NotImplementedError

    def _last(self, choice: Completion) -> Json:
        raise NotImplementedError

    def _whole_choice(self, choice: Completion) -> Json:
        raise NotImplementedError


def usage(choices: Sequence[Completion], n: int) -> Json:
    """OpenAI's usage object over all choices. A prompt counts once, regardless of `n`."""
    counts = [choice.usage for choice in choices if choice.usage is not None]
    prompts = counts[::n]
    num_prompt = sum(count.num_prompt_tokens for count in prompts)
    num_completion = sum(count.num_completion_tokens for count in counts)
    num_steps = sum(count.num_verify_steps for count in counts)
    num_draft = sum(count.num_draft_tokens for count in counts)
    num_accepted = sum(count.num_accepted for count in counts)
    histogram = add_histograms(count.accept_histogram for count in counts)
    undrafted = reduce(Undrafted.plus, (count.undrafted for count in counts), Undrafted())
    drafters = list(dict.fromkeys(count.drafter for count in counts if count.drafter))
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": sum(count.num_cached_tokens for count in prompts)},
        "completion_tokens_details": {
            "reasoning_tokens": sum(count.num_reasoning_tokens for count in counts),
            "accepted_prediction_tokens": num_accepted,
            "rejected_prediction_tokens": num_draft - num_accepted,
        },
        "speculative": {
            "verify_steps": num_steps,
            "draft_tokens": num_draft,
            "accepted_tokens": num_accepted,
            "accept_length": accept_length(num_accepted, num_steps),
            "accept_histogram": histogram,
            "acceptance_per_depth": acceptance_per_depth(histogram),
            "undrafted_steps": undrafted.counts(),
            "lossy": any(count.is_lossy for count in counts),
            **({"drafters": drafters} if drafters else {}),
        },
    }


def acceptance_metrics(counts: RequestUsage, max_draft_tokens: int) -> Json:
    """vLLM's `metrics.speculative_decoding`: of the steps with drafts, each of at most `max_draft_tokens`."""
    histogram = list(counts.accept_histogram)
    num_steps, accepted = sum(histogram), sum(depth * trees for depth, trees in enumerate(histogram))
    return {
        "mean_acceptance_length": 1 + accepted / num_steps if num_steps else 1.0,
        "draft_acceptance_rate": accepted / counts.num_draft_tokens if counts.num_draft_tokens else 0.0,
        "acceptance_histogram": histogram + [0] * (max_draft_tokens + 1 - len(histogram)),
        "num_spec_steps": num_steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": counts.num_draft_tokens,
        "num_spec_tokens": max(max_draft_tokens, len(histogram) - 1),  # a grammar may add some
    }


def spec_tokens_details(counts: RequestUsage) -> Json:
    """SGLang's names of a request's drafts. Its figures of blocks that are cut by confidence have no counterpart."""
    accepted, proposed = counts.num_accepted, counts.num_draft_tokens
    return {
        "spec_accept_rate": accepted / proposed if proposed else 0.0,
        "spec_accept_length": accept_length(accepted, counts.num_verify_steps) or 0.0,
        "spec_num_correct_drafts": accepted,
        "spec_num_proposed_drafts": proposed,
        "spec_verify_ct": counts.num_verify_steps,
        "spec_correct_drafts_histogram": list(counts.accept_histogram),
    }


def accept_length(num_accepted: int, num_verify_steps: int) -> float | None:
    """Tokens per verify step, bonus token included; None before the first step."""
    return 1 + num_accepted / num_verify_steps if num_verify_steps else None


def token_logprob(tokens: TokenTexts, entry: TokenLogprob) -> Json:
    """A token, and the most likely ones or those that the request chose, as in OpenAI's chats and responses."""

    def shown(token_id: int, logprob: float) -> Json:
        text, data = tokens(token_id)
        return {"token": text, "logprob": finite(logprob), "bytes": list(data)}

    top = [shown(*pair) for pair in entry.chosen or entry.top]
    return shown(entry.token_id, entry.logprob) | {"top_logprobs": top}


def finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)


def ending(choice: Completion, stop_token_ids: Sequence[int]) -> Json:
    """The finish reason, stop reason and seed of a choice, in OpenAI's fields.

    `stop_reason` is vLLM's: the request's stop string or stop token, and null after the model's own end token.
    """
    assert choice.finish_reason is not None
    stop = choice.stop_reason
    stop_reason = stop if isinstance(stop, str) or stop in stop_token_ids else None
    return {"finish_reason": choice.finish_reason.value, "stop_reason": stop_reason, "seed": choice.seed}
