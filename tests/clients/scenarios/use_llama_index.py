"""LlamaIndex: OpenAILike of llama-index-llms-openai-like."""

from typing import Literal

import openai
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel
from report import (
    ASKED,
    BASE_URL,
    KEY,
    LIMIT,
    MODEL,
    QUESTION,
    SYSTEM,
    WRONG_KEY,
    chat_text,
    equal,
    is_weather,
    post,
    raises,
    run,
    scenario,
)


def model(**options):
    defaults = {"model": MODEL, "api_base": BASE_URL, "api_key": KEY, "is_chat_model": True, "max_retries": 0}
    own = {"is_function_calling_model": True, "context_window": 2048, "temperature": 0, "max_tokens": LIMIT}
    return OpenAILike(**defaults | own | options)


llm = model()
turns = [ChatMessage(role="system", content=SYSTEM), ChatMessage(role="user", content=QUESTION)]
raw = [{"role": "system", "content": SYSTEM}, *ASKED]


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome", "Oslo"]
    days: Literal[1, 2, 3]


def get_weather(city: Literal["Paris", "Rome", "Oslo"], days: Literal[1, 2, 3]) -> str:
    """Get the weather forecast of a city."""
    return f"It is sunny in {city} for {days} days."


weather_tool = FunctionTool.from_defaults(get_weather)
prompt = PromptTemplate("Where is {place}, and for how many days?")


@scenario
def chat_is_the_servers_text():
    equal(llm.chat(turns).message.content, chat_text(raw))


@scenario
def stream_adds_up():
    parts = list(llm.stream_chat(turns))
    equal("".join(part.delta or "" for part in parts), chat_text(raw))
    equal(parts[-1].message.content, chat_text(raw))


@scenario
def a_completion_is_a_chat():
    equal(llm.complete(QUESTION).text, chat_text())
    equal("".join(part.delta or "" for part in llm.stream_complete(QUESTION)), chat_text())


@scenario
def a_completion_model_uses_completions():
    body = {"model": MODEL, "prompt": "One, two, three,", "max_tokens": 8, "temperature": 0}
    expected = post("/v1/completions", **body)["choices"][0]["text"]
    found = model(is_chat_model=False, is_function_calling_model=False, max_tokens=8).complete(body["prompt"])
    equal(found.text, expected)


@scenario
async def async_chat_is_the_same():
    equal((await model().achat(turns)).message.content, chat_text(raw))


@scenario
async def async_stream_is_the_same():
    stream = await model().astream_chat(turns)
    equal("".join([part.delta or "" async for part in stream]), chat_text(raw))


@scenario
def seeds_and_other_options_are_sent():
    seeded = model(temperature=1, additional_kwargs={"seed": 11, "stop": ["."]})
    equal(seeded.chat(turns).message.content, chat_text(raw, temperature=1, seed=11, stop=["."]))


@scenario
def usage_is_the_servers():
    reply = llm.chat(turns)
    equal(reply.additional_kwargs["total_tokens"], reply.raw.usage.total_tokens)
    assert reply.raw.usage.prompt_tokens > 10


@scenario
def tools_make_a_round_trip():
    caller = model(max_tokens=64)
    reply = caller.chat_with_tools([weather_tool], user_msg=QUESTION, tool_required=True)
    [call] = caller.get_tool_calls_from_response(reply)
    equal(call.tool_name, "get_weather")
    is_weather(call.tool_kwargs)
    output = weather_tool(**call.tool_kwargs)
    result = ChatMessage(role="tool", content=str(output), additional_kwargs={"tool_call_id": call.tool_id})
    answer = llm.chat([ChatMessage(role="user", content=QUESTION), reply.message, result])
    assert answer.message.content


@scenario
def a_streamed_call_adds_up():
    caller = model(max_tokens=64)
    *_, last = caller.stream_chat_with_tools([weather_tool], user_msg=QUESTION, tool_required=True)
    [call] = caller.get_tool_calls_from_response(last)
    is_weather(call.tool_kwargs)


@scenario
async def async_tools_are_called():
    caller = model(max_tokens=64)
    reply = await caller.achat_with_tools([weather_tool], user_msg=QUESTION, tool_required=True)
    is_weather(caller.get_tool_calls_from_response(reply)[0].tool_kwargs)


@scenario
def structured_output_by_function():
    is_weather(model(max_tokens=64).structured_predict(Weather, prompt, place="Rome").model_dump())


@scenario
def structured_output_by_schema():
    structured = model(max_tokens=64, should_use_structured_outputs=True)
    is_weather(structured.structured_predict(Weather, prompt, place="Rome").model_dump())


@scenario
def a_structured_llm_chats():
    found = model(max_tokens=64).as_structured_llm(Weather).chat(turns).raw
    is_weather(found.model_dump())


@scenario
async def async_structured_output():
    is_weather((await model(max_tokens=64).astructured_predict(Weather, prompt, place="Rome")).model_dump())


@scenario
def errors_are_openais():
    raises(openai.AuthenticationError, lambda: model(api_key=WRONG_KEY).chat(turns), "missing or invalid API key")
    raises(openai.NotFoundError, lambda: model(model="gpt-x").chat(turns), "gpt-x")
    bad = model(additional_kwargs={"top_p": 2.0})
    raises(openai.BadRequestError, lambda: bad.chat(turns), "top_p=2.0")
    raises(openai.BadRequestError, lambda: list(bad.stream_chat(turns)), "top_p=2.0")


run("llama-index-llms-openai-like")
