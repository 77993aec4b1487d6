"""A compiler that fails ends the request whose grammar it compiles, and not the rank."""

from concurrent.futures import Future
from typing import Any

import pytest

from specray.errors import InvalidRequestError
from specray.grammar import GrammarSpec
from specray.structured_output.matchers import COMPILER_FAILED, GrammarTable, SlotGrammar


class PanicError(BaseException):
    """As pyo3 raises it when Rust code fails."""


@pytest.mark.parametrize("error", [RuntimeError("a bug"), PanicError("index out of bounds"), MemoryError()])
def test_a_compiler_that_fails_ends_its_request(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    assert _result_of(error) == COMPILER_FAILED
    assert [record.exc_info[1] for record in caplog.records if record.exc_info] == [error]


def test_a_wrong_grammar_ends_its_request_with_what_is_wrong(caplog: pytest.LogCaptureFixture) -> None:
    assert _result_of(InvalidRequestError("the regex is wrong", "grammar")) == "the regex is wrong"
    assert not caplog.records


def _result_of(error: BaseException) -> str | None:
    compiled: Future[Any] = Future()
    compiled.set_exception(error)
    table = GrammarTable(lambda: pytest.fail("nothing is compiled"))
    table.slots[3] = SlotGrammar(GrammarSpec("regex", "a"), compiled, [])
    result = table._unready(3)
    assert result is not None
    return result.error
