"""Prompts that are scored, echoed and truncated, and choices that are ranked, through the HTTP API."""

import asyncio
import json
from operator import itemgetter
from typing import Any

import pytest

from specray.sampling_params import MAX_BANNED_LENGTH
from tests.support.scripted_server import Serve, Server, byte_tokenizer

PROMPT = "Hello, prompt"
MESSAGES = [{"role": "user", "content": PROMPT}]
SCORE = -0.5  # of every token, see ScriptedRanks


def ids(text: str) -> list[int]:
    token_ids: list[int] = byte_tokenizer().encode(text)
    return token_ids


async def post(server: Server, path: str, body: dict[str, Any]) -> Any:
    response = await server.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def streamed(server: Server, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = await server.http.post(path, json=body | {"stream": True})
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_loglikelihood_requests_of_lm_eval_are_answered(serve: Serve) -> None:
    """Its local-completions model sends token ids of several prompts and sums the log probabilities of each ending."""

    async def run() -> None:
        async with serve() as server:
            prompts = [ids("The sky is blue"), ids("Fire")]
            body = {"prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
            reply = await post(server, "/v1/completions", body)
        choices = sorted(reply["choices"], key=itemgetter("index"))
        for prompt, choice, num_context in zip(prompts, choices, (10, 2), strict=True):
            scored = choice["logprobs"]
            assert [len(scored[key]) for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset")] == (
                [len(prompt) + 1] * 4
            )
            assert (scored["token_logprobs"][0], scored["top_logprobs"][0]) == (None, None)
            assert sum(scored["token_logprobs"][num_context:-1]) == SCORE * (len(prompt) - num_context)
            for value, top in zip(scored["token_logprobs"][1:], scored["top_logprobs"][1:], strict=True):
                assert value == max(top.values())
            assert "".join(scored["tokens"]) == choice["text"]
            assert choice["text"][scored["text_offset"][-1] :] == scored["tokens"][-1]

    asyncio.run(run())


@pytest.mark.parametrize("max_tokens", [0, 1, 7])
@pytest.mark.parametrize("logprobs", [None, 0, 2])
@pytest.mark.parametrize("prompt", [PROMPT, ids(PROMPT), [PROMPT, "B"]])
def test_an_echoed_stream_equals_the_complete_reply(
    serve: Serve, max_tokens: int, logprobs: int | None, prompt: Any
) -> None:
    body = {"prompt": prompt, "echo": True, "logprobs": logprobs, "max_tokens": max_tokens, "n": 2, "seed": 3}

    async def run() -> None:
        async with serve() as server:
            whole = await post(server, "/v1/completions", body)
            chunks = await streamed(server, "/v1/completions", body)
        for choice in whole["choices"]:
            parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
            assert "".join(part["text"] for part in parts) == choice["text"]
            assert choice["text"].startswith(PROMPT if choice["index"] < 2 else "B")
            scored = [part["logprobs"] for part in parts if part["logprobs"]]
            for key in choice["logprobs"] or {}:
                assert [item for part in scored for item in part[key]] == choice["logprobs"][key]
            assert bool(scored) == (logprobs is not None)
        assert whole["usage"]["completion_tokens"] == max_tokens * len(whole["choices"])

    asyncio.run(run())


def test_offsets_count_the_characters_of_the_text_also_where_tokens_are_parts_of_characters(serve: Serve) -> None:
    body = {"prompt": "é!", "max_tokens": 30, "logprobs": 0, "seed": 3}

    async def run() -> None:
        async with serve() as server:
            for echo in (False, True):
                [whole] = (await post(server, "/v1/completions", body | {"echo": echo}))["choices"]
                text, logprobs = whole["text"], whole["logprobs"]
                assert any(token == "\ufffd" for token in logprobs["tokens"])
                for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
                    assert text.startswith(token, offset) or token == "\ufffd"
                chunks = await streamed(server, "/v1/completions", body | {"echo": echo})
                scored = [chunk["choices"][0]["logprobs"] for chunk in chunks]
                assert [at for part in scored if part for at in part["text_offset"]] == logprobs["text_offset"]

    asyncio.run(run())


def test_an_echoed_prompt_is_the_text_that_was_sent(serve: Serve) -> None:
    async def run() -> None:
        async with serve() as server:
            for prompt, text in (("hi", "hi"), ([*ids("hi"), server.ranks.tokenizer.eos_token_id], "hi<|end|>")):
                reply = await post(server, "/v1/completions", {"prompt": prompt, "echo": True, "max_tokens": 0})
                assert reply["choices"][0]["text"] == text

    asyncio.run(run())


@pytest.mark.parametrize(("side", "kept"), [(None, "prompt"), ("left", "prompt"), ("right", "Hello,")])
def test_a_prompt_is_cut_at_the_side_that_is_asked_for(serve: Serve, side: str | None, kept: str) -> None:
    body = {"echo": True, "max_tokens": 0, "truncate_prompt_tokens": 6, "truncation_side": side}

    async def run() -> None:
        async with serve() as server:
            for prompt in (PROMPT, ids(PROMPT)):
                reply = await post(server, "/v1/completions", body | {"prompt": prompt})
                assert reply["choices"][0]["text"] == kept

    asyncio.run(run())


def test_truncation_to_minus_one_keeps_what_fits_beside_the_output(serve: Serve) -> None:
    async def run() -> None:
        async with serve() as server:
            body = {"prompt": ids("x" * 600), "max_tokens": 12, "truncate_prompt_tokens": -1}
            assert (await post(server, "/v1/completions", body))["usage"]["prompt_tokens"] == 500
            chat = {"messages": [{"role": "user", "content": "x" * 600}], "max_tokens": 12}
            reply = await post(server, "/v1/chat/completions", chat | {"truncate_prompt_tokens": -1})
            assert reply["usage"]["prompt_tokens"] == 500

    asyncio.run(run())


def test_token_ids_of_prompt_and_output_are_returned_in_vllms_places(serve: Serve) -> None:
    own = {"max_tokens": 30, "return_token_ids": True, "seed": 3}

    async def run() -> None:
        async with serve() as server:
            output = server.ranks.script[:30]
            body = {"prompt": ["ab", "c"], "n": 2} | own
            whole = await post(server, "/v1/completions", body)
            assert [choice["prompt_token_ids"] for choice in whole["choices"]] == [ids("ab")] * 2 + [ids("c")] * 2
            assert all(choice["token_ids"] == output for choice in whole["choices"])
            chunks = await streamed(server, "/v1/completions", body)
            for choice in whole["choices"]:
                parts = [part for c in chunks for part in c["choices"] if part["index"] == choice["index"]]
                assert [t for part in parts for t in part.get("token_ids", [])] == output
                assert [part["prompt_token_ids"] for part in parts if "prompt_token_ids" in part] == [
                    choice["prompt_token_ids"]
                ]
            chat = {"messages": [{"role": "user", "content": "hi"}]} | own
            reply = await post(server, "/v1/chat/completions", chat)
            assert reply["choices"][0]["token_ids"] == output
            assert len(reply["prompt_token_ids"]) == reply["usage"]["prompt_tokens"]
            first, *others = await streamed(server, "/v1/chat/completions", chat)
            assert first["prompt_token_ids"] == reply["prompt_token_ids"]
            assert [t for c in others for t in c["choices"][0].get("token_ids", [])] == output

    asyncio.run(run())


def test_tokens_of_logprobs_can_be_shown_as_their_ids(serve: Serve) -> None:
    own = {"max_tokens": 2, "return_tokens_as_token_ids": True}

    async def run() -> None:
        async with serve() as server:
            shown = [f"token_id:{token_id}" for token_id in server.ranks.script[:2]]
            reply = await post(server, "/v1/completions", {"prompt": "a", "logprobs": 1} | own)
            assert reply["choices"][0]["logprobs"]["tokens"] == shown
            chat = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True} | own
            reply = await post(server, "/v1/chat/completions", chat)
            assert [entry["token"] for entry in reply["choices"][0]["logprobs"]["content"]] == shown

    asyncio.run(run())


def test_prompts_are_scored_in_vllms_form(serve: Serve) -> None:
    async def run() -> None:
        async with serve() as server:
            body = {"prompt": "abc", "max_tokens": 2, "prompt_logprobs": 1}
            [choice] = (await post(server, "/v1/completions", body))["choices"]
            b = ids("b")[0]
            assert choice["logprobs"] is None
            assert [entry and list(entry) for entry in choice["prompt_logprobs"]] == [
                None,
                [str(b)],
                [str(ids("c")[0])],
            ]
            assert choice["prompt_logprobs"][1][str(b)] == {"logprob": SCORE, "rank": 1, "decoded_token": "b"}
            chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "prompt_logprobs": 0}
            reply = await post(server, "/v1/chat/completions", chat)
            assert len(reply["prompt_logprobs"]) == reply["usage"]["prompt_tokens"]
            assert next(iter(reply["prompt_logprobs"][1].values()))["rank"] is None
            refused = await server.http.post("/v1/chat/completions", json=chat | {"stream": True})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_logprobs")

    asyncio.run(run())


