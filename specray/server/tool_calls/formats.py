"""The formats in which models write tool calls, by the name that `server.tool_call_parser` selects them with."""

import secrets
import string
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from specray.server.config import ToolCallParserName
from specray.server.model_output.channels import FINAL, MESSAGE
from specray.server.model_output.parser import Parser
from specray.server.tool_calls import deepseek, gemma4, harmony, hermes, llama3, mistral, pythonic
from specray.server.tool_calls.calls import CallSink, Scan
from specray.server.tool_calls.syntax import CallSyntax, json_syntax


def _openai_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _mistral_id() -> str:
    """Nine letters and digits, which Mistral's templates check."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class ToolFormat(NamedTuple):
    """One format."""

    scan: Scan
    syntax: CallSyntax  # what prompts describe if a template has no tools, and forced calls follow
    has_special_tokens: bool = False  # its markers are special tokens of the model, which detokenizing would drop
    has_text_arguments: bool = False  # the model's template expects a call's arguments as text instead of an object
    new_id: Callable[[], str] = _openai_id

    def parser(self, names: Collection[str], max_calls: int | None, is_forced: bool = False) -> Parser:
        """A parser of one message that may call the functions `names`, or has to if `is_forced`."""
        sink = CallSink(names, self.new_id, max_calls, is_forced)
        return Parser(lambda reader: self.scan(reader, sink), sink)


_HERMES = ToolFormat(hermes.scan, json_syntax(f"{hermes.OPEN}\n", "arguments", f"\n{hermes.CLOSE}", "\n"))
_LLAMA3 = ToolFormat(llama3.scan, json_syntax("", "parameters", "", "; "), has_special_tokens=True)
_MISTRAL = ToolFormat(
    mistral.scan,
    json_syntax("", "arguments", "", ", ", f"{mistral.MARKER}[", "]"),
    has_special_tokens=True,
    new_id=_mistral_id,
)
_DEEPSEEK_V3 = ToolFormat(
    deepseek.scan,
    CallSyntax(
        f"{deepseek.CALL_BEGIN}function{deepseek.SEPARATOR}{{name}}\n{deepseek.BLOCK}\n",
        f"\n{deepseek.BLOCK_END}{deepseek.CALL_END}",
        "\n",
        deepseek.CALLS_BEGIN,
        deepseek.CALLS_END,
    ),
    has_special_tokens=True,
    has_text_arguments=True,
)
_DEEPSEEK_V31 = _DEEPSEEK_V3._replace(
    syntax=CallSyntax(
        f"{deepseek.CALL_BEGIN}{{name}}{deepseek.SEPARATOR}",
        deepseek.CALL_END,
        "",
        deepseek.CALLS_BEGIN,
        deepseek.CALLS_END,
    )
)
# A JSON schema cannot constrain Python's literals, so forced calls are JSON objects, which this scanner reads too.
_PYTHONIC = ToolFormat(pythonic.scan, _LLAMA3.syntax, has_special_tokens=True)
# `<|call|>` ends the output, as the end of a grammar does.
HARMONY = ToolFormat(harmony.scan, CallSyntax(harmony.BEGIN, "", harmony.SEPARATOR), has_special_tokens=True)

# A JSON schema cannot constrain Gemma's strings, so forced calls have arguments in JSON, which the scanner reads too.
_GEMMA4 = ToolFormat(
    gemma4.scan, CallSyntax(f"{gemma4.OPEN}{gemma4.CALL}{{name}}", gemma4.CLOSE, ""), has_special_tokens=True
)

TOOL_FORMATS: Mapping[ToolCallParserName, ToolFormat] = {
    "hermes": _HERMES,
    "qwen": _HERMES,
    "qwen25": _HERMES,
    "llama3": _LLAMA3,
    "llama3_json": _LLAMA3,
    "mistral": _MISTRAL,
    "deepseekv3": _DEEPSEEK_V3,
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseekv31": _DEEPSEEK_V31,
    "deepseek_v31": _DEEPSEEK_V31,
    "pythonic": _PYTHONIC,
    "gpt-oss": HARMONY,
    "openai": HARMONY,
    "gemma4": _GEMMA4,
}


class _Signature(NamedTuple):
    """Texts that the templates of a format contain, and texts that only templates of other formats contain."""

    name: ToolCallParserName
    present: tuple[str, ...]
    absent: tuple[str, ...] = ()


_SIGNATURES = (
    _Signature("gpt-oss", (FINAL + MESSAGE,)),
    _Signature("gemma4", (gemma4.OPEN,)),
    _Signature("deepseekv3", (deepseek.CALL_BEGIN, deepseek.BLOCK)),
    _Signature("deepseekv31", (deepseek.CALL_BEGIN,)),
    _Signature("mistral", (mistral.MARKER,)),
    _Signature("hermes", (hermes.OPEN,), absent=("<function=", "<arg_key>")),  # those of Qwen 3 Coder and GLM
    _Signature("llama3", (llama3.TAG,)),
    _Signature("llama3", ("<|start_header_id|>", '"parameters": ')),
    _Signature("pythonic", (pythonic.START,)),
    _Signature("pythonic", ("func_name1(params_name1=",)),
)


def detected_format(template: str) -> ToolCallParserName | None:
    """The format that a chat template writes calls in; None if it is not one of these."""
    for name, present, absent in _SIGNATURES:
        if all(text in template for text in present) and not any(text in template for text in absent):
            return name
    return None
