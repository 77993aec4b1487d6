"""The openai package against a whole server over a socket: sync and async, complete and streamed.

The ranks generate a script, so each scenario knows the reply's values, and what the ranks were asked for.
`test_openai_python_engine` has the scenarios whose text depends on the options, `test_openai_python_errors` those that
fail.
"""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from tests.support.scripted_server import TEXT
from tests.unit.server.clients.sdk import KINDS, Ask, Json, Scripted, content, first

USER = {"role": "user", "content": "Hi"}
CHAT: Json = {"model": "toy", "messages": [USER], "max_tokens": 12, "seed": 1}
TEXTS: Json = {"model": "toy", "prompt": "Hi", "max_tokens": 12, "seed": 1}
RESPONSE: Json = {"model": "toy", "input": "Hi", "max_output_tokens": 12}
FUNCTION: Json = {
    "name": "add",
    "description": "Add.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
SUB: Json = {"name": "sub", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}
TOOLS = [TOOL, {"type": "function", "function": SUB}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
CUSTOM_CALL = '<tool_call>\n{"name": "patch", "arguments": {"input": "+ a\\n"}}\n</tool_call>'
NAMESPACE_CALL = CALL.replace("add", "sum__add")
CUSTOM_TOOL: Json = {"type": "custom", "name": "patch", "description": "Change a file."}
OTHER_CALL = '<tool_call>\n{"name": "sub", "arguments": {}}\n</tool_call>'
CALLED = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "3"}
PART = {"type": "text", "text": "a"}
FUNCTION_TOOL: Json = {"type": "function", **FUNCTION, "strict": False}
SUB_TOOL: Json = {"type": "function", **SUB, "strict": False}
SCHEMA: Json = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
NAMED: Json = {"type": "function", "function": {"name": "add"}}


class Scenario(NamedTuple):
    """A call of the SDK, and what must hold for the reply and for the request that reached the ranks."""

    endpoint: str  # chat.completions, completions or responses
    arguments: Json
    holds: Callable[[Any], object] = lambda reply: True  # noqa: ARG005
    reaches: Callable[[Scripted], object] = lambda seen: True  # noqa: ARG005
    output: str = TEXT  # what the ranks generate
    streams: bool = True


def chat(changes: Json, holds: Any = None, reaches: Any = None, output: str = TEXT, streams: bool = True) -> Scenario:
    return _scenario("chat.completions", CHAT | changes, holds, reaches, output, streams)


def text(changes: Json, holds: Any = None, reaches: Any = None, output: str = TEXT, streams: bool = True) -> Scenario:
    return _scenario("completions", TEXTS | changes, holds, reaches, output, streams)


def response(changes: Json, holds: Any = None, reaches: Any = None, output: str = TEXT) -> Scenario:
    return _scenario("responses", RESPONSE | changes, holds, reaches, output, True)


def _scenario(endpoint: str, arguments: Json, holds: Any, reaches: Any, output: str, streams: bool) -> Scenario:
    assert holds or reaches, "a scenario checks something"
    checks = {"holds": holds, "reaches": reaches}
    return Scenario(
        endpoint, arguments, output=output, streams=streams, **{name: check for name, check in checks.items() if check}
    )


def samples(**expected: object) -> Callable[[Scripted], bool]:
    """The sampling options that reach the ranks."""
    return lambda seen: {name: getattr(seen.row.sampling, name) for name in expected} == expected


def prompts(expected: str) -> Callable[[Scripted], bool]:
    """The prompt that reaches the ranks."""
    return lambda seen: seen.prompt == expected


def calls(reply: Any) -> list[tuple[str, Any]]:
    """Names and arguments of a chat's tool calls."""
    made = first(reply).message.tool_calls or []
    return [(call.function.name, json.loads(call.function.arguments)) for call in made]


def ends(reason: str) -> Callable[[Any], bool]:
    return lambda reply: first(reply).finish_reason == reason


def extra(value: Any, name: str) -> Any:
    """A field that the SDK's type does not have."""
    return (value.model_extra or {}).get(name)


SCENARIOS: dict[str, Scenario] = {
    # Chat completions: text, choices and lengths
    "chat": chat({}, lambda r: content(r) == TEXT[:12], prompts("<|user|>Hi")),
    "chat-role": chat({}, lambda r: (first(r).message.role, first(r).message.refusal) == ("assistant", None)),
    "chat-default-model": chat({"model": "default"}, lambda r: r.model == "toy"),
    "chat-fingerprint": chat({}, lambda r: r.system_fingerprint.startswith("fp_") and r.id.startswith("chatcmpl-")),
    "chat-usage": chat(
        {}, lambda r: (r.usage.prompt_tokens, r.usage.completion_tokens, r.usage.total_tokens) == (10, 12, 22)
    ),
    "chat-accepted-drafts": chat({}, lambda r: r.usage.completion_tokens_details.accepted_prediction_tokens > 0),
    "chat-n": chat({"n": 3}, lambda r: [c.index for c in r.choices] == [0, 1, 2]),
    "chat-n-usage": chat({"n": 3}, lambda r: (r.usage.prompt_tokens, r.usage.completion_tokens) == (10, 36)),
    "chat-n-seeds": chat({"n": 3}, lambda r: len({extra(c, "seed") for c in r.choices}) == 3),
    "chat-n-128": chat({"n": 128, "max_tokens": 1}, lambda r: len(r.choices) == 128),
    "chat-seed": chat(
        {"seed": -5}, lambda r: (extra(r, "seed"), extra(first(r), "seed")) == (-5, -5), samples(seed=-5)
    ),
    "chat-no-seed": chat({"seed": None}, lambda r: isinstance(extra(r, "seed"), int), streams=False),
    "chat-greedy": chat({"temperature": 0}, reaches=samples(temperature=0.0)),
    "chat-sampled": chat({"temperature": 1.5, "top_p": 0.9}, reaches=samples(temperature=1.5, top_p=0.9)),
    "chat-penalties": chat(
        {"presence_penalty": 1, "frequency_penalty": -1}, reaches=samples(presence_penalty=1.0, frequency_penalty=-1.0)
    ),
    "chat-logit-bias": chat({"logit_bias": {"5": 10}}, reaches=samples(logit_bias=[(5, 10.0)])),
    "chat-length": chat({}, ends("length")),
    "chat-stop": chat({"stop": " "}, lambda r: (content(r), first(r).finish_reason) == ("The", "stop")),
    "chat-stop-reason": chat({"stop": ["zz", " "]}, lambda r: extra(first(r), "stop_reason") == " "),
    "chat-stops": chat({"stop": ["zz"] * 60 + ["k"]}, lambda r: content(r) == "The quic"),
    "chat-stop-over-steps": chat({"stop": "quick b", "max_tokens": 30}, lambda r: content(r) == "The "),
    "chat-no-tokens": chat({"max_tokens": 0}, lambda r: (r.usage.completion_tokens, content(r)) == (0, "")),
    "chat-max-completion-tokens": chat({"max_completion_tokens": 5}, lambda r: content(r) == TEXT[:5]),
    "chat-only-max-completion-tokens": chat(
        {"max_tokens": None, "max_completion_tokens": 3}, lambda r: r.usage.completion_tokens == 3
    ),
    "chat-unicode": chat({"max_tokens": 30}, lambda r: "é 🎉" in content(r)),
    "chat-cut-character": chat({"max_tokens": 22}, lambda r: r.usage.completion_tokens == 22),
    # Log probabilities
    "chat-logprobs": chat({"logprobs": True}, lambda r: [e.token for e in first(r).logprobs.content] == [*TEXT[:12]]),
    "chat-logprob-values": chat({"logprobs": True}, lambda r: {e.logprob for e in first(r).logprobs.content} == {-0.5}),
    "chat-logprob-bytes": chat(
        {"logprobs": True, "max_tokens": 30},
        lambda r: bytes(b for e in first(r).logprobs.content for b in e.bytes).decode() == content(r),
    ),
    "chat-top-logprobs": chat(
        {"logprobs": True, "top_logprobs": 2},
        lambda r: [t.logprob for t in first(r).logprobs.content[0].top_logprobs] == [-0.5, -9999.0],
        samples(logprobs=2),
    ),
    "chat-no-top-logprobs": chat(
        {"logprobs": True, "top_logprobs": 0}, lambda r: not any(e.top_logprobs for e in first(r).logprobs.content)
    ),
    "chat-no-logprobs": chat({"logprobs": False}, lambda r: first(r).logprobs is None, samples(logprobs=None)),
    # Messages
    "chat-system": chat(
        {"messages": [{"role": "system", "content": "Be brief."}, USER]},
        reaches=prompts("<|system|>Be brief.<|user|>Hi"),
    ),
    "chat-developer": chat(
        {"messages": [{"role": "developer", "content": "x"}, USER]}, reaches=prompts("<|system|>x<|user|>Hi")
    ),
    "chat-parts": chat({"messages": [{"role": "user", "content": [PART, PART]}]}, reaches=prompts("<|user|>aa")),
    "chat-system-parts": chat(
        {"messages": [{"role": "system", "content": [PART]}, USER]}, reaches=prompts("<|system|>a<|user|>Hi")
    ),
    "chat-assistant-parts": chat(
        {"messages": [USER, {"role": "assistant", "content": [PART]}, USER]},
        reaches=prompts("<|user|>Hi<|assistant|>a<|user|>Hi"),
    ),
    "chat-turns": chat(
        {"messages": [USER, {"role": "assistant", "content": "Yes"}, USER]},
        reaches=prompts("<|user|>Hi<|assistant|>Yes<|user|>Hi"),
    ),
    "chat-empty-turn": chat(
        {"messages": [USER, {"role": "assistant", "content": None}, USER]},
        reaches=prompts("<|user|>Hi<|assistant|><|user|>Hi"),
    ),
    "chat-names": chat({"messages": [USER | {"name": "ada"}]}, reaches=prompts("<|user|>Hi")),
    "chat-earlier-reply": chat(
        {"messages": [USER, {"role": "assistant", "content": "Yes", "refusal": None, "annotations": []}, USER]},
        reaches=prompts("<|user|>Hi<|assistant|>Yes<|user|>Hi"),
    ),
    "chat-empty-message": chat({"messages": [{"role": "user", "content": ""}]}, reaches=prompts("<|user|>")),
    # Fields without effect on the text
    "chat-harmless": chat(
        {"user": "me", "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "safety_identifier": "x"},
        lambda r: content(r) == TEXT[:12],
    ),
    "chat-cache-key": chat(
        {"prompt_cache_key": "k", "prompt_cache_retention": "24h"}, lambda r: content(r) == TEXT[:12]
    ),
    "chat-cache-salt": chat(
        {"extra_body": {"cache_salt": "secret"}}, reaches=lambda seen: seen.row.cache_salt.endswith("secret")
    ),
    "chat-prediction": chat(
        {"prediction": {"type": "content", "content": TEXT}},
        reaches=lambda seen: len(seen.row.predicted_token_ids) == len(TEXT.encode()),
    ),
    "chat-prediction-parts": chat(
        {"prediction": {"type": "content", "content": [PART, PART]}},
        reaches=lambda seen: len(seen.row.predicted_token_ids) == 2,
    ),
    "chat-modalities": chat({"modalities": ["text"]}, lambda r: first(r).message.audio is None),
    "chat-effort": chat({"reasoning_effort": "low"}, lambda r: content(r) == TEXT[:12]),
    "chat-verbosity": chat({"verbosity": "medium"}, lambda r: content(r) == TEXT[:12]),
    # Structured output: the grammar reaches the ranks
    "chat-text-format": chat({"response_format": {"type": "text"}}, reaches=samples(grammar=None)),
    "chat-json-object": chat(
        {"response_format": {"type": "json_object"}, "max_tokens": 8},
        lambda r: json.loads(content(r)) == {"a": 1},
        lambda seen: seen.row.sampling.grammar.kind == "json_object",
        '{"a": 1}',
    ),
    "chat-json-schema": chat(
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}},
        reaches=lambda seen: json.loads(seen.row.sampling.grammar.text) == SCHEMA,
    ),
    "chat-guided-regex": chat(
        {"extra_body": {"guided_regex": "[a-z]+"}}, reaches=lambda seen: seen.row.sampling.grammar.text == "[a-z]+"
    ),
    "chat-structured-outputs": chat(
        {"extra_body": {"structured_outputs": {"choice": ["yes", "no"]}}},
        reaches=lambda seen: seen.row.sampling.grammar.kind == "choice",
    ),
    "chat-sglang-regex": chat(
        {"extra_body": {"regex": "a|b"}}, reaches=lambda seen: seen.row.sampling.grammar.kind == "regex"
    ),
    # Tools
    "chat-tools-unused": chat(
        {"tools": [TOOL]}, lambda r: (first(r).message.tool_calls, first(r).finish_reason) == (None, "length")
    ),
    "chat-tools-shown": chat({"tools": [TOOL]}, reaches=lambda seen: '"name": "add"' in seen.prompt),
    "chat-tools-none": chat(
        {"tools": [TOOL], "tool_choice": "none", "max_tokens": len(CALL)},
        lambda r: (first(r).message.content, first(r).message.tool_calls) == (CALL, None),
        prompts("<|user|>Hi"),
        CALL,
    ),
    "chat-tool-call": chat(
        {"tools": [TOOL], "max_tokens": len(CALL)}, lambda r: calls(r) == [("add", {"a": 1})], None, CALL
    ),
    "chat-tool-call-finish": chat(
        {"tools": [TOOL], "stop": "!", "max_tokens": 99}, ends("tool_calls"), None, CALL + "!"
    ),
    "chat-tool-call-id": chat(
        {"tools": [TOOL], "max_tokens": len(CALL)},
        lambda r: first(r).message.tool_calls[0].id.startswith("call_") and first(r).message.content is None,
        None,
        CALL,
    ),
    "chat-tool-call-after-text": chat(
        {"tools": [TOOL], "max_tokens": 6 + len(CALL)},
        lambda r: (content(r), calls(r)) == ("Well.", [("add", {"a": 1})]),
        None,
        f"Well.\n{CALL}",
    ),
    "chat-parallel-calls": chat(
        {"tools": TOOLS, "max_tokens": len(CALL + OTHER_CALL) + 1},
        lambda r: calls(r) == [("add", {"a": 1}), ("sub", {})],
        None,
        f"{CALL}\n{OTHER_CALL}",
    ),
    "chat-one-call-only": chat(
        {"tools": TOOLS, "parallel_tool_calls": False, "max_tokens": len(CALL + OTHER_CALL) + 1},
        lambda r: calls(r) == [("add", {"a": 1})],
        None,
        f"{CALL}\n{OTHER_CALL}",
    ),
    "chat-unknown-call": chat(
        {"tools": [TOOL], "max_tokens": len(OTHER_CALL)},
        lambda r: (content(r), calls(r)) == (OTHER_CALL, []),
        None,
        OTHER_CALL,
    ),
    "chat-required-call": chat(
        {"tools": TOOLS, "tool_choice": "required", "max_tokens": len(CALL)},
        lambda r: calls(r) == [("add", {"a": 1})],
        lambda seen: all(name in seen.row.sampling.grammar.text for name in ('\\"add\\"', '\\"sub\\"')),
        CALL,
    ),
    "chat-named-call": chat(
        {"tools": TOOLS, "tool_choice": NAMED, "stop": "!", "max_tokens": 99},
        lambda r: (calls(r), first(r).finish_reason) == ([("add", {"a": 1})], "stop"),
        lambda seen: '\\"sub\\"' not in seen.row.sampling.grammar.text,
        CALL + "!",
    ),
    "chat-allowed-tools": chat(
        {
            "tools": TOOLS,
            "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}},
            "max_tokens": len(CALL + OTHER_CALL) + 1,
        },
        lambda r: calls(r) == [("add", {"a": 1})],
        lambda seen: '"name": "sub"' in seen.prompt and seen.row.sampling.grammar is None,
        f"{CALL}\n{OTHER_CALL}",
    ),
    "chat-allowed-tools-required": chat(
        {
            "tools": TOOLS,
            "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}},
            "max_tokens": len(CALL),
        },
        lambda r: calls(r) == [("add", {"a": 1})],
        lambda seen: '\\"sub\\"' not in seen.row.sampling.grammar.text,
        CALL,
    ),
    "chat-tool-result": chat(
        {"tools": [TOOL], "messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALLED]}, RESULT]},
        reaches=lambda seen: seen.prompt.endswith(f"<|assistant|>{CALL}<|user|><tool_response>\n3\n</tool_response>"),
    ),
    "chat-tool-results": chat(
        {
            "tools": [TOOL],
            "messages": [
                USER,
                {"role": "assistant", "content": "Two.", "tool_calls": [CALLED, CALLED | {"id": "call_2"}]},
                RESULT,
                RESULT | {"tool_call_id": "call_2", "content": [PART]},
                USER,
            ],
        },
        reaches=lambda seen: seen.prompt.endswith(
            f"<|assistant|>Two.\n{CALL}\n{CALL}<|user|><tool_response>\n3\n</tool_response>\n"
            "<tool_response>\na\n</tool_response><|user|>Hi"
        ),
    ),
    "chat-tool-without-parameters": chat(
        {"tools": [{"type": "function", "function": {"name": "now"}}], "max_tokens": 46},
        lambda r: calls(r) == [("now", {})],
        None,
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    ),
    "chat-strict-tool": chat(
        {"tools": [{"type": "function", "function": FUNCTION | {"strict": True}}], "max_tokens": len(CALL)},
        lambda r: calls(r) == [("add", {"a": 1})],
        None,
        CALL,
    ),
    # vLLM's and SGLang's own fields
    "chat-top-k": chat(
        {"extra_body": {"top_k": 4, "min_p": 0.1, "repetition_penalty": 1.1}},
        reaches=samples(top_k=4, min_p=0.1, repetition_penalty=1.1),
    ),
    "chat-allowed-tokens": chat(
        {"extra_body": {"allowed_token_ids": [1, 2], "rid": "x"}}, reaches=samples(allowed_token_ids=[1, 2])
    ),
    "chat-stop-token-ids": chat(
        {"extra_body": {"stop_token_ids": [ord("q") - ord("!")]}},
        lambda r: (content(r), extra(first(r), "stop_reason")) == ("The ", ord("q") - ord("!")),
    ),
    "chat-include-stop": chat(
        {"stop": "q", "extra_body": {"include_stop_str_in_output": True}}, lambda r: content(r) == "The q"
    ),
    "chat-min-tokens": chat({"extra_body": {"min_tokens": 7}}, reaches=samples(min_tokens=7)),
    "chat-truncated": chat(
        {"extra_body": {"truncate_prompt_tokens": 3}}, lambda r: r.usage.prompt_tokens == 3, prompts(">Hi")
    ),
    "chat-without-drafts": chat(
        {"extra_body": {"speculative": {"enabled": False}}},
        lambda r: extra(r.usage, "speculative")["draft_tokens"] == 0 and content(r) == TEXT[:12],
    ),
    # Completions
    "text": text({}, lambda r: content(r) == TEXT[:12], prompts("Hi")),
    "text-id": text({}, lambda r: r.id.startswith("cmpl-") and r.object == "text_completion"),
    "text-default-length": text({"max_tokens": None}, lambda r: r.usage.completion_tokens == 16),
    "text-batch": text({"prompt": ["a", "b", "c"]}, lambda r: [c.index for c in r.choices] == [0, 1, 2]),
    "text-batch-texts": text({"prompt": ["a", "b"]}, lambda r: {c.text for c in r.choices} == {TEXT[:12]}),
    "text-batch-usage": text(
        {"prompt": ["a", "bc"]}, lambda r: (r.usage.prompt_tokens, r.usage.completion_tokens) == (3, 24)
    ),
    "text-ids": text(
        {"prompt": [5, 6]}, lambda r: r.usage.prompt_tokens == 2, lambda seen: seen.row.token_ids == [5, 6]
    ),
    "text-ids-batch": text(
        {"prompt": [[5], [6, 7]]},
        lambda r: r.usage.prompt_tokens == 3,
        lambda seen: sorted(row.token_ids for row in seen.rows) == [[5], [6, 7]],
    ),
    "text-n": text({"prompt": ["a", "b"], "n": 2}, lambda r: len(r.choices) == 4),
    "text-best-of": text({"n": 2, "best_of": 4}, lambda r: r.usage.completion_tokens == 48, streams=False),
    "text-echo": text({"echo": True}, lambda r: content(r) == "Hi" + TEXT[:12]),
    "text-echo-ids": text({"echo": True, "prompt": [5, 6]}, lambda r: content(r).endswith(TEXT[:12])),
    "text-echo-batch": text(
        {"echo": True, "prompt": ["a", "b"]}, lambda r: [c.text[0] for c in r.choices] == ["a", "b"]
    ),
    "text-logprobs": text({"logprobs": 2}, lambda r: first(r).logprobs.tokens == [*TEXT[:12]]),
    "text-logprob-offsets": text({"logprobs": 0}, lambda r: first(r).logprobs.text_offset == [*range(12)]),
    "text-logprob-values": text({"logprobs": 1}, lambda r: first(r).logprobs.token_logprobs == [-0.5] * 12),
    "text-top-logprobs": text({"logprobs": 1}, lambda r: first(r).logprobs.top_logprobs[0] == {"T": -0.5}),
    "text-echo-logprobs": text(
        {"echo": True, "logprobs": 1, "max_tokens": 1},
        lambda r: (first(r).logprobs.tokens, first(r).logprobs.token_logprobs) == (["H", "i", "T"], [None, -0.5, -0.5]),
        streams=False,
    ),
    "text-stop": text({"stop": ["u"]}, lambda r: (content(r), first(r).finish_reason) == ("The q", "stop")),
    "text-suffix-empty": text({"suffix": ""}, lambda r: content(r) == TEXT[:12]),
    "text-no-tokens": text({"max_tokens": 0, "echo": True}, lambda r: content(r) == "Hi"),
    "text-ignored-end": text(
        {"extra_body": {"ignore_eos": True, "min_tokens": 3}}, ends("length"), samples(min_tokens=3)
    ),
    "text-truncated": text({"extra_body": {"truncate_prompt_tokens": 1}}, reaches=prompts("i")),
    "text-prediction": text(
        {"extra_body": {"prediction": {"type": "content", "content": "abc"}}},
        reaches=lambda seen: len(seen.row.predicted_token_ids) == 3,
    ),
    "text-json-schema": text(
        {"extra_body": {"guided_json": SCHEMA}},
        reaches=lambda seen: json.loads(seen.row.sampling.grammar.text) == SCHEMA,
    ),
    "text-penalties": text(
        {"presence_penalty": 0.5, "frequency_penalty": 2, "logit_bias": {"7": -100}},
        reaches=samples(presence_penalty=0.5, frequency_penalty=2.0, logit_bias=[(7, -100.0)]),
    ),
    # Responses
    "response": response({}, lambda r: r.output_text == TEXT[:12], prompts("<|user|>Hi")),
    "response-id": response({}, lambda r: r.id.startswith("resp_") and r.output[0].id.startswith("msg_")),
    "response-incomplete": response(
        {}, lambda r: (r.status, r.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    ),
    "response-complete": response(
        {"extra_body": {"stop": "q"}}, lambda r: (r.status, r.output_text) == ("completed", "The ")
    ),
    "response-empty": response(
        {"extra_body": {"stop": "T"}}, lambda r: r.output[0].content[0].text == "" and len(r.output) == 1
    ),
    "response-usage": response(
        {}, lambda r: (r.usage.input_tokens, r.usage.output_tokens, r.usage.total_tokens) == (10, 12, 22)
    ),
    "response-instructions": response(
        {"instructions": "Be brief."},
        lambda r: r.instructions == "Be brief.",
        prompts("<|system|>Be brief.<|user|>Hi"),
    ),
    "response-developer": response(
        {"input": [{"role": "developer", "content": "x"}, USER]}, reaches=prompts("<|system|>x<|user|>Hi")
    ),
    "response-turns": response(
        {"input": [USER, {"role": "assistant", "content": "Yes"}, USER]},
        reaches=prompts("<|user|>Hi<|assistant|>Yes<|user|>Hi"),
    ),
    "response-parts": response(
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}]}, reaches=prompts("<|user|>a")
    ),
    "response-earlier-reply": response(
        {
            "input": [
                USER,
                {
                    "type": "message",
                    "id": "msg_1",
                    "role": "assistant",
                    "status": "completed",
                    "content": [{"type": "output_text", "text": "Yes", "annotations": []}],
                },
                USER,
            ]
        },
        reaches=prompts("<|user|>Hi<|assistant|>Yes<|user|>Hi"),
    ),
    "response-stateless": response(
        {"store": False, "include": ["reasoning.encrypted_content"]}, lambda r: r.store is False
    ),
    "response-metadata": response({"metadata": {"a": "b"}}, lambda r: r.metadata == {"a": "b"}),
    "response-logprobs": response(
        {"include": ["message.output_text.logprobs"], "top_logprobs": 1},
        lambda r: [e.token for e in r.output[0].content[0].logprobs] == [*TEXT[:12]],
    ),
    "response-sampling": response(
        {"temperature": 0.5, "top_p": 0.5},
        lambda r: (r.temperature, r.top_p) == (0.5, 0.5),
        samples(temperature=0.5, top_p=0.5),
    ),
    "response-limit": response({"max_output_tokens": 3}, lambda r: (r.max_output_tokens, r.output_text) == (3, "The")),
    "response-tool-call": response(
        {"tools": [FUNCTION_TOOL], "max_output_tokens": len(CALL)},
        lambda r: (r.output[0].name, json.loads(r.output[0].arguments)) == ("add", {"a": 1}),
        None,
        CALL,
    ),
    "response-tool-calls": response(
        {"tools": [FUNCTION_TOOL, SUB_TOOL], "max_output_tokens": len(CALL + OTHER_CALL) + 1},
        lambda r: [item.name for item in r.output] == ["add", "sub"],
        None,
        f"{CALL}\n{OTHER_CALL}",
    ),
    "response-tool-named": response(
        {
            "tools": [FUNCTION_TOOL, SUB_TOOL],
            "tool_choice": {"type": "function", "name": "add"},
            "max_output_tokens": len(CALL),
        },
        lambda r: (r.tool_choice.name, r.output[0].type) == ("add", "function_call"),
        lambda seen: '\\"sub\\"' not in seen.row.sampling.grammar.text,
        CALL,
    ),
    "response-tool-required": response(
        {"tools": [FUNCTION_TOOL], "tool_choice": "required", "max_output_tokens": len(CALL)},
        lambda r: r.tool_choice == "required" and r.output[0].call_id.startswith("call_"),
        lambda seen: seen.row.sampling.grammar is not None,
        CALL,
    ),
    "response-allowed-tools": response(
        {
            "tools": [FUNCTION_TOOL, SUB_TOOL],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "add"}],
            },
            "max_output_tokens": len(CALL),
        },
        lambda r: (r.tool_choice.mode, r.output[0].name) == ("required", "add"),
        lambda seen: '\\"sub\\"' not in seen.row.sampling.grammar.text,
        CALL,
    ),
    "response-tool-result": response(
        {
            "tools": [FUNCTION_TOOL],
            "input": [
                USER,
                {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": '{"a": 1}'},
                {"type": "function_call_output", "call_id": "call_1", "output": "3"},
            ],
        },
        reaches=lambda seen: seen.prompt.endswith(f"<|assistant|>{CALL}<|user|><tool_response>\n3\n</tool_response>"),
    ),
    "response-custom-tool": response(
        {"tools": [CUSTOM_TOOL], "max_output_tokens": len(CUSTOM_CALL)},
        lambda r: (r.output[0].type, r.output[0].name, r.output[0].input) == ("custom_tool_call", "patch", "+ a\n"),
        None,
        CUSTOM_CALL,
    ),
    "response-custom-call-cut": response(
        {"tools": [CUSTOM_TOOL], "max_output_tokens": len(CUSTOM_CALL) - 24},
        lambda r: (r.output[0].type, r.status) == ("custom_tool_call", "incomplete"),
        None,
        CUSTOM_CALL,
    ),
    "response-namespace": response(
        {"tools": [{"type": "namespace", "name": "sum", "description": "d", "tools": [FUNCTION_TOOL]}]}
        | {"max_output_tokens": len(NAMESPACE_CALL)},
        lambda r: (r.output[0].type, r.output[0].namespace, r.output[0].name) == ("function_call", "sum", "add"),
        lambda seen: '"name": "sum__add"' in seen.prompt,
        NAMESPACE_CALL,
    ),
    "response-hosted-tool": response(
        {"tools": [FUNCTION_TOOL, {"type": "web_search"}]},
        lambda r: r.output_text == TEXT[:12],
        lambda seen: "web_search" not in seen.prompt and '"name": "add"' in seen.prompt,
    ),
    "response-custom-call-in-history": response(
        {
            "tools": [CUSTOM_TOOL],
            "input": [
                USER,
                {"type": "custom_tool_call", "call_id": "call_1", "name": "patch", "input": "+ a"},
                {"type": "custom_tool_call_output", "call_id": "call_1", "output": "done"},
            ],
        },
        reaches=lambda seen: (
            '{"name": "patch", "arguments": {"input": "+ a"}}' in seen.prompt and "done" in seen.prompt
        ),
    ),
    "response-shell-call-in-history": response(
        {
            "input": [
                USER,
                {
                    "type": "local_shell_call",
                    "id": "lsh_1",
                    "call_id": "call_1",
                    "status": "completed",
                    "action": {"type": "exec", "command": ["ls"], "env": {}},
                },
                {"type": "local_shell_call_output", "id": "call_1", "output": "a.txt"},
            ]
        },
        reaches=lambda seen: '"name": "local_shell"' in seen.prompt and "a.txt" in seen.prompt,
    ),
    "response-hosted-call-in-history": response(
        {
            "input": [
                USER,
                {
                    "type": "web_search_call",
                    "id": "ws_1",
                    "status": "completed",
                    "action": {"type": "search", "query": "x"},
                },
                {"role": "assistant", "content": "Yes"},
                USER,
            ]
        },
        reaches=prompts("<|user|>Hi<|assistant|>Yes<|user|>Hi"),
    ),
    "response-refusal-in-history": response(
        {"input": [USER, {"role": "assistant", "content": [{"type": "refusal", "refusal": "No"}]}, USER]},
        reaches=prompts("<|user|>Hi<|assistant|>No<|user|>Hi"),
    ),
    "response-no-input": response({"input": [], "instructions": "x"}, reaches=prompts("<|system|>x")),
    "response-verbosity": response({"text": {"verbosity": "low"}}, lambda r: r.text.verbosity == "low"),
    "response-store": response({"store": True}, lambda r: r.store is False),
    "response-included": response({"include": ["file_search_call.results"]}, lambda r: r.output_text == TEXT[:12]),
    "response-min-tokens": response({"extra_body": {"min_tokens": 3}}, reaches=samples(min_tokens=3)),
    "response-stop-string": response(
        {"extra_body": {"stop": "q", "include_stop_str_in_output": True}}, lambda r: r.output_text == "The q"
    ),
    "response-allowed-tokens": response(
        {"extra_body": {"allowed_token_ids": [65, 66]}}, reaches=lambda seen: seen.row.sampling.allowed_token_ids
    ),
    "response-effort": response({"reasoning": {"effort": "low"}}, lambda r: r.reasoning.effort == "low"),
    "response-text-format": response(
        {"text": {"format": {"type": "text"}}}, lambda r: r.text.format.type == "text", samples(grammar=None)
    ),
    "response-json-schema": response(
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}}},
        lambda r: (r.text.format.name, r.text.format.schema_) == ("n", SCHEMA),
        lambda seen: json.loads(seen.row.sampling.grammar.text) == SCHEMA,
    ),
}