def test_continuous_usage_is_part_of_every_chunk(serve: Serve) -> None:
    async def run() -> None:
        async with serve() as server:
            body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
            without = {"stream_options": {"include_usage": False, "continuous_usage_stats": True}}
            assert not any("usage" in c for c in await streamed(server, "/v1/chat/completions", body | without))
            options = {"include_usage": True, "continuous_usage_stats": True}
            chunks = await streamed(server, "/v1/chat/completions", body | {"stream_options": options})
            counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
            assert counts == sorted(counts)
            assert (counts[0], counts[-1]) == (0, 9)
            assert len(set(counts)) >= 3

    asyncio.run(run())


def test_log_probabilities_of_given_tokens_are_reported(serve: Serve) -> None:
    async def run() -> None:
        async with serve() as server:
            own = {"max_tokens": 2, "logprob_token_ids": [5, 6]}
            [choice] = (await post(server, "/v1/completions", {"prompt": "a", "logprobs": 0} | own))["choices"]
            assert [len(top) for top in choice["logprobs"]["top_logprobs"]] == [3, 3]
            chat = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True} | own
            [choice] = (await post(server, "/v1/chat/completions", chat))["choices"]
            assert [[t["logprob"] for t in e["top_logprobs"]] for e in choice["logprobs"]["content"]] == [
                [-2.0, -2.0]
            ] * 2
            body = {
                "text": ["a", "b"],
                "sampling_params": {"max_new_tokens": 2},
                "return_logprob": True,
                "token_ids_logprob": [[5], [6, 7]],
            }
            metas = [reply["meta_info"] for reply in await post(server, "/generate", body)]
            chosen = [[[token for _, token, _ in at] for at in meta["output_token_ids_logprobs"]] for meta in metas]
            assert chosen == [[[5]] * 2, [[6, 7]] * 2]

    asyncio.run(run())


