"""Replies of /v1/chat/completions."""

from collections.abc import Iterable

from specray.outputs import Completion, RequestOutput, TokenLogprob
from specray.sampling_params import SamplingParams
from specray.server.chat.output import ChatOutput, is_cut
from specray.server.model_output.events import CallStart, Content, Event, ParsedMessage, Reasoning, collect
from specray.server.replies import Json, OpenAIReply, ReplyMetadata, token_logprob
from specray.server.schemas.body import ReplyOptions
from specray.server.tokenization import TokenTexts


class ChatReply(OpenAIReply):
    """/v1/chat/completions."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(
        self,
        metadata: ReplyMetadata,
        prompt: list[int],
        params: SamplingParams,
        tokens: TokenTexts,
        options: ReplyOptions,
        output_format: ChatOutput,
    ) -> None:
        super().__init__(metadata, [prompt], params, tokens, options)
        self._format = output_format
        self._parsers = [output_format.parser() for _ in self.choices]
        self._num_calls = [0] * len(self.choices)  # that were begun

    def opening(self) -> list[Json]:
        delta = {"role": "assistant", "content": ""}
        chunks = [self._chunk(c, {"delta": delta, "logprobs": None, "finish_reason": None}) for c in self.choices]
        chunks[0] |= self._of_prompt()
        return chunks

    def whole(self) -> Json:
        scores = self._prompt_logprobs(self.choices[0]) if self._options.prompt_logprobs else None
        return super().whole() | self._of_prompt() | {"prompt_logprobs": scores}

    def _of_prompt(self) -> Json:
        return {"prompt_token_ids": self._prompts[0]} if self._options.token_ids else {}

    def _deltas(self, choice: Completion, output: RequestOutput) -> list[Json]:
        parser = self._parsers[choice.index]
        events = parser.feed(output.text) + (parser.end(is_cut(choice)) if choice.finish_reason is not None else [])
        self._num_calls[choice.index] += sum(isinstance(event, CallStart) for event in events)
        deltas = [message_delta(event) for event in events]
        if self._shows(output) and not deltas:
            deltas = [{"content": ""}]
        chunks: list[Json] = [{"delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas]
        if chunks:
            chunks[0]["logprobs"] = self._logprobs(output.logprobs)
        return chunks

    def _last(self, choice: Completion) -> Json:
        return {"delta": {}, "logprobs": None, **self._ending(choice)}

    def _whole_choice(self, choice: Completion) -> Json:
        message = collect(self._format.parser().parse(choice.text, is_cut(choice)))
        self._num_calls[choice.index] = len(message.calls)
        return {
            "index": choice.index,
            "message": whole_message(message),
            "logprobs": self._logprobs(choice.logprobs),
        }

    def _ending(self, choice: Completion) -> Json:
        fields = super()._ending(choice)
        has_called = self._num_calls[choice.index] > 0 and not self._format.is_call_named
        return fields | {"finish_reason": "tool_calls"} if has_called and fields["finish_reason"] == "stop" else fields

    def _logprobs(self, logprobs: Iterable[TokenLogprob] | None) -> Json | None:
        if logprobs is None:
            return None
        return {"content": [token_logprob(self._tokens, entry) for entry in logprobs], "refusal": None}


def message_delta(event: Event) -> Json:
    """The delta of one chunk."""
    match event:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return _reasoning(text)
        case CallStart(number, call_id, name):
            return _call_delta(number, _call(call_id, name, ""))
        case _:
            return _call_delta(event.number, {"function": {"arguments": event.text}})


def whole_message(message: ParsedMessage) -> Json:
    """The whole message. Content is null only beside calls."""
    fields: Json = {"role": "assistant", "content": message.content or (None if message.calls else ""), "refusal": None}
    if message.reasoning:
        fields |= _reasoning(message.reasoning)
    if message.calls:
        fields["tool_calls"] = [_call(*call) for call in message.calls]
    return fields


def _reasoning(text: str) -> Json:
    """SGLang's and DeepSeek's name of the field, and vLLM's."""
    return {"reasoning_content": text, "reasoning": text}


def _call_delta(index: int, fields: Json) -> Json:
    return {"tool_calls": [{"index": index} | fields]}


def _call(call_id: str, name: str, arguments: str) -> Json:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