@pytest.fixture(scope="module")
def wholes() -> dict[str, Any]:
    """The complete reply of each scenario, for both kinds of client."""
    return {}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_call_returns_what_the_sdk_declares(scripted: Scripted, name: str, kind: str) -> None:
    scenario = SCENARIOS[name]
    scripted.script(scenario.output)
    reply = Ask(scripted.clients, kind)(f"{scenario.endpoint}.create", **scenario.arguments)
    assert scenario.holds(reply), reply
    assert scenario.reaches(scripted), (scripted.prompt, scripted.row)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [name for name, scenario in SCENARIOS.items() if scenario.streams])
def test_a_stream_adds_up_to_the_complete_reply(
    scripted: Scripted, wholes: dict[str, Any], name: str, kind: str
) -> None:
    scenario = SCENARIOS[name]
    scripted.script(scenario.output)
    ask = Ask(scripted.clients, kind)
    chunks = ask(f"{scenario.endpoint}.create", **scenario.arguments, stream=True)
    if name not in wholes:
        wholes[name] = ask(f"{scenario.endpoint}.create", **scenario.arguments)
    whole = wholes[name]
    (_check_events if scenario.endpoint == "responses" else _check_chunks)(chunks, whole)


def _check_chunks(chunks: list[Any], whole: Any) -> None:
    for choice in whole.choices:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert [part.finish_reason for part in parts if part.finish_reason] == [choice.finish_reason]
        if whole.object == "text_completion":
            assert "".join(part.text for part in parts) == choice.text
            continue
        assert parts[0].delta.role == "assistant"
        assert "".join(part.delta.content or "" for part in parts) == (choice.message.content or "")
        deltas = [call for part in parts for call in part.delta.tool_calls or []]
        for index, call in enumerate(choice.message.tool_calls or []):
            own = [delta for delta in deltas if delta.index == index]
            assert own[0].id
            assert own[0].function.name == call.function.name
            assert "".join(delta.function.arguments or "" for delta in own) == call.function.arguments
        assert {delta.index for delta in deltas} == {*range(len(choice.message.tool_calls or []))}


