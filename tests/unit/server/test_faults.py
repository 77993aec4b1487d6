"""Faults that a handler does not expect end its request with a 500, and nothing else."""

import asyncio
import json
from unittest.mock import AsyncMock, Mock

import pytest
from starlette.types import Message

from specray.server.middleware import CatchErrors

POST = {"type": "http", "method": "POST", "path": "/", "headers": []}


class PanicException(BaseException):
    """As pyo3 raises it for a panic of a Rust library."""


@pytest.mark.parametrize("fault", [PanicException("called `Option::unwrap()` on a `None` value"), RuntimeError()])
def test_a_fault_of_a_library_is_a_500_of_its_request_alone(fault: BaseException) -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(CatchErrors(AsyncMock(side_effect=fault))(POST, Mock(), send))
    assert sent[0]["status"] == 500
    assert json.loads(sent[1]["body"])["error"]["type"] == "server_error"


def test_the_end_of_the_process_is_no_fault_of_a_request() -> None:
    with pytest.raises(SystemExit):
        asyncio.run(CatchErrors(AsyncMock(side_effect=SystemExit(0)))(POST, Mock(), Mock()))
