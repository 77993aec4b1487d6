"""gpt-oss's harmony format: an output is a series of messages, each with a channel and possibly a recipient.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>

The prompt ends with `<|start|>assistant`. The recipient may stand before the channel. Reasoning and content are read
here; calls stay in the content with their marks, for `specray.server.tool_calls.harmony`. Source: the description of
the format in OpenAI's cookbook, and the chat template of openai/gpt-oss-20b.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple, Self

from specray.grammar import GrammarSpec, as_format, make_grammar
from specray.sampling_params import ReasoningMarks
from specray.server.model_output.events import Content, Event, EventBuffer, Reasoning
from specray.server.model_output.parser import Parser
from specray.server.model_output.reader import Reader, Reading

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
OPENING = f"{START}assistant"  # of every message of the model
RECIPIENT, FUNCTIONS = " to=", "functions."
ANALYSIS, COMMENTARY, FINAL = (CHANNEL + name for name in ("analysis", "commentary", "final"))
_ENDS = (END, CALL, RETURN, START)  # of a message's text, or of a header without one
_MARKS = (*_ENDS, CHANNEL, MESSAGE)
_OF_OPENAI = {"python", "browser", "container"}  # namespaces of tools that OpenAI's own service runs
_RECIPIENT_NAME = re.compile(rf"{RECIPIENT}([^\s<]+)")


class Channels(NamedTuple):
    """The harmony format as a ReasoningFormat."""

    has_special_tokens: bool = True

    def before_grammar(self) -> Self:
        """See ReasoningFormat."""
        return self

    def marks(self, prompt: str) -> ReasoningMarks:  # noqa: ARG002
        """See ReasoningFormat."""
        ends = FINAL + MESSAGE, COMMENTARY + MESSAGE, f"json{MESSAGE}"  # the last one of calls
        return ReasoningMarks(ANALYSIS, ends, is_open=True)

    def with_reasoning(
        self,
        grammar: GrammarSpec,
        prompt: str,
        template: str,  # noqa: ARG002
        forces_call: bool = False,
    ) -> GrammarSpec:
        """Any messages of reasoning, and then the answer in the final channel, or a call."""
        if CHANNEL in grammar.text and not forces_call:
            return grammar
        reasoning = [
            {"type": "tag", "begin": ANALYSIS + MESSAGE, "content": {"type": "any_text"}, "end": END},
            {"type": "const_string", "value": OPENING},
        ]
        elements: list[dict[str, Any]] = [
            {"type": "star", "content": {"type": "sequence", "elements": reasoning}},
            {"type": "const_string", "value": "" if forces_call else FINAL + MESSAGE},
            as_format(grammar),
        ]
        if not prompt.endswith(OPENING):
            elements.insert(0, {"type": "const_string", "value": OPENING})
        sequence = {"type": "sequence", "elements": elements}
        return make_grammar("structural_tag", {"type": "structural_tag", "format": sequence})

    def parser(self, prompt: str, keeps_marks: bool = False) -> Parser:  # noqa: ARG002
        """See ReasoningFormat."""
        sink = _Sink()
        return Parser(lambda reader: _scan(reader, sink, keeps_marks), sink)


class _Sink:
    """Reasoning and content. The texts of several messages of a kind are separated by line breaks."""

    def __init__(self) -> None:
        self._buffer = EventBuffer()
        self._separators: dict[Callable[[str], Event], str] = {}  # before the next text of a kind

    def begin(self, kind: Callable[[str], Event]) -> None:
        """A message begins."""
        if kind in self._separators:
            self._separators[kind] = "\n"

    def write(self, kind: Callable[[str], Event], text: str) -> None:
        if text:
            self._buffer.text(kind, self._separators.get(kind, "") + text)
            self._separators[kind] = ""

    def content(self, text: str) -> None:
        self.write(Content, text)

    def reasoning(self, text: str) -> None:
        self.write(Reasoning, text)

    def take(self) -> list[Event]:
        return self._buffer.take()

    def finish(self) -> None:
        """See Sink."""


def _scan(reader: Reader, sink: _Sink, keeps_marks: bool) -> Reading[None]:
    """Text outside of messages is content, as models write it that do not know the format."""
    is_header = yield from reader.accept(RECIPIENT)
    mark = RECIPIENT if is_header else (yield from reader.through(_MARKS, sink.content))
    while mark is not None:
        if mark in (END, CALL, RETURN):
            mark = yield from reader.through(_MARKS, sink.content)
        else:
            mark = yield from _scan_message(reader, sink, mark, keeps_marks)


def _scan_message(reader: Reader, sink: _Sink, mark: str, keeps_marks: bool) -> Reading[str | None]:
    """Read a message that begins with `mark`. Returns the mark behind it; None at the end of the output."""
    head = [mark]
    end: str | None = mark
    if mark != MESSAGE:
        end = yield from reader.through((*_ENDS, MESSAGE), head.append)
    if end != MESSAGE:
        if mark == RECIPIENT:  # it was text
            sink.content("".join(head))
        return end
    header = "".join((*head, MESSAGE))
    if (tool := recipient(header)) and tool.partition(".")[0] not in _OF_OPENAI:
        sink.content((OPENING if mark == RECIPIENT else "") + header)
        end = yield from reader.through(_ENDS, sink.content)
        sink.content("" if end is None else CALL)
        return end
    is_reasoning = bool(tool) or ANALYSIS in header
    kind: Callable[[str], Event] = Reasoning if is_reasoning else Content
    sink.begin(kind)
    if is_reasoning and keeps_marks:
        sink.reasoning(header)
    end = yield from reader.through(_ENDS, sink.reasoning if is_reasoning else sink.content)
    if is_reasoning and keeps_marks and end is not None:
        sink.reasoning(end)
    return end


def recipient(header: str) -> str:
    """The tool that a message is for; empty if it is for the user."""
    found = _RECIPIENT_NAME.search(header)
    return found[1] if found else ""
