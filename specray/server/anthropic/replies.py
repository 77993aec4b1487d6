"""Replies of /v1/messages, whole and as Anthropic's sequence of events."""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from specray.outputs import Completion, FinishReason, RequestOutput
from specray.sampling_params import SamplingParams
from specray.server.anthropic.errors import anthropic_error
from specray.server.chat.output import ChatOutput, is_cut
from specray.server.model_output.events import CallArguments, CallStart, Content, Event
from specray.server.replies import Framing, ReplyMetadata, named_event

Json = dict[str, Any]

INVALID_JSON = "INVALID_JSON"  # key of a tool's input that is not the JSON of an object, as Anthropic recommends

_EMPTY_BLOCKS: dict[str, Json] = {
    "text": {"type": "text", "text": "", "citations": None},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}


class MessagesReply:
    """One message."""

    framing = Framing(
        named_event, b"", lambda error: [anthropic_error(error.status, str(error), error.param, error.overflow)]
    )

    def __init__(
        self, metadata: ReplyMetadata, params: SamplingParams, output_format: ChatOutput, num_prompt_tokens: int
    ) -> None:
        assert params.seed is not None
        self._choice = Completion(0, logprobs=None, seed=params.seed)
        self._metadata = metadata
        self._format = output_format
        self._num_prompt_tokens = num_prompt_tokens
        self._parser = output_format.parser()
        self._blocks = _BlockStream()

    @property
    def choices(self) -> Sequence[Completion]:
        return [self._choice]

    def opening(self) -> list[Json]:
        usage = _usage(self._num_prompt_tokens, 0, 0)
        return [{"type": "message_start", "message": self._message([], None, usage)}, {"type": "ping"}]

    def chunks(self, choice: Completion, output: RequestOutput) -> list[Json]:
        is_last = choice.finish_reason is not None
        events = self._parser.feed(output.text) + (self._parser.end(is_cut(choice)) if is_last else [])
        return [*self._blocks.feed(events), *(self._blocks.end() if is_last else [])]

    def closing(self) -> list[Json]:
        ending = self._ending(self._blocks.has_calls)
        return [
            {"type": "message_delta", "delta": ending, "usage": self._final_usage()},
            {"type": "message_stop"},
        ]

    def whole(self) -> Json:
        events = self._format.parser().parse(self._choice.text, is_cut(self._choice))
        has_calls = any(isinstance(event, CallStart) for event in events)
        return self._message(_blocks(events), self._ending(has_calls), self._final_usage())

    def _message(self, content: list[Json], ending: Json | None, usage: Json) -> Json:
        return {
            **self._metadata.warnings,
            "id": self._metadata.request_id.replace("-", "_"),
            "type": "message",
            "role": "assistant",
            "model": self._metadata.model,
            "content": content,
            **(ending or {"stop_reason": None, "stop_sequence": None}),
            "stop_details": None,
            "container": None,
            "usage": usage,
        }

    def _ending(self, has_calls: bool) -> Json:
        """Why the message ended, and at which of the request's stop sequences."""
        stop = self._choice.stop_reason if isinstance(self._choice.stop_reason, str) else None
        if self._choice.finish_reason is FinishReason.LENGTH:
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if has_calls:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        return {"stop_reason": "end_turn" if stop is None else "stop_sequence", "stop_sequence": stop}

    def _final_usage(self) -> Json:
        usage = self._choice.usage
        assert usage is not None
        return _usage(usage.num_prompt_tokens, usage.num_cached_tokens, usage.num_completion_tokens)


class _BlockStream:
    """Events of content blocks: each block starts, grows and stops before the next one starts."""

    def __init__(self) -> None:
        self.has_calls = False
        self._index = -1  # of the current block
        self._kind: str | None = None  # of the current block; None between blocks

    def feed(self, events: Iterable[Event]) -> Iterator[Json]:
        for event in events:
            if isinstance(event, CallStart):
                self.has_calls = True
                yield from self._start("tool_use", _tool_use(event, {}))
            elif isinstance(event, CallArguments):
                yield self._delta({"type": "input_json_delta", "partial_json": event.text})
            else:
                kind = "text" if isinstance(event, Content) else "thinking"
                if kind != self._kind:
                    yield from self._start(kind, _EMPTY_BLOCKS[kind])
                yield self._delta({"type": f"{kind}_delta", kind: event.text})

    def end(self) -> Iterator[Json]:
        if self._kind is not None:
            yield {"type": "content_block_stop", "index": self._index}
            self._kind = None

    def _start(self, kind: str, block: Json) -> Iterator[Json]:
        yield from self.end()
        self._kind = kind
        self._index += 1
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def _blocks(events: Iterable[Event]) -> list[Json]:
    """The content of a whole message: what the events of a stream add up to."""
    blocks: list[Json] = []
    texts: list[list[str]] = []
    for event in _BlockStream().feed(events):
        if event["type"] == "content_block_start":
            blocks.append(dict(event["content_block"]))
            texts.append([])
        elif event["type"] == "content_block_delta":
            texts[-1].append(next(value for key, value in event["delta"].items() if key != "type"))
    return [_filled(block, "".join(parts)) for block, parts in zip(blocks, texts, strict=True)]


def _filled(block: Json, text: str) -> Json:
    if block["type"] == "tool_use":
        return block | {"input": _input(text)}
    return block | {block["type"]: text}


def _input(arguments: str) -> Json:
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {INVALID_JSON: arguments}


def _tool_use(event: CallStart, tool_input: Json) -> Json:
    caller = {"type": "direct"}  # the model, and not a program that it wrote
    return {"type": "tool_use", "id": event.call_id, "name": event.name, "input": tool_input, "caller": caller}


def _usage(num_prompt: int, num_cached: int, num_completion: int) -> Json:
    return {
        "input_tokens": num_prompt - num_cached,
        "cache_creation": None,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": num_completion,
        "output_tokens_details": None,
        "server_tool_use": None,
        "service_tier": "standard",
        "inference_geo": None,
    }