def _check_events(events: list[Any], whole: Any) -> None:
    assert shown(events[-1].response) == shown(whole)
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert content(events) == whole.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    done = [event.item.to_dict() for event in events if event.type == "response.output_item.done"]
    assert done == [item.to_dict() for item in events[-1].response.output]


def shown(reply: Any) -> Json:
    """A response without what differs between two calls: IDs, times and speeds."""
    fields: Json = reply.to_dict()
    for name in ("id", "created_at", "completed_at", "seed", "usage"):
        fields.pop(name, None)
    for item in fields["output"]:
        for name in ("id", "call_id"):
            item.pop(name, None)
    return fields


@pytest.mark.parametrize("kind", KINDS)
def test_models_are_listed_and_found(scripted: Scripted, kind: str) -> None:
    ask = Ask(scripted.clients, kind)
    if kind == "sync":
        assert [model.id for model in scripted.clients.sync.models.list()] == ["toy"]
    model = ask("models.retrieve", model="toy")
    assert (model.id, model.object, model.owned_by, extra(model, "max_model_len")) == ("toy", "model", "specray", 1024)


@pytest.mark.parametrize("kind", KINDS)
def test_input_tokens_are_counted_as_the_reply_counts_them(scripted: Scripted, kind: str) -> None:
    ask = Ask(scripted.clients, kind)
    scripted.script(TEXT)
    for options in ({}, {"instructions": "Be brief."}, {"tools": [FUNCTION_TOOL]}):
        counted = ask("responses.input_tokens.count", model="toy", input="Hi", **options)
        assert counted.input_tokens == ask.response(**RESPONSE, **options).usage.input_tokens


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("endpoint", ["chat.completions", "completions"])
def test_a_stream_ends_with_its_usage_if_it_is_asked_for(scripted: Scripted, endpoint: str, kind: str) -> None:
    ask = Ask(scripted.clients, kind)
    scripted.script(TEXT)
    body = CHAT if endpoint == "chat.completions" else TEXTS
    options = {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}}
    *chunks, last = ask(f"{endpoint}.create", **body, **options)
    assert [chunk.usage for chunk in chunks] == [None] * len(chunks)
    assert last.choices == []
    assert last.usage.completion_tokens == 12
    assert last.usage.prompt_tokens == ask(f"{endpoint}.create", **body).usage.prompt_tokens
