"""Speculation options of one request, and the reported capabilities."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from specray.config import SpeculativeConfig
from specray.errors import InvalidRequestError
from specray.server.chat.protocol import ChatRequest
from specray.server.schemas.body import Speculation
from specray.server.speculation import NO_DRAFTING, SpeculationCapabilities
from specray.step import UNLIMITED, DraftLimit
from tests.support.scripted_server import Serve

NGRAM = SpeculativeConfig(algorithm="NGRAM", num_draft_tokens=3)
TREES = SpeculativeConfig(
    algorithm="EAGLE3", draft_model_path="somewhere", num_steps=4, eagle_topk=3, num_draft_tokens=6
)
NO_SPECULATION = SpeculativeConfig()


@pytest.mark.parametrize(
    ("options", "draft_limit"),
    [
        ({}, UNLIMITED),
        ({"enabled": True, "algorithm": "EAGLE3"}, UNLIMITED),
        ({"enabled": False}, NO_DRAFTING),
        ({"num_steps": 4}, DraftLimit(UNLIMITED.num_tokens, 4)),
        ({"num_draft_tokens": 2}, DraftLimit(1, UNLIMITED.num_steps)),
        ({"num_steps": 1, "num_draft_tokens": 6}, DraftLimit(5, 1)),
    ],
)
def test_requested_options_become_a_draft_limit(options: dict[str, Any], draft_limit: DraftLimit) -> None:
    assert SpeculationCapabilities(TREES, 5, "float32", True).draft_limit(Speculation(**options)) == draft_limit


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_steps": 5}, "speculative.num_steps=5 is more than this server drafts; use at most 4"),
        ({"num_draft_tokens": 7}, "speculative.num_draft_tokens=7 is more than this server drafts; use at most 6"),
        ({"algorithm": "NGRAM"}, "speculative.algorithm='NGRAM' is not served here; use 'EAGLE3' or leave it out"),
        ({"enabled": False, "num_steps": 2}, "speculative.num_steps=2 has no effect with enabled=false"),
    ],
)
def test_unsatisfiable_options_are_rejected_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match="speculative") as refused:
        SpeculationCapabilities(TREES, 5, "float32", True).draft_limit(Speculation(**options))
    assert str(refused.value).startswith(message)
    assert refused.value.param == message.split("=")[0]


@pytest.mark.parametrize("options", [{"enabled": True}, {"algorithm": "NGRAM"}, {"num_steps": 1}])
def test_a_server_without_speculation_rejects_options_that_enable_it(options: dict[str, Any]) -> None:
    capabilities = SpeculationCapabilities(NO_SPECULATION, 0, "float32", True)
    with pytest.raises(InvalidRequestError, match="does not speculate"):
        capabilities.draft_limit(Speculation(**options))
    assert capabilities.draft_limit(Speculation(enabled=False)) == NO_DRAFTING
    assert capabilities.draft_limit(None) == UNLIMITED


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hi", "max_tokens": 30, "seed": 5}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 30, "seed": 5}),
        ("/generate", {"text": "hi", "sampling_params": {"max_new_tokens": 30, "sampling_seed": 5}}),
    ],
)
def test_a_draft_limit_changes_the_number_of_drafts_and_not_the_output(
    serve: Serve, path: str, body: dict[str, Any]
) -> None:
    async def scenario() -> None:
        async with serve(speculative=NGRAM.model_dump()) as server:
            replies = []
            for options in (None, {"num_draft_tokens": 2}, {"enabled": False}):
                reply = await server.http.post(path, json=body | {"speculative": options})
                assert reply.status_code == 200, reply.text
                replies.append(reply.json())
            texts = [reply["text"] if "text" in reply else reply["choices"][0] for reply in replies]
            assert texts[0] == texts[1] == texts[2]
            assert [drafts_per_step(reply) for reply in replies] == [2.0, 1.0, 0.0]

    asyncio.run(scenario())


def drafts_per_step(reply: Any) -> float:
    if "meta_info" in reply:
        counts = reply["meta_info"]["spec_draft_token_num"], reply["meta_info"]["spec_verify_ct"]
    else:
        counts = reply["usage"]["speculative"]["draft_tokens"], reply["usage"]["speculative"]["verify_steps"]
    return round(counts[0] / counts[1])


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"num_draft_tokens": 4}, "speculative.num_draft_tokens"),
        ({"num_steps": 0}, "speculative.num_steps"),
        ({"num_step": 1}, "speculative.num_step"),
        ({"algorithm": "EAGLE3"}, "speculative.algorithm"),
        ({"enabled": "no"}, "speculative.enabled"),
        (True, "speculative"),
    ],
)
def test_an_invalid_speculation_option_is_a_400_that_names_it(serve: Serve, options: object, param: str) -> None:
    async def scenario() -> None:
        async with serve(speculative=NGRAM.model_dump()) as server:
            reply = await server.http.post("/v1/completions", json={"prompt": "hi", "speculative": options})
            assert reply.status_code == 400, reply.text
            assert reply.json()["error"]["param"] == param

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("options", "output"),
    [
        ({}, {"greedy": "exact", "sampled": "exact", "one_seed_one_text": True}),
        (
            {"verification": "rejection"},
            {"greedy": "exact", "sampled": "exact in distribution", "one_seed_one_text": False},
        ),
        ({"accept_threshold_acc": 0.9}, {"greedy": "exact", "sampled": "lossy", "one_seed_one_text": False}),
    ],
)
def test_capabilities_report_the_exactness_of_the_output(
    serve: Serve, options: dict[str, Any], output: dict[str, Any]
) -> None:
    async def scenario() -> None:
        async with serve(speculative=NGRAM.model_copy(update=options).model_dump()) as server:
            reply = (await server.http.get("/v1/speculation/capabilities")).json()
            assert (reply["algorithm"], reply["output"]) == ("NGRAM", {"arithmetic": "float32"} | output)
            assert reply["request_limits"] == {
                "enabled": [True, False],
                "algorithm": ["NGRAM"],
                "num_steps": {"min": 1, "max": 2},
                "num_draft_tokens": {"min": 2, "max": 3},
            }
            exact = reply["options"]["exact"]
            assert {"seed", "temperature", "logit_bias", "json_schema"} <= set(exact) <= set(ChatRequest.model_fields)
            assert not set(exact) & set(reply["options"]["refused"])
            assert "lora_path" in reply["options"]["refused"]
            assert "tools" not in reply["options"]["refused"]

    asyncio.run(scenario())


@pytest.mark.parametrize("arithmetic", ["float32", "int8 and bfloat16"])
def test_one_seed_one_text_is_reported_only_where_logits_do_not_depend_on_the_batch(arithmetic: str) -> None:
    """Regression: a bfloat16 server reported it, and two replies with one seed differed after a near-tie."""
    exact = SpeculationCapabilities(NGRAM, 2, arithmetic, True).capabilities()["output"]
    assert exact["one_seed_one_text"] is True
    assert "rounding" not in exact
    rounded = SpeculationCapabilities(NGRAM, 2, arithmetic, False).capabilities()["output"]
    assert rounded["one_seed_one_text"] is False
    assert "float32" in rounded["rounding"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, "old"), ({"default_drafter": "newer"}, "newer"), ({"default_drafter": "copy"}, "old")],
)
def test_an_algorithm_in_a_request_is_not_the_shadow_but_the_default(options: dict[str, Any], expected: str) -> None:
    heads = [{"name": name, "algorithm": "EAGLE3", "draft_model_path": name} for name in ("shadow", "old", "newer")]
    group = {"drafters": [*heads, {"name": "copy", "algorithm": "NGRAM"}], "shadow": {"drafter": "shadow"}, **options}
    capabilities = SpeculationCapabilities(SpeculativeConfig.model_validate(group), 5, "float32", True)
    assert capabilities.drafter(Speculation(algorithm="EAGLE3")) == expected


def test_capabilities_follow_a_replaced_drafter() -> None:
    before, after = (
        SpeculationCapabilities(NGRAM, 2, "float32", True).capabilities(),
        SpeculationCapabilities(NO_SPECULATION, 0, "float32", True).capabilities(),
    )
    assert before["request_limits"]["enabled"] == [True, False]
    assert after["request_limits"] == {"enabled": [False], "algorithm": [], "num_steps": None, "num_draft_tokens": None}


def test_replies_say_why_steps_have_no_drafts(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve(speculative=NGRAM.model_dump()) as server:
            body = {"prompt": "hi", "max_tokens": 9, "ignore_eos": True, "speculative": {"enabled": False}}
            plain = (await server.http.post("/v1/completions", json=body)).json()["usage"]["speculative"]
            assert plain["undrafted_steps"] == {"limit": plain["verify_steps"]} == {"limit": 8}
            text = {"text": "hi", "sampling_params": {"max_new_tokens": 9}, "speculative": {"enabled": False}}
            meta = (await server.http.post("/generate", json=text)).json()["meta_info"]
            assert meta["spec_undrafted_steps"] == {"limit": 8}

    asyncio.run(scenario())


def test_simulated_acceptance_is_marked_in_every_reply_and_metric(serve: Serve) -> None:
    options = {"simulate_accept_length": 2.0, "simulate_output_is_meaningless": True}
    body = {"prompt": "hi", "max_tokens": 9, "stream": True}

    async def scenario() -> None:
        async with serve(speculative=NGRAM.model_copy(update=options).model_dump()) as server:
            lines = (await server.http.post("/v1/completions", json=body)).text.splitlines()
            chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line and "[DONE]" not in line]
            whole = (await server.http.post("/v1/completions", json=body | {"stream": False})).json()
            assert all(sent["simulated_acceptance"] is True for sent in [*chunks, whole])
            assert whole["usage"]["speculative"]["lossy"] is True
            meta = (await server.http.post("/generate", json={"text": "hi"})).json()["meta_info"]
            assert meta["simulated_acceptance"] is True
            reply = (await server.http.get("/v1/speculation/capabilities")).json()
            assert reply["output"]["greedy"] == "meaningless"
            assert 'drafter="SIMULATED NGRAM"' in (await server.http.get("/metrics")).text

    asyncio.run(scenario())


BODIES = {
    "/v1/completions": {"prompt": "ab ab ab ab", "max_tokens": 40, "seed": 5, "ignore_eos": True},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "ab ab ab ab"}],
        "max_tokens": 40,
        "seed": 5,
        "ignore_eos": True,
    },
}


@pytest.mark.parametrize("path", BODIES)
def test_benchmarks_read_the_figures_of_vllm_and_sglang(serve: Serve, path: str) -> None:
    """In a whole reply and behind a stream; the figures agree with each other as AIPerf requires."""
    body = BODIES[path] | {"return_spec_tokens_details": True}

    async def scenario() -> None:
        async with serve(speculative=NGRAM.model_dump()) as server:
            whole = (await server.http.post(path, json=body)).json()
            streaming = body | {"stream": True, "stream_options": {"include_usage": True}}
            chunks = events(await server.http.post(path, json=streaming))
            assert chunks[-1]["metrics"] == whole["metrics"]
            assert chunks[-1]["usage"]["speculative"] == whole["usage"]["speculative"]
            assert chunks[-2] == chunks[-2] | {"choices": [], "sglext": whole["sglext"]}
            assert not any("metrics" in chunk for chunk in chunks[:-1])
            usage, figures = whole["usage"]["speculative"], whole["metrics"]["speculative_decoding"]
            histogram, num_steps = figures["acceptance_histogram"], figures["num_spec_steps"]
            accepted = sum(depth * trees for depth, trees in enumerate(histogram))
            assert (figures["num_accepted_draft_tokens"], figures["num_draft_tokens"]) == (
                usage["accepted_tokens"],
                usage["draft_tokens"],
            )
            assert accepted == usage["accepted_tokens"] > 0
            assert sum(histogram) == num_steps == sum(usage["accept_histogram"])
            assert len(histogram) == figures["num_spec_tokens"] + 1 == 3
            assert figures["mean_acceptance_length"] == 1 + accepted / num_steps
            assert figures["draft_acceptance_rate"] == accepted / usage["draft_tokens"]
            assert whole["sglext"]["spec_tokens_details"] == {
                "spec_accept_rate": accepted / usage["draft_tokens"],
                "spec_accept_length": usage["accept_length"],
                "spec_num_correct_drafts": accepted,
                "spec_num_proposed_drafts": usage["draft_tokens"],
                "spec_verify_ct": usage["verify_steps"],
                "spec_correct_drafts_histogram": usage["accept_histogram"],
            }

    asyncio.run(scenario())


def test_figures_of_several_choices_and_of_a_request_without_drafts(serve: Serve) -> None:
    path, body = "/v1/completions", BODIES["/v1/completions"]

    async def scenario() -> None:
        async with serve(speculative=NGRAM.model_dump()) as server:
            two = (await server.http.post(path, json=body | {"n": 2, "return_spec_tokens_details": True})).json()
            assert "metrics" not in two, "vLLM has none either"
            assert len(two["sglext"]["spec_tokens_details"]) == 2
            assert "sglext" not in (await server.http.post(path, json=body)).json()
            plain = (await server.http.post(path, json=body | {"speculative": {"enabled": False}})).json()
            figures = plain["metrics"]["speculative_decoding"]
            assert (figures["num_spec_steps"], figures["acceptance_histogram"]) == (0, [0, 0, 0])
            assert (figures["mean_acceptance_length"], figures["draft_acceptance_rate"]) == (1.0, 0.0)

    asyncio.run(scenario())


def events(reply: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a stream."""
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]
