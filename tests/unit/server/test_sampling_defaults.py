"""The sampling defaults of generation_config.json, on every route."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from specray.engine.engine_request import EngineRequest
from specray.errors import ConfigError
from specray.models.tokenizer import sampling_defaults
from specray.sampling_params import SamplingParams
from specray.server.routing.router_pool import RouterPool
from tests.support.scripted_server import Serve, byte_tokenizer, make_serve

DEFAULTS = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.05}
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT,
    "/v1/responses": {"input": "Hi", "max_output_tokens": 2},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 2},
    "/generate": {"text": "Hi", "sampling_params": {"max_new_tokens": 2}},
}


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Servers of a model with defaults."""
    write(tmp_path, **DEFAULTS, eos_token_id=[1, 2], do_sample=True, max_new_tokens=5)
    tokenizer = byte_tokenizer()
    tokenizer.name_or_path = str(tmp_path)
    return make_serve(tokenizer, monkeypatch)


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> list[SamplingParams]:
    """The options of all requests that engines get."""
    seen: list[SamplingParams] = []
    submit = RouterPool.submit

    async def spy(pool: RouterPool, requests: list[EngineRequest], *rest: Any) -> Any:
        seen.extend(request.params for request in requests)
        return await submit(pool, requests, *rest)

    monkeypatch.setattr(RouterPool, "submit", spy)
    return seen


def write(folder: Path, **content: Any) -> None:
    (folder / "generation_config.json").write_text(json.dumps(content))


def post(serve: Serve, route: str, body: dict[str, Any], **options: Any) -> None:
    async def scenario() -> None:
        async with serve(**options) as server:
            reply = await server.http.post(route, json={"model": "toy", **body})
            assert reply.status_code == 200, reply.text
            shown = (await server.http.get("/get_model_info")).json()["preferred_sampling_params"]
            assert shown == ({} if options else DEFAULTS)

    asyncio.run(scenario())


def of(params: SamplingParams) -> dict[str, float]:
    return {name: getattr(params, name) for name in DEFAULTS}


@pytest.mark.parametrize("route", ROUTES)
def test_options_that_a_request_leaves_out_are_the_models(
    route: str, serve: Serve, submitted: list[SamplingParams]
) -> None:
    post(serve, route, ROUTES[route])
    assert of(submitted[-1]) == DEFAULTS
    post(serve, route, ROUTES[route], server={"generation_config": "none"})
    assert of(submitted[-1]) == of(SamplingParams())


def test_options_of_a_request_precede_the_models(serve: Serve, submitted: list[SamplingParams]) -> None:
    post(serve, "/v1/completions", ROUTES["/v1/completions"] | {"temperature": 0, "top_p": None})
    assert of(submitted[-1]) == DEFAULTS | {"temperature": 0}
    each = [{"max_new_tokens": 2, "top_k": 7}, {"max_new_tokens": 2}]
    post(serve, "/generate", {"text": ["a", "b"], "sampling_params": each})
    assert [params.top_k for params in submitted[-2:]] == [7, 20]


def test_values_that_no_request_could_have_are_refused(tmp_path: Path) -> None:
    write(tmp_path, top_p=1.5)
    with pytest.raises(ConfigError, match=r"generation_config.json: top_p=1.5: .*server.generation_config: none"):
        sampling_defaults(tmp_path)
    write(tmp_path, top_p=None, temperature=None)
    assert sampling_defaults(tmp_path) == {}
