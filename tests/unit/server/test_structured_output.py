"""Requests with a grammar over HTTP: checked before they are queued, and passed to the ranks."""

import asyncio
from typing import Any

import pytest

from specray.errors import InvalidRequestError
from specray.grammar import REQUEST_ERRORS, GrammarSpec, make_grammar
from specray.server.grammar_check import GrammarCheck
from specray.step import StepPlan, StepResult
from tests.support.scripted_server import Serve

REGEX = make_grammar("regex", "[a-z]+")
BODIES: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "hi"}], "structured_outputs": {"regex": REGEX.text}},
    ),
    ("/v1/completions", {"prompt": "hi", "guided_regex": REGEX.text}),
    ("/generate", {"text": "hi", "sampling_params": {"regex": REGEX.text}}),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_the_grammar_reaches_the_ranks(
    path: str, body: dict[str, Any], serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[tuple[GrammarSpec, list[str]]] = []

    async def check(_: GrammarCheck, spec: GrammarSpec, tenant: str, command: list[str]) -> None:  # noqa: ARG001
        checked.append((spec, command))

    monkeypatch.setattr(GrammarCheck, "check", check)

    async def scenario() -> None:
        async with serve() as server:
            planned: list[GrammarSpec | None] = []
            submit = server.ranks.submit

            def recorded(plan: StepPlan) -> None:
                planned.extend(new.sampling.grammar for new in plan.new_requests)
                submit(plan)

            server.ranks.submit = recorded  # type: ignore[method-assign]
            reply = await server.http.post(path, json=body)
            assert reply.status_code == 200, reply.text
            assert "x-specray-ignored-fields" not in reply.headers
            assert REGEX in planned

    asyncio.run(scenario())
    [(spec, command)] = checked
    assert spec == REGEX
    assert command[-2:] == ["257", "256"]  # the width of the logits, and the end token


def test_a_grammar_that_cannot_be_compiled_is_a_400(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(*_: object) -> None:
        raise InvalidRequestError("the regex cannot be compiled: it is wrong", "grammar")

    monkeypatch.setattr(GrammarCheck, "check", check)

    async def scenario() -> None:
        async with serve() as server:
            for path, body in BODIES:
                reply = await server.http.post(path, json=body)
                assert reply.status_code == 400
                assert reply.json()["error"]["param"] == "grammar"
            reply = await server.http.post("/v1/completions", json={"prompt": "hi", "regex": "a", "ebnf": "b"})
            assert reply.json()["error"]["message"] == "regex and ebnf both name a grammar; send one of them"

    asyncio.run(scenario())


@pytest.mark.parametrize("error", REQUEST_ERRORS)
def test_a_request_that_leaves_no_token_is_a_400(error: str, serve: Serve) -> None:
    """It is found while generating, and no fault of the engine."""

    async def scenario() -> None:
        async with serve() as server:
            collect = server.ranks.collect

            def dead_end() -> StepResult:
                result = collect()
                rows = [row._replace(token_ids=[], error=error) for row in result.rows]
                return result._replace(rows=rows)

            server.ranks.collect = dead_end  # type: ignore[method-assign]
            reply = await server.http.post("/v1/completions", json={"prompt": "hi"})
            assert reply.status_code == 400
            assert reply.json()["error"].items() >= {"message": error, "param": REQUEST_ERRORS[error]}.items()

    asyncio.run(scenario())