def test_bad_words_reach_the_engine_as_tokens(serve: Serve) -> None:
    async def run() -> None:
        async with serve() as server:
            await post(server, "/v1/completions", {"prompt": "a", "max_tokens": 2, "bad_words": ["ab", " c"]})
            [row] = [row for row in server.ranks._rows.values() if row.sampling.banned_sequences]
            assert row.sampling.banned_sequences == [ids("ab"), ids(" ab"), ids("c"), ids(" c")]

    asyncio.run(run())


def test_bad_words_of_too_many_tokens_are_a_400_that_names_them(serve: Serve) -> None:
    """The schema bounds characters; how many tokens they are is known after tokenizing only."""

    async def run() -> None:
        async with serve() as server:
            for path, prompt in (("completions", {"prompt": "a"}), ("chat/completions", {"messages": MESSAGES})):
                for length, status in ((MAX_BANNED_LENGTH - 1, 200), (MAX_BANNED_LENGTH, 400)):  # and a space before it
                    body = prompt | {"max_tokens": 2, "bad_words": ["ab", "x" * length]}
                    response = await server.http.post(f"/v1/{path}", json=body)
                    assert response.status_code == status, response.text
                error = response.json()["error"]
                assert error["param"] == "bad_words"
                assert f"{MAX_BANNED_LENGTH + 1} tokens" in error["message"]

    asyncio.run(run())


