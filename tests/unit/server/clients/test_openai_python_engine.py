"""The openai package against a server with a real engine, whose text depends on what is asked for.

The model is random, so its text means nothing, but the options' effect on it is exact: the same seed gives the same
text, a bias decides a token, a grammar holds. `test_openai_python` has the shapes of all replies.
"""

import json
import math
from collections import Counter
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from tests.support.scripted_server import byte_tokenizer
from tests.support.toy import oracle_greedy
from tests.unit.server.clients.conftest import Toy
from tests.unit.server.clients.sdk import KINDS, Ask, Clients, Json, content, first, generated, texts

TOKENIZER = byte_tokenizer()
CHAT: Json = {"model": "toy", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 24}
GREEDY: Json = CHAT | {"temperature": 0}
TEXTS: Json = {"model": "toy", "prompt": "once upon a time", "max_tokens": 24}
RESPONSE: Json = {"model": "toy", "input": "Hi", "max_output_tokens": 24}
MAX_TOKENS = 24
LETTER_A = TOKENIZER.encode("a")[0]
LETTER_B = TOKENIZER.encode("b")[0]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "enum": [1, 2]}},
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {"name": "stop_now", "parameters": {"type": "object", "properties": {}}},
    },
]
NAMED: Json = {"type": "function", "function": {"name": "get_weather"}}


class Weather(BaseModel):
    """A model with bounds, so that a random model ends it."""

    city: Literal["Paris", "Rome"]
    degrees: int = Field(ge=-9, le=9)
    is_sunny: bool
    wind: Literal["calm", "strong"] | None = None


def seeded(text: Any) -> Json:
    return {"seed": 7, "temperature": 0.9, **text}


# Seeds: one seed, one text


def test_one_seed_gives_one_text_in_every_form(ask: Ask, toy_server: Toy) -> None:
    body = seeded(CHAT)
    other = Ask(toy_server.clients, "async" if ask.kind == "sync" else "sync")
    forms = [ask.chat(**body), ask.chat(**body, stream=True), other.chat(**body), other.chat(**body, stream=True)]
    assert len(set(texts(forms))) == 1
    assert len(content(forms[0])) > 0


def test_another_seed_gives_another_text(ask: Ask) -> None:
    assert len({content(ask.chat(**seeded(CHAT) | {"seed": seed})) for seed in range(4)}) == 4


def test_the_seed_of_a_reply_repeats_it(ask: Ask) -> None:
    drawn = ask.chat(**CHAT, temperature=1)
    assert content(ask.chat(**CHAT, temperature=1, seed=drawn.seed)) == content(drawn)


def test_the_seed_of_a_choice_repeats_it_alone(ask: Ask) -> None:
    several = ask.chat(**seeded(CHAT), n=3)
    for choice in several.choices:
        alone = ask.chat(**seeded(CHAT) | {"seed": choice.seed})
        assert content(alone) == choice.message.content


def test_choices_differ(ask: Ask) -> None:
    assert len({choice.text for choice in ask.text(**seeded(TEXTS), n=4).choices}) == 4


def test_a_batch_gives_the_texts_that_its_prompts_give_alone(ask: Ask) -> None:
    prompts = ["ab", "abc", "a long prompt of several words", "ab"]
    together = ask.text(**seeded(TEXTS) | {"prompt": prompts})
    alone = [ask.text(**seeded(TEXTS) | {"prompt": prompt}) for prompt in prompts]
    assert [choice.text for choice in together.choices] == texts(alone)


@pytest.mark.parametrize("options", [{"enabled": False}, {"num_draft_tokens": 2}, {"num_steps": 1}])
def test_drafts_do_not_change_the_text(ask: Ask, options: Json) -> None:
    plain = ask.chat(**seeded(CHAT), extra_body={"speculative": options})
    assert content(plain) == content(ask.chat(**seeded(CHAT)))


def test_a_prediction_changes_the_speed_and_not_the_text(ask: Ask) -> None:
    body = GREEDY | {"max_tokens": 60, "extra_body": {"cache_salt": "p"}}
    plain = ask.chat(**body)
    predicted = ask.chat(**body, prediction={"type": "content", "content": content(plain)})
    assert content(predicted) == content(plain)
    wrong = ask.chat(**body, prediction={"type": "content", "content": "nothing like it"})
    assert content(wrong) == content(plain)


# What is generated


def test_greedy_text_is_the_models_own(ask: Ask, toy_server: Toy) -> None:
    prompt = TOKENIZER.encode("once upon a time")
    expected = oracle_greedy(toy_server.folder, prompt, 12)
    body = TEXTS | {"temperature": 0, "max_tokens": 12, "logprobs": 0}
    assert generated(ask.text(**body)) == generated(ask.text(**body | {"prompt": prompt}))
    assert content(ask.text(**body)) == TOKENIZER.decode(expected)


