"""Replies of /v1/responses, whole and as OpenAI's sequence of events."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from specray.outputs import Completion, FinishReason, RequestOutput, TokenLogprob
from specray.sampling_params import SamplingParams
from specray.server.chat.output import ChatOutput, is_cut
from specray.server.errors import ApiError
from specray.server.replies import Framing, ReplyMetadata, empty_choices, named_event, token_logprob, usage
from specray.server.responses.output import OutputItems
from specray.server.responses.protocol import ResponsesRequest
from specray.server.schemas.body import PRIORITY_OF_TIER
from specray.server.tokenization import TokenTexts

Json = dict[str, Any]

_STATUS = {FinishReason.LENGTH: "incomplete", FinishReason.ABORT: "cancelled"}  # of others: completed
_FAILURES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}  # status -> code; of others: server_error


class ResponsesReply:
    """One response."""

    def __init__(
        self,
        body: ResponsesRequest,
        metadata: ReplyMetadata,
        params: SamplingParams,
        tokens: TokenTexts,
        output_format: ChatOutput,
        keep: Callable[[Json], None] | None,
    ) -> None:
        """`keep` stores a complete response; None if it is not to be stored."""
        self._choices = empty_choices([params])
        self._body = body
        self._keep = keep
        self._metadata = metadata
        self._params = params
        self._tokens = tokens
        self._format = output_format
        self._id = metadata.request_id.replace("-", "_")
        self._parser = output_format.parser()
        self._items = self._new_items()
        self._num_events = 0

    @property
    def framing(self) -> Framing:
        return Framing(named_event, b"", self._failure)

    @property
    def choices(self) -> Sequence[Completion]:
        return self._choices

    def opening(self) -> list[Json]:
        response = self._response("in_progress", [])
        kinds = ("response.created", "response.in_progress")
        return self._numbered({"type": kind, "response": response} for kind in kinds)

    def chunks(self, choice: Completion, output: RequestOutput) -> list[Json]:
        is_last = choice.finish_reason is not None
        events = self._parser.feed(output.text) + (self._parser.end(is_cut(choice)) if is_last else [])
        chunks = list(self._items.feed(events, self._logprobs(output.logprobs)))
        if is_last:
            chunks += self._items.finish(self._item_status)
        return self._numbered(chunks)

    def closing(self) -> list[Json]:
        kind = "response.completed" if self._status == "completed" else "response.incomplete"
        return self._numbered([{"type": kind, "response": self._kept(self._items.items)}])

    def whole(self) -> Json:
        choice, items = self._choices[0], self._new_items()
        events = self._format.parser().parse(choice.text, is_cut(choice))
        for _ in items.feed(events, self._logprobs(choice.logprobs)):
            pass
        for _ in items.finish(self._item_status):
            pass
        return self._kept(items.items)

    def _kept(self, output: list[Json]) -> Json:
        response = self._response(self._status, output)
        if self._keep is not None:
            self._keep(response)
        return response

    def _new_items(self) -> OutputItems:
        return OutputItems(self._id, self._body.wants_logprobs, self._body.tool_set.by_chat_name)

    def _numbered(self, events: Iterable[Json]) -> list[Json]:
        numbered = []
        for event in events:
            numbered.append(event | {"sequence_number": self._num_events})
            self._num_events += 1
        return numbered

    def _failure(self, error: ApiError) -> list[Json]:
        """OpenAI's two events of a failed stream, of which clients read either."""
        fields = {"code": error.code, "message": str(error)}
        failed = self._response("failed", self._items.items) | {
            "error": fields | {"code": _FAILURES.get(error.status, "server_error")}
        }
        return self._numbered(
            [{"type": "error", **fields, "param": error.param}, {"type": "response.failed", "response": failed}]
        )

    @property
    def _status(self) -> str:
        reason = self._choices[0].finish_reason
        return _STATUS.get(reason, "completed") if reason is not None else "in_progress"

    @property
    def _item_status(self) -> str:
        return "completed" if self._status == "completed" else "incomplete"

    def _response(self, status: str, output: list[Json]) -> Json:
        body, reason = self._body, {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            **self._metadata.warnings,
            "id": self._id,
            "object": "response",
            "created_at": self._metadata.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": reason,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "metadata": body.metadata or {},
            "model": self._metadata.model,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "presence_penalty": self._params.presence_penalty,
            "frequency_penalty": self._params.frequency_penalty,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "background": False,
            "safety_identifier": None,
            "service_tier": body.service_tier if body.service_tier in PRIORITY_OF_TIER else "default",
            "store": self._keep is not None,
            "temperature": self._params.temperature,
            "text": {"format": {"type": "text"}} | (body.text.model_dump(exclude_none=True) if body.text else {}),
            "tool_choice": _tool_choice(body),
            "tools": [tool.model_dump() for tool in body.tools or []],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": self._params.top_p,
            "truncation": "disabled",
            "usage": None if status in ("in_progress", "failed") else _usage(self._choices),
            "user": None,
            "seed": self._metadata.seed,
            "system_fingerprint": self._metadata.fingerprint,
        }

    def _logprobs(self, logprobs: Iterable[TokenLogprob] | None) -> list[Json]:
        return [token_logprob(self._tokens, entry) for entry in logprobs or []]


def _tool_choice(body: ResponsesRequest) -> object:
    choice = body.tool_choice
    return choice or "auto" if choice is None or isinstance(choice, str) else choice.model_dump()


def _usage(choices: Sequence[Completion]) -> Json:
    counts = usage(choices, 1)
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {**counts["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": counts["completion_tokens_details"]["reasoning_tokens"]},
        "total_tokens": counts["total_tokens"],
        "speculative": counts["speculative"],
    }
