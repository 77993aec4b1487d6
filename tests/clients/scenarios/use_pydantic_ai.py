"""Pydantic AI: agents over its OpenAI chat, OpenAI responses and Anthropic models."""

from typing import Literal

from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.direct import model_request_sync
from pydantic_ai.exceptions import ModelHTTPError, UsageLimitExceeded
from pydantic_ai.messages import ModelRequest, TextPart, ToolCallPart, ToolReturnPart
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.tools import ToolDefinition
from pydantic_ai.usage import UsageLimits
from report import (
    ASKED,
    BASE_URL,
    KEY,
    LIMIT,
    MODEL,
    QUESTION,
    SYSTEM,
    WEATHER_SCHEMA,
    WRONG_KEY,
    chat,
    chat_text,
    equal,
    is_weather,
    outcome_of,
    raises_async,
    run,
    scenario,
)

SETTINGS = {"temperature": 0.0, "max_tokens": LIMIT}
LONGER = {"temperature": 0.0, "max_tokens": 64}


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome", "Oslo"]
    days: Literal[1, 2, 3]


def model(name=MODEL, key=KEY, kind=OpenAIChatModel):
    client = AsyncOpenAI(base_url=BASE_URL, api_key=key, max_retries=0)
    return kind(name, provider=OpenAIProvider(openai_client=client))


def agent(**options):
    return Agent(model(), **{"model_settings": SETTINGS, "retries": 0} | options)


@scenario
def a_run_is_the_servers_text():
    equal(agent().run_sync(QUESTION).output, chat_text())


@scenario
def instructions_are_a_system_message():
    raw = [{"role": "system", "content": SYSTEM}, *ASKED]
    equal(agent(instructions=SYSTEM).run_sync(QUESTION).output, chat_text(raw))


@scenario
def usage_is_the_servers():
    usage = agent().run_sync(QUESTION).usage
    usage = usage() if callable(usage) else usage
    raw = chat()["usage"]
    equal((usage.input_tokens, usage.output_tokens), (raw["prompt_tokens"], raw["completion_tokens"]))


@scenario
async def an_async_run_is_the_same():
    equal((await agent().run(QUESTION)).output, chat_text())


@scenario
async def a_stream_adds_up():
    async with agent().run_stream(QUESTION) as result:
        parts = [part async for part in result.stream_text(delta=True, debounce_by=None)]
        equal("".join(parts), chat_text())
        usage = result.usage() if callable(result.usage) else result.usage
        equal(usage.output_tokens, chat()["usage"]["completion_tokens"])


@scenario
def a_seed_is_sent():
    seeded = agent(model_settings=SETTINGS | {"temperature": 1.0, "seed": 11})
    equal(seeded.run_sync(QUESTION).output, chat_text(temperature=1, seed=11))


@scenario
def a_conversation_goes_on():
    first = agent().run_sync(QUESTION)
    second = agent().run_sync("And of Italy?", message_history=first.new_messages())
    raw = [*ASKED, {"role": "assistant", "content": first.output}, {"role": "user", "content": "And of Italy?"}]
    equal(second.output, chat_text(raw))


@scenario
def output_by_tool():
    is_weather(agent(output_type=ToolOutput(Weather), model_settings=LONGER).run_sync(QUESTION).output.model_dump())


@scenario
def output_by_schema():
    is_weather(agent(output_type=NativeOutput(Weather), model_settings=LONGER).run_sync(QUESTION).output.model_dump())


@scenario
def output_by_prompt_is_json():
    """A small model seldom follows a schema that it only reads, so only the request must be accepted."""
    prompted = agent(output_type=PromptedOutput(Weather), model_settings=LONGER)
    found = outcome_of(lambda: prompted.run_sync(QUESTION))
    assert not isinstance(found, ModelHTTPError), found


@scenario
async def output_is_streamed():
    structured = agent(output_type=ToolOutput(Weather), model_settings=LONGER)
    async with structured.run_stream(QUESTION) as result:
        is_weather((await result.get_output()).model_dump())