def test_text_and_its_token_ids_are_one_prompt(ask: Ask) -> None:
    ids = TOKENIZER.encode(TEXTS["prompt"])
    assert content(ask.text(**seeded(TEXTS))) == content(ask.text(**seeded(TEXTS) | {"prompt": ids}))


def test_a_chat_is_the_completion_of_its_template(ask: Ask) -> None:
    chat = ask.chat(**seeded(CHAT))
    plain = ask.text(**seeded(TEXTS) | {"prompt": "user: Hi\nassistant: "})
    assert content(chat) == content(plain)
    assert chat.usage.prompt_tokens == plain.usage.prompt_tokens


def test_a_response_is_the_chat_of_its_input(ask: Ask) -> None:
    whole = ask.response(**RESPONSE, temperature=0.9, extra_body={"seed": 7})
    assert whole.output_text == content(ask.chat(**seeded(CHAT)))
    assert content(ask.response(**RESPONSE, temperature=0.9, extra_body={"seed": 7}, stream=True)) == whole.output_text


def test_developers_are_systems(ask: Ask) -> None:
    asked = [
        ask.chat(**seeded(CHAT) | {"messages": [{"role": role, "content": "Be brief."}, *CHAT["messages"]]})
        for role in ("system", "developer")
    ]
    assert content(asked[0]) == content(asked[1]) != content(ask.chat(**seeded(CHAT)))


def test_parts_are_joined(ask: Ask) -> None:
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    joined = ask.chat(**seeded(CHAT) | {"messages": [{"role": "user", "content": parts}]})
    assert content(joined) == content(ask.chat(**seeded(CHAT)))


@pytest.mark.parametrize("bias", [100, 60.5])
def test_a_bias_decides(ask: Ask, bias: float) -> None:
    assert content(ask.chat(**CHAT, logit_bias={str(LETTER_A): bias})) == "a" * MAX_TOKENS


def test_a_banned_token_is_not_generated(ask: Ask) -> None:
    options: Json = {"extra_body": {"allowed_token_ids": [LETTER_A, LETTER_B]}}
    assert content(ask.chat(**seeded(CHAT), **options, logit_bias={str(LETTER_A): -100})) == "b" * MAX_TOKENS


def test_only_allowed_tokens_are_generated(ask: Ask) -> None:
    reply = ask.chat(**seeded(CHAT), extra_body={"allowed_token_ids": [LETTER_A, LETTER_B]})
    assert set(content(reply)) <= {"a", "b"}
    assert len(content(reply)) == MAX_TOKENS


def test_a_frequency_penalty_ends_repetition(ask: Ask) -> None:
    options: Json = {"extra_body": {"allowed_token_ids": [LETTER_A, LETTER_B]}, "logit_bias": {str(LETTER_A): 5}}
    free = Counter(content(ask.chat(**GREEDY, **options)))
    penalised = Counter(content(ask.chat(**GREEDY, **options, frequency_penalty=2)))
    assert abs(penalised["a"] - penalised["b"]) < abs(free["a"] - free["b"])


def test_a_presence_penalty_applies_once(ask: Ask) -> None:
    options: Json = {"extra_body": {"allowed_token_ids": [LETTER_A, LETTER_B]}, "logit_bias": {str(LETTER_A): 40}}
    assert content(ask.chat(**GREEDY, **options, presence_penalty=2)) == "a" * MAX_TOKENS


def test_top_k_of_one_is_greedy(ask: Ask) -> None:
    assert content(ask.chat(**seeded(CHAT), extra_body={"top_k": 1})) == content(ask.chat(**GREEDY))


def test_a_tiny_top_p_is_greedy(ask: Ask) -> None:
    assert content(ask.chat(**seeded(CHAT), top_p=1e-6)) == content(ask.chat(**GREEDY))


def test_a_min_p_of_one_is_greedy(ask: Ask) -> None:
    assert content(ask.chat(**seeded(CHAT), extra_body={"min_p": 1.0})) == content(ask.chat(**GREEDY))


def test_text_ends_before_a_stop_string(ask: Ask) -> None:
    options: Json = {"extra_body": {"allowed_token_ids": [LETTER_A, LETTER_B]}}
    whole = content(ask.chat(**seeded(CHAT), **options))
    stop = whole[10:12]
    cut = ask.chat(**seeded(CHAT), **options, stop=[stop, "never"])
    assert content(cut) == whole[: whole.index(stop)]
    assert (first(cut).finish_reason, first(cut).stop_reason) == ("stop", stop)


