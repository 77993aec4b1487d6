"""Llama 4 and others: a list of Python calls as the whole message, such as `[f(city="Paris"), g(x=1)]`.

Calls that a grammar forces are JSON objects, as Llama 3 writes them.
"""

import json
import re

from specray.server.model_output.reader import NotACallError, Reader, Reading
from specray.server.tool_calls import llama3
from specray.server.tool_calls.calls import CallSink, read_call
from specray.server.tool_calls.json_text import copy_value

START = "<|python_start|>"
END = "<|python_end|>"
_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"[\w.-]*")


def scan(reader: Reader, sink: CallSink) -> Reading[None]:
    space: list[str] = []
    yield from reader.run(_SPACE, space.append)
    opening = "".join(space)
    if (yield from reader.accept(START)):
        yield from reader.skip_space()
        opening = START
    if (yield from reader.accept("[")):
        yield from _scan_list(reader, sink, opening + "[")
    elif (yield from reader.peek()) == "{":
        yield from llama3.scan_calls(reader, sink, opening)
    else:
        sink.content(opening)
    yield from reader.rest(sink.content)


def _scan_list(reader: Reader, sink: CallSink, opening: str) -> Reading[None]:
    while (yield from read_call(reader, sink, opening, _scan_call)):
        yield from reader.skip_space()
        if not (yield from reader.accept(",")):
            yield from reader.accept("]")
            yield from reader.skip_space()
            yield from reader.skip(END)
            return
        opening = ","


def _scan_call(reader: Reader, sink: CallSink) -> Reading[None]:
    yield from reader.skip_space()
    name = yield from _read_name(reader)
    yield from reader.expect("(")
    sink.check(name)
    yield from reader.skip_space()
    arguments: list[str] = []
    is_last = yield from reader.accept(")")
    while not is_last:
        keyword = yield from _read_name(reader)
        yield from reader.skip_space()
        yield from reader.expect("=")
        yield from reader.skip_space()
        value: list[str] = []
        yield from copy_value(reader, value.append)
        arguments.append(f"{json.dumps(keyword, ensure_ascii=False)}: {''.join(value)}")
        is_last = yield from _read_end(reader)
    sink.start(name)
    sink.arguments(f"{{{', '.join(arguments)}}}")


def _read_name(reader: Reader) -> Reading[str]:
    name: list[str] = []
    yield from reader.run(_NAME, name.append)
    if not any(name):
        raise NotACallError
    return "".join(name)


def _read_end(reader: Reader) -> Reading[bool]:
    """Read what follows an argument. True if it was the last one; a comma may follow that one too."""
    yield from reader.skip_space()
    if (yield from reader.accept(")")):
        return True
    yield from reader.expect(",")
    yield from reader.skip_space()
    return (yield from reader.accept(")"))
