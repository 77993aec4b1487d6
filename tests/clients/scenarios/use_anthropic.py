"""Anthropic's SDK over /v1/messages."""

from typing import Literal

import anthropic
from pydantic import BaseModel
from report import (
    ASKED,
    KEY,
    LIMIT,
    MODEL,
    SYSTEM,
    URL,
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

client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
ask = client.messages.create
# The SDK has no arguments for sampling any more.
OPTIONS = {"model": MODEL, "max_tokens": LIMIT, "messages": ASKED, "extra_body": {"temperature": 0}}
TOOL = {"name": "get_weather", "description": "The forecast of a city.", "input_schema": WEATHER_SCHEMA}
NAMED = {"type": "tool", "name": "get_weather"}


class Weather(BaseModel):
    city: Literal["Paris", "Rome", "Oslo"]
    days: Literal[1, 2, 3]


def new_async():
    return anthropic.AsyncAnthropic(base_url=URL, api_key=KEY, max_retries=0)


@scenario
def a_message_is_the_servers_text():
    equal(ask(**OPTIONS).content[0].text, chat_text())


@scenario
def a_system_is_a_system_message():
    equal(ask(**OPTIONS, system=SYSTEM).content[0].text, chat_text([{"role": "system", "content": SYSTEM}, *ASKED]))


@scenario
def usage_is_the_servers():
    usage, raw = ask(**OPTIONS).usage, chat()["usage"]
    equal(usage.output_tokens, raw["completion_tokens"])
    equal(usage.input_tokens + (usage.cache_read_input_tokens or 0), raw["prompt_tokens"])


@scenario
def stream_adds_up():
    with client.messages.stream(**OPTIONS) as stream:
        equal("".join(stream.text_stream), chat_text())
        equal(stream.get_final_message().content[0].text, chat_text())


@scenario
def raw_events_come_in_order():
    kinds = [event.type for event in ask(**OPTIONS, stream=True)]
    equal((kinds[0], kinds[-1]), ("message_start", "message_stop"))
    equal(kinds.count("content_block_start"), kinds.count("content_block_stop"))


@scenario
async def async_message_is_the_same():
    equal((await new_async().messages.create(**OPTIONS)).content[0].text, chat_text())


@scenario
async def async_stream_is_the_same():
    async with new_async().messages.stream(**OPTIONS) as stream:
        equal("".join([text async for text in stream.text_stream]), chat_text())


@scenario
def stops_are_sent():
    reply = ask(**OPTIONS, stop_sequences=["."])
    equal(
        (reply.content[0].text, reply.stop_reason, reply.stop_sequence), (chat_text(stop=["."]), "stop_sequence", ".")
    )


@scenario
def max_tokens_is_the_reason():
    equal(ask(**OPTIONS | {"max_tokens": 2}).stop_reason, "max_tokens")


@scenario
def tools_make_a_round_trip():
    reply = ask(**OPTIONS | {"max_tokens": 64}, tools=[TOOL], tool_choice=NAMED)
    [call] = [block for block in reply.content if block.type == "tool_use"]
    is_weather(call.input)
    equal(reply.stop_reason, "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "It is sunny."}
    turns = [*ASKED, {"role": "assistant", "content": reply.content}, {"role": "user", "content": [result]}]
    answer = ask(**OPTIONS | {"messages": turns}, tools=[TOOL], tool_choice={"type": "none"})
    equal([block.type for block in answer.content], ["text"])


@scenario
def a_streamed_call_adds_up():
    options = OPTIONS | {"max_tokens": 64, "tools": [TOOL], "tool_choice": {"type": "any"}}
    with client.messages.stream(**options) as stream:
        message = stream.get_final_message()
    is_weather(next(block for block in message.content if block.type == "tool_use").input)


@scenario
def structured_output_is_parsed():
    reply = client.messages.parse(**OPTIONS | {"max_tokens": 64}, output_format=Weather)
    is_weather(reply.parsed_output.model_dump())


@scenario
def tokens_are_counted():
    counted = client.messages.count_tokens(model=MODEL, messages=ASKED).input_tokens
    equal(counted, chat()["usage"]["prompt_tokens"])


@scenario
def the_model_is_listed():
    equal([found.id for found in client.models.list()], [MODEL])
    equal(client.models.retrieve(MODEL).id, MODEL)


@scenario
def a_runner_runs_the_tool():
    calls = []

    @anthropic.beta_tool
    def get_weather(city: str, days: int) -> str:
        """Get the weather forecast of a city.

        Args:
            city: Paris, Rome or Oslo.
            days: 1, 2 or 3.
        """
        calls.append((city, days))
        return "It is sunny."

    options = OPTIONS | {"max_tokens": 96}
    runner = client.beta.messages.tool_runner(**options, tools=[get_weather], tool_choice=NAMED, max_iterations=1)
    messages = list(runner)
    equal([block.name for block in messages[0].content if block.type == "tool_use"], ["get_weather"])


@scenario
def errors_are_its_own():
    wrong = anthropic.Anthropic(base_url=URL, api_key=WRONG_KEY, max_retries=0).messages.create
    raises(anthropic.AuthenticationError, lambda: wrong(**OPTIONS), "missing or invalid API key")
    raises(anthropic.NotFoundError, lambda: ask(**OPTIONS | {"model": "claude-x"}), "claude-x")
    error = raises(
        anthropic.BadRequestError, lambda: ask(**OPTIONS | {"extra_body": {"temperature": 3}}), "temperature=3"
    )
    equal(error.body["error"]["type"], "invalid_request_error")


run("anthropic")