def test_a_stop_string_is_kept_if_it_is_asked_for(ask: Ask) -> None:
    options: Json = {"allowed_token_ids": [LETTER_A]}
    reply = ask.chat(**CHAT, stop="aaa", extra_body=options | {"include_stop_str_in_output": True})
    assert content(reply) == "aaa"


def test_min_tokens_holds_back_the_end(ask: Ask) -> None:
    end = {str(TOKENIZER.eos_token_id): 100}
    assert ask.chat(**CHAT, logit_bias=end).usage.completion_tokens == 1
    assert ask.chat(**CHAT, logit_bias=end, extra_body={"min_tokens": 6}).usage.completion_tokens == 7
    assert first(ask.chat(**CHAT, logit_bias=end)).finish_reason == "stop"


def test_an_ignored_end_token_does_not_end(ask: Ask) -> None:
    end = {str(TOKENIZER.eos_token_id): 100}
    reply = ask.chat(**CHAT, logit_bias=end, extra_body={"ignore_eos": True})
    assert (reply.usage.completion_tokens, first(reply).finish_reason, content(reply)) == (MAX_TOKENS, "length", "")


def test_special_tokens_are_shown_if_they_are_asked_for(ask: Ask) -> None:
    end = {str(TOKENIZER.eos_token_id): 100}
    options = {"ignore_eos": True, "skip_special_tokens": False}
    assert content(ask.chat(**CHAT | {"max_tokens": 2}, logit_bias=end, extra_body=options)) == "<|end|>" * 2


# Log probabilities


def test_the_first_of_the_top_tokens_is_the_greedy_one(ask: Ask) -> None:
    for entry in first(ask.chat(**GREEDY, logprobs=True, top_logprobs=3)).logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == entry.top_logprobs[0].logprob == max(top.logprob for top in entry.top_logprobs)


def test_log_probabilities_add_up_to_one(ask: Ask) -> None:
    """Of 257 tokens the first 20 hold most of the mass, and never more than all of it."""
    for entry in first(ask.chat(**GREEDY, logprobs=True, top_logprobs=20)).logprobs.content:
        mass = sum(math.exp(top.logprob) for top in entry.top_logprobs)
        assert 0.3 < mass <= 1 + 1e-5


def test_log_probabilities_are_the_models_whatever_the_temperature(ask: Ask) -> None:
    hot, cold = (
        ask.text(**TEXTS | {"max_tokens": 1}, logprobs=20, temperature=t, seed=3).choices[0].logprobs for t in (1.5, 0)
    )
    shared = hot.top_logprobs[0].keys() & cold.top_logprobs[0].keys()
    assert len(shared) >= 10  # bytes that are no characters share a text
    for token in shared:
        assert hot.top_logprobs[0][token] == pytest.approx(cold.top_logprobs[0][token], abs=1e-5)


def test_tokens_of_a_stream_and_of_a_reply_have_equal_log_probabilities(ask: Ask) -> None:
    body = seeded(CHAT) | {"logprobs": True, "top_logprobs": 1}
    parts = [c.logprobs.content for chunk in ask.chat(**body, stream=True) for c in chunk.choices if c.logprobs]
    assert [entry for part in parts for entry in part] == first(ask.chat(**body)).logprobs.content


def test_an_echoed_prompt_is_scored_as_it_would_be_generated(ask: Ask) -> None:
    body = {"model": "toy", "temperature": 0, "logprobs": 0}
    written = ask.text(**body, prompt="once upon", max_tokens=6, extra_body={"allowed_token_ids": [LETTER_A]})
    scored = ask.text(**body, prompt="once upon" + content(written), max_tokens=0, echo=True)
    assert first(scored).logprobs.token_logprobs[0] is None
    assert len(first(scored).logprobs.tokens) == len("once upon") + 6
    assert first(scored).logprobs.token_logprobs[-6:] == pytest.approx(first(written).logprobs.token_logprobs, abs=1e-4)


def test_an_echo_repeats_the_prompt(ask: Ask) -> None:
    for stream in (False, True):
        reply = ask.text(**seeded(TEXTS), echo=True, stream=stream)
        assert content(reply) == TEXTS["prompt"] + content(ask.text(**seeded(TEXTS)))


def test_best_of_returns_the_most_probable_choice(ask: Ask) -> None:
    body = seeded(TEXTS) | {"logprobs": 0, "extra_body": {"ignore_eos": True}}
    every = ask.text(**body, n=4).choices
    best = first(ask.text(**body, n=1, best_of=4))
    assert best.text == max(every, key=lambda choice: sum(choice.logprobs.token_logprobs)).text


