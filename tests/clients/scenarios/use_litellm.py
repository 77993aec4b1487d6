"""LiteLLM: its `openai/` and `hosted_vllm/` providers, and Anthropic's."""

import json
import os
from typing import Literal

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no download of a price list

import litellm
from pydantic import BaseModel
from report import (
    ASKED,
    BASE_URL,
    KEY,
    LIMIT,
    MODEL,
    QUESTION,
    URL,
    WEATHER_SCHEMA,
    WRONG_KEY,
    chat,
    chat_text,
    equal,
    is_weather,
    post,
    raises,
    raises_async,
    run,
    scenario,
)

litellm.telemetry = False
OPTIONS = {
    "model": f"openai/{MODEL}",
    "api_base": BASE_URL,
    "api_key": KEY,
    "messages": ASKED,
    "max_tokens": LIMIT,
    "temperature": 0,
    "num_retries": 0,
    "max_retries": 0,
}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER_SCHEMA}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


class Weather(BaseModel):
    city: Literal["Paris", "Rome", "Oslo"]
    days: Literal[1, 2, 3]


def ask(**changes):
    return litellm.completion(**OPTIONS | changes)


def text_of(chunks):
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


@scenario
def chat_is_the_servers_text():
    equal(ask().choices[0].message.content, chat_text())


@scenario
def usage_is_the_servers():
    equal(ask().usage.total_tokens, chat()["usage"]["total_tokens"])


@scenario
def stream_adds_up():
    chunks = list(ask(stream=True, stream_options={"include_usage": True}))
    equal(text_of(chunks), chat_text())
    equal(chunks[-1].usage.completion_tokens, chat()["usage"]["completion_tokens"])
    equal(litellm.stream_chunk_builder(chunks).choices[0].message.content, chat_text())


@scenario
async def async_chat_is_the_same():
    equal((await litellm.acompletion(**OPTIONS)).choices[0].message.content, chat_text())


@scenario
async def async_stream_is_the_same():
    stream = await litellm.acompletion(**OPTIONS, stream=True)
    equal(text_of([chunk async for chunk in stream]), chat_text())


@scenario
def a_seed_and_stops_are_sent():
    found = ask(temperature=1, seed=11, stop=["."]).choices[0].message.content
    equal(found, chat_text(temperature=1, seed=11, stop=["."]))


@scenario
def several_choices_come_back():
    found = [choice.message.content for choice in ask(n=2, temperature=1, seed=3).choices]
    raw = [choice["message"]["content"] for choice in chat(n=2, temperature=1, seed=3)["choices"]]
    equal(found, raw)


@scenario
def logprobs_are_the_servers():
    found = ask(logprobs=True, top_logprobs=2).choices[0].logprobs
    entries = found["content"] if isinstance(found, dict) else found.content
    tokens = [entry["token"] if isinstance(entry, dict) else entry.token for entry in entries]
    raw = chat(logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    equal(tokens, [entry["token"] for entry in raw])


@scenario
def the_vllm_provider_is_the_same():
    equal(ask(model=f"hosted_vllm/{MODEL}").choices[0].message.content, chat_text())


@scenario
def the_vllm_provider_passes_its_options():
    found = ask(model=f"hosted_vllm/{MODEL}", extra_body={"guided_choice": ["yes", "no"]}).choices[0].message.content
    assert found in ("yes", "no"), found


@scenario
def a_completion_is_the_servers():
    body = {"prompt": "One, two, three,", "max_tokens": 8, "temperature": 0}
    found = litellm.text_completion(model=f"text-completion-openai/{MODEL}", api_base=BASE_URL, api_key=KEY, **body)
    equal(found.choices[0].text, post("/v1/completions", model=MODEL, **body)["choices"][0]["text"])


@scenario
def tools_make_a_round_trip():
    message = ask(tools=[TOOL], tool_choice=NAMED, max_tokens=64).choices[0].message
    [call] = message.tool_calls
    is_weather(json.loads(call.function.arguments))
    turns = [*ASKED, message, {"role": "tool", "tool_call_id": call.id, "content": "It is sunny."}]
    assert ask(messages=turns, tools=[TOOL], tool_choice="none").choices[0].message.content


@scenario
def a_streamed_call_adds_up():
    chunks = list(ask(tools=[TOOL], tool_choice="required", parallel_tool_calls=False, max_tokens=64, stream=True))
    message = litellm.stream_chunk_builder(chunks).choices[0].message
    is_weather(json.loads(message.tool_calls[0].function.arguments))


@scenario
def structured_output_is_valid():
    found = ask(response_format=Weather, max_tokens=64).choices[0].message.content
    is_weather(Weather.model_validate_json(found).model_dump())
    found = ask(model=f"hosted_vllm/{MODEL}", response_format=Weather, max_tokens=64).choices[0].message.content
    is_weather(Weather.model_validate_json(found).model_dump())


@scenario
def the_responses_api_gives_the_same_text():
    options = {"model": OPTIONS["model"], "api_base": BASE_URL, "api_key": KEY, "temperature": 0}
    reply = litellm.responses(input=QUESTION, max_output_tokens=LIMIT, **options)
    equal(reply.output[0].content[0].text, chat_text())


@scenario
def the_anthropic_provider_gives_the_same_text():
    reply = ask(model=f"anthropic/{MODEL}", api_base=URL)
    equal(reply.choices[0].message.content, chat_text())
    equal(text_of(ask(model=f"anthropic/{MODEL}", api_base=URL, stream=True)), chat_text())


@scenario
async def errors_are_its_own():
    raises(litellm.AuthenticationError, lambda: ask(api_key=WRONG_KEY), "missing or invalid API key")
    raises(litellm.NotFoundError, lambda: ask(model="openai/gpt-x"), "gpt-x")
    raises(litellm.BadRequestError, lambda: ask(top_p=2.0), "top_p=2.0")
    raises(litellm.BadRequestError, lambda: list(ask(top_p=2.0, stream=True)), "top_p=2.0")
    await raises_async(litellm.BadRequestError, litellm.acompletion(**OPTIONS, top_p=2.0), "top_p=2.0")


run("litellm")
