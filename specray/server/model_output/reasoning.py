"""Reasoning models: separating `<think>...</think>`, Gemma 4's thought or gpt-oss's channels from the answer."""

import re
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from specray.grammar import GrammarSpec, as_format, make_grammar
from specray.sampling_params import ReasoningMarks
from specray.server.config import ReasoningParserName
from specray.server.model_output.channels import Channels
from specray.server.model_output.events import Content, Event, EventBuffer, Reasoning, Trimmer
from specray.server.model_output.parser import Parser
from specray.server.model_output.reader import Reader, Reading

THINK = "<think>"
END_THINK = "</think>"
_SPACE = re.compile(r"\s*")


class ReasoningFormat(Protocol):
    """How a family of models marks its reasoning."""

    @property
    def has_special_tokens(self) -> bool:
        """Whether the marks are special tokens of the model, which detokenizing would drop."""

    def before_grammar(self) -> "ReasoningFormat":
        """The format of an output with a grammar."""

    def marks(self, prompt: str) -> ReasoningMarks:
        """The marks of a completion of `prompt`. Only the prompt's last words matter, here and below."""

    def with_reasoning(
        self, grammar: GrammarSpec, prompt: str, template: str, forces_call: bool = False
    ) -> GrammarSpec:
        """The grammar of an output that may begin with reasoning.

        It stays as it is if it has marks itself: then it describes the reasoning too. `forces_call`: it is that of
        calls in the model's format, not of an answer.
        """

    def parser(self, prompt: str, keeps_marks: bool = False) -> Parser:
        """`keeps_marks` leaves the marks, and the whitespace beside them, in the reasoning."""


class ThinkTags(NamedTuple):
    """`<think>...</think>`, or other marks, before the answer."""

    is_always_open: bool  # the model reasons from its first token, even if neither it nor the prompt wrote `begin`
    has_special_tokens: bool = False
    begin: str = THINK
    end: str = END_THINK
    next_parts: tuple[str, ...] = ()  # marks of what may follow reasoning without its end

    def is_open(self, prompt: str) -> bool:
        """Whether a completion of `prompt` starts with reasoning."""
        end = prompt.rstrip()
        return end.endswith(self.begin) or (self.is_always_open and not end.endswith(self.end))

    def before_grammar(self) -> "ThinkTags":
        """Reasoning without a mark could not be told from the answer."""
        return self._replace(is_always_open=False)

    def marks(self, prompt: str) -> ReasoningMarks:
        return ReasoningMarks(self.begin, (self.end, *self.next_parts), self.is_open(prompt))

    def with_reasoning(
        self,
        grammar: GrammarSpec,
        prompt: str,
        template: str,
        forces_call: bool = False,  # noqa: ARG002
    ) -> GrammarSpec:
        """The output has to begin with reasoning if the prompt ends inside.

        The grammar also stays as it is if the prompt ends after reasoning, and if the model's template knows none.
        """
        knows_reasoning = self.is_open(prompt) or self.begin in template or self.end in template
        if not knows_reasoning or prompt.rstrip().endswith(self.end) or self.end in grammar.text:
            return grammar
        begin = "" if self.is_open(prompt) else self.begin
        reasoning = {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": self.end}
        parts = {"type": "sequence", "elements": [reasoning, {"type": "regex", "pattern": r"\n?\n?"}]}
        preface = parts if self.is_open(prompt) else {"type": "optional", "content": parts}
        sequence = {"type": "sequence", "elements": [preface, as_format(grammar)]}
        return make_grammar("structural_tag", {"type": "structural_tag", "format": sequence})

    def parser(self, prompt: str, keeps_marks: bool = False) -> Parser:
        sink = _MarkedReasoningSink() if keeps_marks else _ReasoningSink()
        return Parser(lambda reader: _scan(reader, sink, self, self.is_open(prompt)), sink)


_DEEPSEEK_R1 = ThinkTags(is_always_open=True)

REASONING_FORMATS: Mapping[ReasoningParserName, ReasoningFormat] = {
    "deepseek-r1": _DEEPSEEK_R1,
    "deepseek_r1": _DEEPSEEK_R1,
    "qwen3": ThinkTags(is_always_open=False),
    "gpt-oss": Channels(),
    "openai_gptoss": Channels(),
    "gemma4": ThinkTags(False, True, "<|channel>thought", "<channel|>", ("<|tool_call>",)),  # vLLM's name
}


class _ReasoningSink:
    """Drops the whitespace around reasoning."""

    def __init__(self) -> None:
        self._buffer = EventBuffer()
        self._reasoning = Trimmer()
        self._content = Trimmer(keeps_leading=True)

    def mark(self, text: str) -> None:
        """A mark, or the whitespace before the first one."""

    def reasoning(self, text: str) -> None:
        self._buffer.text(Reasoning, self._reasoning.push(text))

    def end_reasoning(self) -> None:
        self._content = Trimmer()

    def content(self, text: str) -> None:
        self._buffer.text(Content, self._content.push(text))

    def take(self) -> list[Event]:
        return self._buffer.take()

    def finish(self) -> None:
        self._buffer.text(Content, self._content.held())


class _MarkedReasoningSink(_ReasoningSink):
    """Passes everything on."""

    def mark(self, text: str) -> None:
        self.reasoning(text)

    def reasoning(self, text: str) -> None:
        self._buffer.text(Reasoning, text)

    def end_reasoning(self) -> None:
        self._content = Trimmer(keeps_leading=True)


def _scan(reader: Reader, sink: _ReasoningSink, tags: ThinkTags, is_open: bool) -> Reading[None]:
    space: list[str] = []
    yield from reader.run(_SPACE, space.append)
    is_marked = yield from reader.accept(tags.begin)
    if is_marked or is_open:
        sink.mark("".join(space) + (tags.begin if is_marked else ""))
        marker = yield from reader.through((tags.end, *tags.next_parts), sink.reasoning)
        sink.mark(tags.end if marker == tags.end else "")
        sink.end_reasoning()
        if marker in tags.next_parts:
            sink.content(marker)
    else:
        sink.content("".join(space))
    yield from reader.rest(sink.content)