# Structured output


def test_a_json_object_is_one(ask: Ask) -> None:
    close = {str(TOKENIZER.encode("}")[0]): 100}  # a random model would not end
    reply = ask.chat(**seeded(CHAT), response_format={"type": "json_object"}, logit_bias=close)
    assert (json.loads(content(reply)), first(reply).finish_reason) == ({}, "stop")


def test_a_strict_schema_holds(ask: Ask) -> None:
    schema = Weather.model_json_schema()
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": schema, "strict": True}}
    for seed in range(3):
        reply = ask.chat(**CHAT | {"max_tokens": 200}, response_format=form, seed=seed, temperature=1)
        assert first(reply).finish_reason == "stop"
        Weather.model_validate_json(content(reply))
        assert content(ask.chat(**CHAT | {"max_tokens": 200}, response_format=form, seed=seed, stream=True)) == content(
            reply
        )


def test_a_chat_is_parsed_to_a_model(ask: Ask) -> None:
    reply = ask("chat.completions.parse", **seeded(CHAT) | {"max_tokens": 200}, response_format=Weather)
    parsed = first(reply).message.parsed
    assert isinstance(parsed, Weather)
    assert parsed == Weather.model_validate_json(content(reply))


def test_a_response_is_parsed_to_a_model(ask: Ask) -> None:
    body = RESPONSE | {"max_output_tokens": 200, "temperature": 1}
    reply = ask("responses.parse", **body, text_format=Weather, extra_body={"seed": 5})
    assert reply.output_parsed == Weather.model_validate_json(reply.output_text)
    assert reply.status == "completed"


def test_a_parse_that_is_cut_is_an_error_of_the_sdk(ask: Ask) -> None:
    with pytest.raises(openai.LengthFinishReasonError) as caught:
        ask("chat.completions.parse", **CHAT | {"max_tokens": 5}, response_format=Weather)
    assert caught.value.completion.usage is not None
    assert caught.value.completion.usage.completion_tokens == 5


@pytest.mark.parametrize(
    ("fields", "allowed"),
    [
        ({"guided_choice": ["yes", "no", "maybe so"]}, ["yes", "no", "maybe so"]),
        ({"structured_outputs": {"choice": ["left", "right"]}}, ["left", "right"]),
        ({"guided_regex": "(ab){2}"}, ["abab"]),
        ({"regex": "x{3}"}, ["xxx"]),
        ({"guided_grammar": 'root ::= "up" | "down"'}, ["up", "down"]),
        ({"ebnf": 'root ::= "one" "two"'}, ["onetwo"]),
        ({"structured_outputs": {"regex": "[7-8]0"}}, ["70", "80"]),
        ({"guided_json": {"enum": [1, "a"]}}, ["1", '"a"']),
    ],
)
def test_grammars_of_vllm_and_sglang_hold(ask: Ask, fields: Json, allowed: list[str]) -> None:
    for seed in range(2):
        reply = ask.chat(**CHAT, seed=seed, temperature=1.5, extra_body=fields)
        assert content(reply) in allowed
        assert first(reply).finish_reason == "stop"


# Tools


def called(reply: Any) -> list[tuple[str, Json]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in first(reply).message.tool_calls or []]


def test_a_required_call_matches_a_schema(ask: Ask) -> None:
    for seed in range(3):
        body = CHAT | {"max_tokens": 400, "seed": seed, "tools": TOOLS, "tool_choice": "required"}
        reply = ask.chat(**body, parallel_tool_calls=False)
        [(name, arguments)] = called(reply)
        assert first(reply).finish_reason == "tool_calls"
        if name == "get_weather":
            assert arguments["city"] in ("Paris", "Rome")
            assert arguments["days"] in (1, 2)
        else:
            assert (name, arguments) == ("stop_now", {})


def test_a_named_call_is_made(ask: Ask) -> None:
    reply = ask.chat(**CHAT | {"max_tokens": 200, "tools": TOOLS, "tool_choice": NAMED}, seed=1)
    assert [name for name, _ in called(reply)] == ["get_weather"]
    assert first(reply).finish_reason == "stop"


def test_arguments_of_a_streamed_call_add_up(ask: Ask) -> None:
    body = seeded(CHAT) | {"max_tokens": 200, "tools": TOOLS, "tool_choice": NAMED}
    deltas = [
        call
        for chunk in ask.chat(**body, stream=True)
        for choice in chunk.choices
        for call in choice.delta.tool_calls or []
    ]
    assert deltas[0].function.name == "get_weather"
    assert deltas[0].id.startswith("call_")
    assert len(deltas) > 1
    [call] = first(ask.chat(**body)).message.tool_calls
    assert "".join(delta.function.arguments or "" for delta in deltas) == call.function.arguments


