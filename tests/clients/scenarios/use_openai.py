"""openai-python, as pip installs it. The ordinary tests have its many scenarios; these need a model that talks."""

import json
from typing import Literal

import openai
from pydantic import BaseModel
from report import (
    ASKED,
    BASE_URL,
    KEY,
    LIMIT,
    MODEL,
    QUESTION,
    WEATHER_SCHEMA,
    WRONG_KEY,
    chat,
    chat_text,
    equal,
    is_weather,
    raises,
    run,
    scenario,
)

client = openai.OpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0)
ask = client.chat.completions.create
OPTIONS = {"model": MODEL, "messages": ASKED, "max_tokens": LIMIT, "temperature": 0}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER_SCHEMA, "strict": True}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


class Weather(BaseModel):
    city: Literal["Paris", "Rome", "Oslo"]
    days: Literal[1, 2, 3]


def new_async() -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0)


@scenario
def chat_is_the_servers_text():
    reply = ask(**OPTIONS)
    equal(reply.choices[0].message.content, chat_text())
    assert "Paris" in reply.choices[0].message.content


@scenario
def usage_is_the_servers():
    equal(ask(**OPTIONS).usage.total_tokens, chat()["usage"]["total_tokens"])


@scenario
def stream_adds_up():
    equal("".join(c.choices[0].delta.content or "" for c in ask(**OPTIONS, stream=True)), chat_text())


@scenario
def a_seed_repeats_a_sampled_text():
    options = OPTIONS | {"temperature": 1, "seed": 11}
    equal(ask(**options).choices[0].message.content, chat_text(temperature=1, seed=11))


@scenario
async def async_chat_is_the_same():
    reply = await new_async().chat.completions.create(**OPTIONS)
    equal(reply.choices[0].message.content, chat_text())


@scenario
async def async_stream_is_the_same():
    stream = await new_async().chat.completions.create(**OPTIONS, stream=True)
    equal("".join([c.choices[0].delta.content or "" async for c in stream]), chat_text())


@scenario
def completion_is_the_servers():
    reply = client.completions.create(model=MODEL, prompt="One, two, three,", max_tokens=8, temperature=0)
    assert "four" in reply.choices[0].text, reply.choices[0].text


@scenario
def response_is_the_chats_text():
    reply = client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=LIMIT, temperature=0)
    equal(reply.output_text, chat_text())


@scenario
def tools_make_a_round_trip():
    options = OPTIONS | {"max_tokens": 64}
    message = ask(**options, tools=[TOOL], tool_choice=NAMED).choices[0].message
    [call] = message.tool_calls
    is_weather(json.loads(call.function.arguments))
    turns = [*ASKED, message, {"role": "tool", "tool_call_id": call.id, "content": "It is sunny."}]
    answer = ask(**options | {"messages": turns}, tools=[TOOL], tool_choice="none")
    assert answer.choices[0].message.content


@scenario
def a_streamed_call_adds_up():
    options = OPTIONS | {"max_tokens": 64, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    with client.chat.completions.stream(**options) as stream:
        for _ in stream:
            pass
        [call] = stream.get_final_completion().choices[0].message.tool_calls
    is_weather(json.loads(call.function.arguments))


@scenario
def structured_output_is_parsed():
    reply = client.chat.completions.parse(**OPTIONS | {"max_tokens": 64}, response_format=Weather)
    is_weather(reply.choices[0].message.parsed.model_dump())


@scenario
def a_response_is_parsed():
    reply = client.responses.parse(
        model=MODEL, input=QUESTION, max_output_tokens=64, temperature=0, text_format=Weather
    )
    is_weather(reply.output_parsed.model_dump())


@scenario
def errors_are_its_own():
    wrong = openai.OpenAI(base_url=BASE_URL, api_key=WRONG_KEY, max_retries=0).chat.completions.create
    raises(openai.AuthenticationError, lambda: wrong(**OPTIONS), "missing or invalid API key")
    raises(openai.NotFoundError, lambda: ask(**OPTIONS | {"model": "gpt-x"}), "gpt-x")
    raises(openai.BadRequestError, lambda: ask(**OPTIONS | {"top_p": 2}), "top_p=2")


run("openai")
