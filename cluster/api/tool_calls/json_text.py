"""Reading JSON values from a `Reader` without parsing them: their text passes through as the model wrote it."""

import json
import re

from cluster.api.model_output.reader import Emit, NotACallError, Reader, Reading

_STRING_PART = re.compile(r'[^"\\]*')
_NESTED_PART = re.compile(r'[^"{}\[\]]*')
_SCALAR = re.compile(r"[-+.\w]*")
_CLOSES = {"{": "}", "[": "]"}


def copy_value(reader: Reader, emit: Emit) -> Reading[None]:
    """Emit one value. NotACallError if brackets do not match or the text ends inside."""
    first = yield from reader.peek()
    if first == '"':
        yield from copy_string(reader, emit)
    elif first in _CLOSES:
        yield from _copy_nested(reader, emit)
    else:
        yield from _copy_scalar(reader, emit)


def copy_string(reader: Reader, emit: Emit) -> Reading[None]:
    """Emit one string with its quotes."""
    yield from reader.expect('"')
    emit('"')
    while True:
        yield from reader.run(_STRING_PART, emit)
        if (yield from reader.accept('"')):
            emit('"')
            return
        pair = yield from reader.peek(2)  # a backslash and the character that it escapes
        if len(pair) < 2:
            raise NotACallError
        yield from reader.expect(pair)
        emit(pair)


def read_string(reader: Reader) -> Reading[str]:
    """The value of one string."""
    parts: list[str] = []
    yield from copy_string(reader, parts.append)
    try:
        value: str = json.loads("".join(parts), strict=False)
        value.encode()  # an escape can name half of a character
    except ValueError:
        raise NotACallError from None
    return value


def _copy_nested(reader: Reader, emit: Emit) -> Reading[None]:
    """Emit an object or array up to the bracket that closes it."""
    awaited: list[str] = []
    while True:
        yield from reader.run(_NESTED_PART, emit)
        char = yield from reader.peek()
        if char == '"':
            yield from copy_string(reader, emit)
            continue
        if char in _CLOSES:
            awaited.append(_CLOSES[char])
        elif not awaited or awaited.pop() != char:  # also at the end of the text
            raise NotACallError
        yield from reader.expect(char)
        emit(char)
        if not awaited:
            return


def _copy_scalar(reader: Reader, emit: Emit) -> Reading[None]:
    parts: list[str] = []
    yield from reader.run(_SCALAR, parts.append)
    if not any(parts):
        raise NotACallError
    emit("".join(parts))