def request(messages, kind=OpenAIChatModel, **settings):
    """One request without an agent, with the tool get_weather."""
    tool = ToolDefinition(name="get_weather", description="The forecast.", parameters_json_schema=WEATHER_SCHEMA)
    parameters = ModelRequestParameters(function_tools=[tool], allow_text_output=True)
    return model_request_sync(
        model(kind=kind), messages, model_settings=LONGER | settings, model_request_parameters=parameters
    )


def round_trip(kind):
    turns = [ModelRequest.user_text_prompt(QUESTION)]
    called = request(turns, kind, tool_choice=["get_weather"], parallel_tool_calls=False)
    calls = [part for part in called.parts if isinstance(part, ToolCallPart)]
    assert len(calls) == 1, called.parts
    [call] = calls
    equal(call.tool_name, "get_weather")
    is_weather(call.args_as_dict())
    result = ToolReturnPart(tool_name=call.tool_name, content="It is sunny.", tool_call_id=call.tool_call_id)
    answer = request([*turns, called, ModelRequest(parts=[result])], kind, tool_choice="none")
    equal([type(part) for part in answer.parts], [TextPart])


@scenario
def tools_make_a_round_trip():
    round_trip(OpenAIChatModel)


@scenario
def tools_make_a_round_trip_by_the_responses_model():
    round_trip(OpenAIResponsesModel)


@scenario
def an_agent_loops_until_it_has_an_output():
    """Each step must call a tool or the output; the model is too small for knowing when to end."""
    seen = []
    names = ["get_weather", "final_result"]  # sent as OpenAI's `allowed_tools`
    calling = Agent(model(), output_type=ToolOutput(Weather), model_settings=LONGER | {"tool_choice": names})

    @calling.tool_plain
    def get_weather(city: Literal["Paris", "Rome", "Oslo"], days: Literal[1, 2, 3]) -> str:
        """Get the weather forecast of a city."""
        seen.append({"city": city, "days": days})
        return f"It is sunny in {city} for {days} days."

    @calling.tool_plain
    def get_news() -> str:
        """Get the news."""
        raise AssertionError("not allowed")

    found = outcome_of(lambda: calling.run_sync(QUESTION, usage_limits=UsageLimits(request_limit=4)))
    for arguments in seen:
        is_weather(arguments)
    if not isinstance(found, UsageLimitExceeded):
        assert not isinstance(found, Exception), found
        is_weather(found.output.model_dump())


@scenario
def the_responses_model_is_the_same():
    responding = Agent(model(kind=OpenAIResponsesModel), model_settings=SETTINGS)
    equal(responding.run_sync(QUESTION).output, chat_text())


@scenario
def the_responses_model_has_structured_output():
    for kind in (ToolOutput, NativeOutput):
        responding = Agent(model(kind=OpenAIResponsesModel), output_type=kind(Weather), model_settings=LONGER)
        is_weather(responding.run_sync(QUESTION).output.model_dump())


@scenario
async def the_responses_model_streams():
    responding = Agent(model(kind=OpenAIResponsesModel), model_settings=SETTINGS)
    async with responding.run_stream(QUESTION) as result:
        parts = [part async for part in result.stream_text(delta=True, debounce_by=None)]
    equal("".join(parts), chat_text())


@scenario
async def errors_are_its_own():
    def failing(**options):
        return Agent(model(**options), model_settings=SETTINGS)

    unauthorized = failing(key=WRONG_KEY).run(QUESTION)
    equal((await raises_async(ModelHTTPError, unauthorized, "missing or invalid")).status_code, 401)
    unknown = failing(name="gpt-x").run(QUESTION)
    equal((await raises_async(ModelHTTPError, unknown, "gpt-x")).status_code, 404)
    bad = failing().run(QUESTION, model_settings={"top_p": 2.0})
    equal((await raises_async(ModelHTTPError, bad, "top_p=2.0")).status_code, 400)


run("pydantic-ai-slim")
