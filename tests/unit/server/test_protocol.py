"""Request bodies: bounds of every field, unsupported and unknown fields."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from specray.errors import InvalidRequestError
from specray.server.chat.protocol import MAX_MESSAGES, ChatRequest
from specray.server.completions.protocol import CompletionRequest
from specray.server.errors import from_validation
from specray.server.generate.protocol import GenerateRequest
from specray.server.responses.protocol import ResponsesRequest
from specray.server.schemas.prompts import MAX_PROMPTS, checked_token_ids

USER = {"role": "user", "content": "hi"}

# field, values at the bounds, values just outside
BOUNDS: list[tuple[str, list[Any], list[Any]]] = [
    ("temperature", [0, 100.0, "0.5", "1e-3"], [-0.01, 100.1, float("nan"), float("inf"), "hot", "", True]),
    ("top_p", [0, 1e-9, 1], [-0.1, 1.01, float("nan")]),
    ("top_k", [-1, 2**31, 2**62], [-2, 1.5]),
    ("min_p", [0, 1], [-0.1, 1.1]),
    ("presence_penalty", [-2, 2], [-2.1, 2.1]),
    ("frequency_penalty", [-2, 2], [-2.1, 2.1]),
    ("repetition_penalty", [0.01, 1000], [0, 1001]),
    ("seed", [-(2**63), 2**63 - 1, "7"], [-(2**63) - 1, 2**63, 0.5]),
    ("n", [1, 128, "2"], [0, 129, True, "two", "1.5"]),
    ("max_tokens", [0, 10_000_000, "5"], [10_000_001, -1, "-1", "9" * 99]),
    ("min_tokens", [0, 10_000_000], [-1, 10_000_001]),
    ("stop", ["x", ["a"] * 64, [], "x" * 256], ["", ["a"] * 65, "x" * 257, [1], 1]),
    ("allowed_token_ids", [[0], [2**31 - 1] * 1024], [[], [-1], [0] * 1025, "a"]),
    ("truncate_prompt_tokens", [-1, 1, 10_000_000], [0, -2, 1.5]),
    ("rid", ["r", "r" * 256], ["", "r" * 257, 1, ["r"]]),
    ("prediction", [{"type": "content", "content": "x"}], [{"type": "content"}, {"type": "x", "content": ""}, "x"]),
    ("stop_token_ids", [[], [0] * 64, [2**31 - 1]], [[0] * 65, [-1], [2**31], ["0"]]),
    (
        "logit_bias",
        [{}, {"0": -100, "5": 100.0}, {str(i): 0 for i in range(300)}],
        [{"a": 1}, {"-1": 1}, {str(2**31): 1}, {"1": 101}, {"1": -101}, {str(i): 0 for i in range(301)}, []],
    ),
    ("model", ["m", "m" * 256], ["", "m" * 257, 1]),
    ("cache_salt", ["", "s" * 256], ["s" * 257, 1]),
    ("timeout", [0.001, 86_400], [0, 86_401, -1]),
    ("stream", [True, False], [1, "true"]),
    ("ignore_eos", [True, False], [1, "true"]),
]
CASES = [(name, value, True) for name, good, _ in BOUNDS for value in [*good, None]]
CASES += [(name, value, False) for name, _, bad in BOUNDS for value in bad]


@pytest.mark.parametrize("body", [{"messages": [USER]}, {"prompt": "hi"}], ids=["chat", "completion"])
@pytest.mark.parametrize(("name", "value", "is_good"), CASES)
def test_each_field_is_bounded(body: dict[str, Any], name: str, value: Any, is_good: bool) -> None:
    model = ChatRequest if "messages" in body else CompletionRequest
    if is_good:
        model.model_validate(body | {name: value})
        return
    with pytest.raises(ValidationError) as refused:
        model.model_validate(body | {name: value})
    error = from_validation(refused.value.errors())
    assert error.status == 400
    assert (error.param or "").split(".")[0] == name


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [USER] * (MAX_MESSAGES + 1)}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0"),
        ({"messages": [{"role": "critic", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "messages.0.tool_calls.0.id"),
        ({"messages": [USER], "top_logprobs": 2}, "top_logprobs"),
        ({"messages": [USER], "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": [USER], "logprobs": 1}, "logprobs"),
        ({"messages": [USER], "stream_options": {"include_usage": True}}, "stream_options"),
        ({"messages": [USER], "max_completion_tokens": -1}, "max_completion_tokens"),
        ({"messages": [USER], "add_generation_prompt": 1}, "add_generation_prompt"),
    ],
)
def test_an_invalid_chat_body_names_the_field(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ValidationError) as refused:
        ChatRequest.model_validate(body)
    assert from_validation(refused.value.errors()).param == param


@pytest.mark.parametrize("name", sorted(ChatRequest.refused_fields()))
def test_unsupported_fields_are_rejected(name: str) -> None:
    with pytest.raises(ValidationError) as refused:
        ChatRequest.model_validate({"messages": [USER], name: {"type": "something"}})
    assert from_validation(refused.value.errors()).param == name
    for neutral in (None, *ChatRequest.refusals[name].accepted):
        assert ChatRequest.model_validate({"messages": [USER], name: neutral}).ignored_fields == []


def test_unknown_fields_are_accepted_and_listed() -> None:
    body = ChatRequest.model_validate({"messages": [USER], "user": "me", "frobnicate": 1, "x" * 500: 2})
    assert body.ignored_fields == ["user", "frobnicate", "x" * 64]
    options = {"stream": True, "stream_options": {"include_obfuscation": False}}
    assert CompletionRequest.model_validate({"prompt": "a", **options}).ignored_fields == [
        "stream_options.include_obfuscation"
    ]


def test_calls_of_earlier_turns_are_accepted_as_agents_send_them() -> None:
    call = {"id": "a", "function": {"name": "f", "arguments": {"x": "é"}}}
    turns = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": None},
    ]
    assistant, result = ChatRequest.model_validate({"messages": [USER, *turns]}).messages[1:]
    assert assistant.for_template["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": "é"}}
    assert result.for_template == {"role": "tool", "content": "", "tool_call_id": "a"}


@pytest.mark.parametrize("arguments", [5, [], True, json.loads('{"a": ' * 99 + "1" + "}" * 99)])
def test_arguments_of_earlier_calls_that_are_no_object_are_refused(arguments: Any) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    with pytest.raises(ValidationError):
        ChatRequest.model_validate({"messages": [USER, {"role": "assistant", "tool_calls": [call]}]})


def test_numbers_may_be_sent_as_text() -> None:
    params = ChatRequest.model_validate({"messages": [USER], "temperature": "0.5", "max_tokens": "7"}).sampling(None)
    assert (params.temperature, params.max_tokens) == (0.5, 7)


def test_text_parts_are_joined_and_developer_becomes_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = ChatRequest.model_validate({"messages": [{"role": "developer", "content": parts}]})
    assert body.messages[0].for_template == {"role": "system", "content": "ab"}


@pytest.mark.parametrize(
    ("prompt", "items", "is_batch"),
    [
        ("a", ["a"], False),
        ([1, 2], [[1, 2]], False),
        (["a", "b"], ["a", "b"], True),
        ([[1], [2**31 - 1]], [[1], [2**31 - 1]], True),
        (["a"] * MAX_PROMPTS, ["a"] * MAX_PROMPTS, True),
    ],
)
def test_prompts_are_strings_or_token_ids_single_or_batched(prompt: Any, items: Any, is_batch: bool) -> None:
    assert CompletionRequest.model_validate({"prompt": prompt}).prompt == (items, is_batch, "prompt")


@pytest.mark.parametrize(
    "prompt", [None, 5, [], [[]], ["a", [1]], [[1], "a"], ["a"] * (MAX_PROMPTS + 1), [[1]] * (MAX_PROMPTS + 1)]
)
def test_invalid_prompts_are_rejected(prompt: Any) -> None:
    with pytest.raises(ValidationError) as refused:
        CompletionRequest.model_validate({"prompt": prompt})
    assert from_validation(refused.value.errors()).param == "prompt"


@pytest.mark.parametrize("values", [[1, "a"], [-1], [2**31], [True], ["a"], [1.0], [None], [[1]]])
def test_lists_that_are_not_token_ids_are_rejected_when_they_are_read(values: Any) -> None:
    with pytest.raises(InvalidRequestError, match="expected a string, token ids") as refused:
        checked_token_ids(values, "input_ids")
    assert refused.value.param == "input_ids"


def test_the_number_of_choices_is_bounded_over_all_prompts() -> None:
    CompletionRequest.model_validate({"prompt": ["a"] * 2, "n": 128})
    for too_many in ({"prompt": ["a"] * 3, "n": 128}, {"prompt": ["a"] * 3, "best_of": 128}):
        with pytest.raises(ValidationError):
            CompletionRequest.model_validate(too_many)


@pytest.mark.parametrize(
    "body", [{}, {"text": "a", "input_ids": [1]}, {"text": "a", "sampling_params": {"lora_path": "a"}}]
)
def test_invalid_generate_bodies_are_rejected(body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        GenerateRequest.model_validate(body)


def test_sampling_options_are_converted() -> None:
    body = {"temperature": 0.5, "top_k": 3, "logit_bias": {"7": 1}, "stop": "x", "seed": 3, "n": 2, "min_tokens": 1}
    params = ChatRequest.model_validate({"messages": [USER], "logprobs": True, **body}).sampling(99)
    assert (params.temperature, params.top_k, params.logit_bias) == (0.5, 3, {7: 1.0})
    assert (params.stop, params.seed, params.n, params.min_tokens) == (["x"], 3, 2, 1)
    assert (params.max_tokens, params.logprobs) == (99, 0)
    own = {"max_new_tokens": 5, "sampling_seed": 4, "no_stop_trim": True}
    [params] = GenerateRequest.model_validate({"text": "a", "sampling_params": own, "return_logprob": True}).sampling()
    assert (params.max_tokens, params.seed, params.include_stop_str_in_output, params.logprobs) == (5, 4, True, 0)


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("seed", "sampling_seed"),
        ("max_tokens", "max_new_tokens"),
        ("temperatur", "temperature"),
        ("zzzz", "leave it out"),
    ],
)
def test_an_unknown_sampling_option_of_generate_is_rejected_with_the_nearest_name(option: str, hint: str) -> None:
    with pytest.raises(ValidationError) as refused:
        GenerateRequest.model_validate({"text": "a", "sampling_params": {option: 1}})
    error = from_validation(refused.value.errors())
    assert error.param == f"sampling_params.{option}"
    assert hint in str(error)


def test_options_of_generate_may_be_lists_with_one_element_per_prompt() -> None:
    body = {
        "text": ["a", "b"],
        "sampling_params": [{"temperature": 0}, {"max_new_tokens": 0}],
        "return_logprob": [True, False],
        "top_logprobs_num": 2,
        "logprob_start_len": [3, 0],
        "rid": ["x", "y"],
    }
    request = GenerateRequest.model_validate(body)
    first, second = request.sampling()
    assert (first.temperature, first.max_tokens, first.logprobs) == (0.0, 128, 2)
    assert (first.prompt_logprobs, first.prompt_logprobs_start) == (2, 3)
    assert (second.temperature, second.max_tokens, second.logprobs, second.prompt_logprobs) == (1.0, 0, None, None)
    assert request.names == ["x", "y"]
    for wrong in ({"rid": ["x"]}, {"sampling_params": [{}]}, {"sampling_params": [{"n": 1}, {"n": 2}]}):
        with pytest.raises(ValidationError):
            GenerateRequest.model_validate(body | wrong)


@pytest.mark.parametrize("body", [{"n": 3, "best_of": 2}, {"best_of": 2, "stream": True}])
def test_best_of_must_leave_a_choice_and_cannot_be_streamed(body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as refused:
        CompletionRequest.model_validate({"prompt": "a", **body})
    assert from_validation(refused.value.errors()).param == "best_of"


@pytest.mark.parametrize(
    ("fields", "priority"),
    [
        ({}, 0),
        ({"priority": -7}, -7),
        ({"service_tier": "priority"}, -1),
        ({"service_tier": "flex"}, 1),
        ({"service_tier": "auto"}, 0),
        ({"service_tier": "fast"}, 0),
        ({"priority": 3, "service_tier": "priority"}, 3),
    ],
)
def test_priorities_and_tiers_order_the_queue(fields: dict[str, Any], priority: int) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    bodies = [ChatRequest(**chat, **fields), CompletionRequest(prompt="hi", **fields)]
    bodies.append(ResponsesRequest(input="hi", **fields).for_chat())
    assert [body.queue_priority for body in bodies] == [priority] * 3
