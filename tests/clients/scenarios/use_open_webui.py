"""The requests of Open WebUI, replayed: the application itself is several gigabytes large.

The shapes are those of `routers/openai.py`, `routers/tasks.py` and `utils/middleware.py` of its source: the models, the
streamed chat with its parameters, native tools, and the small tasks beside a chat, sent with its own HTTP client.
"""

import json
from typing import Any

import aiohttp
from report import (
    ASKED,
    BASE_URL,
    CITIES,
    KEY,
    LIMIT,
    MODEL,
    SYSTEM,
    WEATHER_SCHEMA,
    WRONG_KEY,
    chat_text,
    equal,
    is_weather,
    run,
    scenario,
)

MODELS = f"{BASE_URL}/models"
HEADERS = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "x", "parameters": WEATHER_SCHEMA}}
TASKS = {  # task: the end of its prompt, and its options
    "title_generation": ('JSON format: { "title": "your concise title here" }', {"max_completion_tokens": 1000}),
    "tags_generation": ('JSON format: { "tags": ["tag1", "tag2", "tag3"] }', {}),
    "follow_up_generation": ('JSON format: { "follow_ups": ["Question 1?", "Question 2?"] }', {}),
    "query_generation": ('{ "queries": [] }', {}),
}


async def send(body: dict[str, Any], headers: dict[str, str] = HEADERS) -> Any:
    """One chat request as the application sends it: its reply, or the chunks of its stream."""
    async with aiohttp.ClientSession(trust_env=True) as session:
        reply = await session.post(f"{BASE_URL}/chat/completions", data=json.dumps(body), headers=headers)
        async with reply:
            if "text/event-stream" not in reply.headers.get("Content-Type", ""):
                return reply.status, await reply.json()
            lines = [line.decode().strip() async for line in reply.content]
    data = [line.removeprefix("data: ") for line in lines if line]
    equal(data[-1], "[DONE]")
    return reply.status, [json.loads(line) for line in data[:-1]]


def streamed(chunks: list[dict[str, Any]]) -> str:
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


@scenario
async def the_model_is_found():
    async with aiohttp.ClientSession(trust_env=True) as session, session.get(MODELS, headers=HEADERS) as reply:
        found = await reply.json()
    equal([model["id"] for model in found["data"]], [MODEL])


@scenario
async def a_chat_is_the_servers_text():
    messages = [{"role": "system", "content": SYSTEM}, *ASKED]
    body = {"stream": True, "model": MODEL, "messages": messages, "temperature": 0, "max_tokens": LIMIT}
    status, chunks = await send(body | {"stream_options": {"include_usage": True}})
    equal((status, streamed(chunks)), (200, chat_text(messages)))
    assert chunks[-1]["usage"]["completion_tokens"] > 0, chunks[-1]


@scenario
async def all_parameters_of_its_settings_are_accepted():
    parameters = {
        **{"temperature": 0.8, "top_p": 0.9, "min_p": 0.05, "max_tokens": LIMIT, "seed": 7},
        **{"frequency_penalty": 0.5, "presence_penalty": 0.5, "stop": ["\n\n"]},
        **{"logit_bias": {"5": -10}, "reasoning_effort": "low"},
    }
    body = {"stream": False, "model": MODEL, "messages": ASKED, **parameters}
    status, reply = await send(body)
    equal(status, 200)
    equal((await send(body))[1]["choices"][0]["message"], reply["choices"][0]["message"])


@scenario
async def a_conversation_with_parts_is_continued():
    parts = [{"type": "text", "text": "What is the capital of France?"}]
    answer = {"role": "assistant", "content": "Paris."}
    messages = [{"role": "user", "content": parts}, answer, {"role": "user", "content": "And of Italy?"}]
    options = {"temperature": 0, "max_tokens": LIMIT}
    status, chunks = await send({"stream": True, "model": MODEL, "messages": messages, **options})
    equal((status, streamed(chunks)), (200, chat_text(messages)))


@scenario
async def the_small_tasks_are_answered():
    for task, (end, options) in TASKS.items():
        prompt = f"### Task:\n{task}\n### Chat History:\nUSER: {ASKED[0]['content']}\n### Output:\n{end}"
        messages = [{"role": "user", "content": prompt}]
        status, reply = await send({"model": MODEL, "messages": messages, "stream": False, "stop": ["\n"], **options})
        equal(status, 200)
        equal(reply["choices"][0]["message"]["role"], "assistant")


@scenario
async def a_native_tool_makes_a_round_trip():
    body = {"stream": True, "model": MODEL, "messages": ASKED, "tools": [TOOL], "temperature": 0, "max_tokens": 64}
    status, chunks = await send(body | {"tool_choice": "required", "parallel_tool_calls": False})
    equal(status, 200)
    deltas = [
        call for chunk in chunks for choice in chunk["choices"] for call in choice["delta"].get("tool_calls") or []
    ]
    arguments = "".join(delta["function"].get("arguments", "") for delta in deltas)
    is_weather(json.loads(arguments))
    call = {"id": deltas[0]["id"], "type": "function", "index": 0}
    call["function"] = {"name": deltas[0]["function"]["name"], "arguments": arguments}
    assistant = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": call["id"], "content": f"It is sunny in {CITIES[0]}."}
    status, chunks = await send(body | {"messages": [*ASKED, assistant, result], "tool_choice": "none"})
    equal(status, 200)
    assert streamed(chunks), chunks


@scenario
async def a_wrong_key_is_shown():
    status, reply = await send(
        {"model": MODEL, "messages": ASKED, "stream": True}, HEADERS | {"Authorization": f"Bearer {WRONG_KEY}"}
    )
    equal(status, 401)
    assert "missing or invalid API key" in reply["error"]["message"], reply


run("aiohttp")
