"""Writing calls in a model's format: as text for its prompt, and as a grammar that forces it to call."""

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

Json = dict[str, Any]


class Function(NamedTuple):
    """A function that may be called, with the JSON schema of its arguments, which are an object."""

    name: str
    parameters: Json


class CallSyntax(NamedTuple):
    """The text around calls whose arguments are JSON. {name} stands for the function's name in `begin`."""

    begin: str  # text before the arguments
    end: str  # text after the arguments
    separator: str  # text between two calls
    prefix: str = ""  # text before the first call
    suffix: str = ""  # text after the last call

    def write(self, calls: Iterable[tuple[str, str]]) -> str:
        """The text of calls, given as names and JSON texts of arguments."""
        texts = [self._begin(name) + arguments + self.end for name, arguments in calls]
        return self.prefix + self.separator.join(texts) + self.suffix

    def structural_tag(self, functions: Sequence[Function], max_calls: int | None) -> Json:
        """xgrammar's structural tag of a message that calls at least one of `functions`."""
        tags = {
            "type": "tags_with_separator",
            "tags": [self._tag(function) for function in functions],
            "separator": self.separator,
            "at_least_one": True,
            "stop_after_first": max_calls == 1,
        }
        parts = [_constant(self.prefix), tags, _constant(self.suffix)]
        return {"type": "structural_tag", "format": {"type": "sequence", "elements": [part for part in parts if part]}}

    def _tag(self, function: Function) -> Json:
        content = {"type": "json_schema", "json_schema": function.parameters}
        return {"type": "tag", "begin": self._begin(function.name), "content": content, "end": self.end}

    def _begin(self, name: str) -> str:
        return self.begin.replace("{name}", name)


def json_syntax(begin: str, arguments: str, end: str, separator: str, prefix: str = "", suffix: str = "") -> CallSyntax:
    """The syntax of calls that are JSON objects whose arguments have the key `arguments`."""
    return CallSyntax(f'{begin}{{"name": "{{name}}", {json.dumps(arguments)}: ', f"}}{end}", separator, prefix, suffix)


def _constant(text: str) -> Json | None:
    return {"type": "const_string", "value": text} if text else None
