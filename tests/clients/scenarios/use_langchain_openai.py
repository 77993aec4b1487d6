"""langchain-openai: ChatOpenAI and OpenAI of LangChain."""

from typing import Literal

import openai
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field
from report import (
    ASKED,
    BASE_URL,
    KEY,
    LIMIT,
    MODEL,
    QUESTION,
    SYSTEM,
    WRONG_KEY,
    chat,
    chat_text,
    equal,
    is_weather,
    raises,
    raises_async,
    run,
    scenario,
)


def model(**options):
    defaults = {"model": MODEL, "base_url": BASE_URL, "api_key": KEY, "temperature": 0, "max_tokens": LIMIT}
    return ChatOpenAI(**defaults | {"max_retries": 0} | options)


llm = model()


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome", "Oslo"] = Field(description="A city.")
    days: Literal[1, 2, 3] = Field(description="A number of days.")


@tool
def get_weather(city: Literal["Paris", "Rome", "Oslo"], days: Literal[1, 2, 3]) -> str:
    """Get the weather forecast of a city."""
    return f"It is sunny in {city} for {days} days."


@scenario
def chat_is_the_servers_text():
    equal(llm.invoke(QUESTION).content, chat_text())


@scenario
def messages_become_the_servers():
    turns = [SystemMessage(SYSTEM), HumanMessage("Hi."), AIMessage("Hello!"), HumanMessage(QUESTION)]
    roles = ("system", "user", "assistant", "user")
    raw = [{"role": role, "content": turn.content} for role, turn in zip(roles, turns, strict=True)]
    equal(llm.invoke(turns).content, chat_text(raw))


@scenario
def usage_and_reason_are_the_servers():
    reply, raw = llm.invoke(QUESTION), chat()
    equal(reply.usage_metadata["total_tokens"], raw["usage"]["total_tokens"])
    equal(reply.response_metadata["finish_reason"], raw["choices"][0]["finish_reason"])
    equal(reply.response_metadata["model_name"], MODEL)


@scenario
def stream_adds_up():
    equal("".join(chunk.content for chunk in llm.stream(QUESTION)), chat_text())


@scenario
def stream_has_usage():
    chunks = list(model(stream_usage=True).stream(QUESTION))
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    equal(total.usage_metadata["output_tokens"], chat()["usage"]["completion_tokens"])


@scenario
async def async_chat_is_the_same():
    equal((await llm.ainvoke(QUESTION)).content, chat_text())


@scenario
async def async_stream_is_the_same():
    equal("".join([chunk.content async for chunk in model().astream(QUESTION)]), chat_text())


@scenario
def a_batch_is_its_parts():
    questions = [QUESTION, "What is two plus two?"]
    equal(
        [reply.content for reply in llm.batch(questions)],
        [chat_text([{"role": "user", "content": question}]) for question in questions],
    )


@scenario
def a_chain_runs():
    prompt = ChatPromptTemplate.from_messages([("system", SYSTEM), ("user", "What is the capital of {country}?")])
    answer = (prompt | llm | StrOutputParser()).invoke({"country": "France"})
    equal(answer, chat_text([{"role": "system", "content": SYSTEM}, *ASKED]))


@scenario
def a_seed_and_stops_are_sent():
    seeded = model(temperature=1, seed=11, stop=["."])
    equal(seeded.invoke(QUESTION).content, chat_text(temperature=1, seed=11, stop=["."]))


@scenario
def logprobs_are_the_servers():
    reply = model(logprobs=True, top_logprobs=2).invoke(QUESTION)
    raw = chat(logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    equal([e["token"] for e in reply.response_metadata["logprobs"]["content"]], [e["token"] for e in raw])


@scenario
def tools_make_a_round_trip():
    bound = model(max_tokens=64).bind_tools([get_weather], tool_choice="any", parallel_tool_calls=False)
    called = bound.invoke(QUESTION)
    [call] = called.tool_calls
    equal(call["name"], "get_weather")
    is_weather(call["args"])
    result = get_weather.invoke(call)
    assert isinstance(result, ToolMessage)
    answer = llm.bind_tools([get_weather], tool_choice="none").invoke([HumanMessage(QUESTION), called, result])
    assert answer.content
    equal(answer.tool_calls, [])


@scenario
def a_streamed_call_adds_up():
    bound = model(max_tokens=64).bind_tools([get_weather], tool_choice="get_weather")
    chunks = list(bound.stream(QUESTION))
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    equal([call["name"] for call in total.tool_calls], ["get_weather"])
    is_weather(total.tool_calls[0]["args"])


@scenario
def structured_output_by_schema():
    found = model(max_tokens=64).with_structured_output(Weather, method="json_schema").invoke(QUESTION)
    assert isinstance(found, Weather), found
    is_weather(found.model_dump())


@scenario
def structured_output_by_function():
    found = model(max_tokens=64).with_structured_output(Weather, method="function_calling").invoke(QUESTION)
    is_weather(found.model_dump())


@scenario
def structured_output_by_json_mode():
    structured = model(max_tokens=200).with_structured_output(None, method="json_mode", include_raw=True)
    found = structured.invoke("Write a JSON object with the key city.")
    assert found["raw"].content.startswith("{"), found


@scenario
async def structured_output_async_and_streamed():
    structured = model(max_tokens=64).with_structured_output(Weather)
    is_weather((await structured.ainvoke(QUESTION)).model_dump())
    *_, last = [part async for part in structured.astream(QUESTION)]
    is_weather(last.model_dump())


@scenario
def the_responses_api_gives_the_same_text():
    reply = model(use_responses_api=True).invoke(QUESTION)
    equal(reply.text if isinstance(reply.text, str) else reply.text(), chat_text())


@scenario
def the_responses_api_streams_and_calls():
    bound = model(use_responses_api=True, max_tokens=64).bind_tools([get_weather], tool_choice="get_weather")
    is_weather(bound.invoke(QUESTION).tool_calls[0]["args"])
    chunks = list(bound.stream(QUESTION))
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    is_weather(total.tool_calls[0]["args"])


@scenario
def a_completion_is_the_servers():
    text = OpenAI(model=MODEL, base_url=BASE_URL, api_key=KEY, temperature=0, max_tokens=8).invoke("One, two, three,")
    assert "four" in text, text


@scenario
async def errors_are_openais():
    raises(openai.AuthenticationError, lambda: model(api_key=WRONG_KEY).invoke(QUESTION), "missing or invalid API key")
    raises(openai.NotFoundError, lambda: model(model="gpt-x").invoke(QUESTION), "gpt-x")
    raises(openai.BadRequestError, lambda: model(top_p=2.0).invoke(QUESTION), "top_p=2.0")
    raises(openai.BadRequestError, lambda: list(model(top_p=2.0).stream(QUESTION)), "top_p=2.0")
    await raises_async(openai.BadRequestError, model(top_p=2.0).ainvoke(QUESTION), "top_p=2.0")


run("langchain-openai")