def test_allowed_tools_limit_the_call(ask: Ask) -> None:
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
    for seed in range(3):
        body = CHAT | {"max_tokens": 200, "tools": TOOLS, "tool_choice": choice, "seed": seed}
        assert {name for name, _ in called(ask.chat(**body, parallel_tool_calls=False))} == {"get_weather"}


def test_a_called_tool_is_answered(ask: Ask) -> None:
    body = CHAT | {"tools": TOOLS, "seed": 1}
    message = first(ask.chat(**body | {"max_tokens": 200, "tool_choice": NAMED})).message
    turns = [*CHAT["messages"], message.to_dict()]
    results = [{"role": "tool", "tool_call_id": call.id, "content": "12 degrees"} for call in message.tool_calls]
    answer = ask.chat(**body | {"messages": [*turns, *results], "tool_choice": "none"})
    assert answer.usage.prompt_tokens > ask.chat(**body | {"tool_choice": "none"}).usage.prompt_tokens + 12
    assert first(answer).message.tool_calls is None


def test_a_response_calls_a_tool_and_answers_from_its_output(ask: Ask) -> None:
    tools = [{"type": "function", "strict": True, **tool["function"]} for tool in TOOLS]
    body = {"model": "toy", "max_output_tokens": 200, "tools": tools, "extra_body": {"seed": 1}}
    turn = {"role": "user", "content": "Hi"}
    [call] = ask.response(**body, input=[turn], tool_choice={"type": "function", "name": "get_weather"}).output
    assert json.loads(call.arguments).keys() == {"city", "days"}
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "12 degrees"}
    answer = ask.response(**body, input=[turn, call.to_dict(), output], tool_choice="none")
    assert [item.type for item in answer.output] == ["message"]


# Helpers of the SDK that read streams


def test_the_sdks_own_accumulator_ends_with_the_reply(toy_server: Toy) -> None:
    body = seeded(CHAT) | {"max_tokens": 200}
    with toy_server.clients.sync.chat.completions.stream(**body, response_format=Weather) as stream:
        kinds = {event.type for event in stream}
        last = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    whole = toy_server.clients.sync.chat.completions.parse(**body, response_format=Weather)
    assert first(last).message.parsed == first(whole).message.parsed


def test_the_sdks_accumulator_of_responses_ends_with_the_reply(toy_server: Toy) -> None:
    body = RESPONSE | {"max_output_tokens": 200, "extra_body": {"seed": 4}}
    with toy_server.clients.sync.responses.stream(**body, text_format=Weather) as stream:
        kinds = [event.type for event in stream]
        last = stream.get_final_response()
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    assert last.output_parsed == toy_server.clients.sync.responses.parse(**body, text_format=Weather).output_parsed


def test_raw_replies_have_the_headers(toy_server: Toy) -> None:
    reply = toy_server.clients.sync.chat.completions.with_raw_response.create(**CHAT, user="me", metadata={"a": "b"})
    assert reply.headers["x-specray-ignored-fields"] == "metadata, user"
    assert reply.parse().usage is not None


# Routes beside the SDK's


def test_text_becomes_tokens_and_back(ask: Ask) -> None:
    tokens = ask.post("/tokenize", prompt="once é")
    assert tokens["tokens"] == TOKENIZER.encode("once é")
    assert tokens["count"] == len("once é".encode())
    assert ask.post("/detokenize", tokens=tokens["tokens"])["prompt"] == "once é"


def test_a_tokenized_chat_is_the_chats_prompt(ask: Ask) -> None:
    count = ask.post("/tokenize", messages=CHAT["messages"])["count"]
    assert count == ask.chat(**CHAT).usage.prompt_tokens == len("user: Hi\nassistant: ")


def test_generate_gives_the_same_text(ask: Ask) -> None:
    options = {"max_new_tokens": MAX_TOKENS, "temperature": 0.9, "sampling_seed": 7}
    reply = ask.post("/generate", text=TEXTS["prompt"], sampling_params=options)
    assert reply["text"] == content(ask.text(**seeded(TEXTS)))


@pytest.mark.parametrize("kind", KINDS)
def test_another_client_sees_the_same_text(toy_server: Toy, kind: str) -> None:
    clients = Clients.of(toy_server.url, api_key="another", default_headers={"x-request-id": "1"})
    try:
        assert content(Ask(clients, kind).chat(**seeded(CHAT))) == content(
            Ask(toy_server.clients, kind).chat(**seeded(CHAT))
        )
    finally:
        clients.close()