def test_best_of_returns_the_most_probable_choices_first(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with serve() as server:
            body = {"prompt": ["A", "B"], "n": 2, "best_of": 4, "max_tokens": 6, "seed": 1}
            everything = await post(server, "/v1/completions", body | {"n": 4, "best_of": None, "logprobs": 0})
            monkeypatch.setattr("specray.server.completions.replies._mean_logprob", lambda choice: choice.index % 3)
            reply = await post(server, "/v1/completions", body)
        assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
        seeds = [choice["seed"] for choice in everything["choices"]]
        assert [choice["seed"] for choice in reply["choices"]] == [seeds[2], seeds[1], seeds[5], seeds[4]]
        assert [choice["logprobs"] for choice in reply["choices"]] == [None] * 4
        assert reply["usage"]["completion_tokens"] == 8 * 6

    asyncio.run(run())


def test_generate_scores_prompts_from_the_given_position(serve: Serve) -> None:
    async def run() -> None:
        async with serve() as server:
            body = {
                "input_ids": [ids("abcdef"), ids("xyz")],
                "sampling_params": [{"max_new_tokens": 0}, {"max_new_tokens": 3}],
                "return_logprob": True,
                "top_logprobs_num": 1,
                "logprob_start_len": [2, -1],
                "return_text_in_logprobs": False,
                "rid": ["one", "two"],
            }
            scored, generated = await post(server, "/generate", body)
            chunks = await streamed(server, "/generate", body)
        meta = scored["meta_info"]
        first, *others = [entry[:2] for entry in meta["input_token_logprobs"]]
        assert first == [None, ids("c")[0]]
        assert others == [[SCORE, token] for token in ids("def")]
        assert meta["input_top_logprobs"] == [None, *[[[SCORE, token, None]] for token in ids("def")]]
        assert (scored["text"], scored["output_ids"], meta["completion_tokens"]) == ("", [], 0)
        assert meta["finish_reason"] == {"type": "length", "length": 0}
        assert generated["meta_info"]["input_token_logprobs"] == generated["meta_info"]["input_top_logprobs"] == []
        assert len(generated["meta_info"]["output_token_logprobs"]) == 3
        assert [reply["meta_info"]["id"] for reply in (scored, generated)] == ["one", "two"]
        last = {chunk["index"]: chunk for chunk in chunks}
        for index, reply in enumerate((scored, generated)):
            for reply_part in (last[index], reply):
                del reply_part["meta_info"]["e2e_latency"], reply_part["meta_info"]["seed"]
            assert last[index] == {**reply, "index": index}

    asyncio.run(run())


def test_only_the_last_tokens_of_a_truncated_prompt_are_used(serve: Serve) -> None:
    async def run() -> None:
        async with serve() as server:
            body = {"prompt": PROMPT, "truncate_prompt_tokens": 6, "echo": True, "max_tokens": 1}
            reply = await post(server, "/v1/completions", body)
            message = {"role": "user", "content": PROMPT}
            chat = {"messages": [message], "truncate_prompt_tokens": 2, "max_tokens": 1}
            assert (await post(server, "/v1/chat/completions", chat))["usage"]["prompt_tokens"] == 2
        assert reply["choices"][0]["text"].startswith("prompt")
        assert reply["usage"]["prompt_tokens"] == 6

    asyncio.run(run())
