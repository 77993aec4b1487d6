"""Instructor: structured output in its modes of OpenAI's client."""

from typing import Literal

import instructor
import openai
from instructor.core.exceptions import IncompleteOutputException, InstructorRetryException
from pydantic import BaseModel, Field, field_validator
from report import (
    ASKED,
    BASE_URL,
    KEY,
    LIMIT,
    MODEL,
    WRONG_KEY,
    chat_text,
    equal,
    is_weather,
    outcome_of,
    raises,
    run,
    scenario,
)

client = openai.OpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0)
OPTIONS = {"model": MODEL, "messages": ASKED, "max_tokens": 96, "temperature": 0, "max_retries": 0}


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome", "Oslo"]
    days: Literal[1, 2, 3]


class Trip(BaseModel):
    """Two cities."""

    stops: list[Weather] = Field(min_length=2, max_length=2)


class Rome(Weather):
    @field_validator("city")
    @classmethod
    def _is_rome(cls, city: str) -> str:
        if city != "Rome":
            raise ValueError("only Rome")
        return city


def patched(mode):
    return instructor.from_openai(client, mode=mode)


def patched_async(mode):
    asynchronous = openai.AsyncOpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0)
    return instructor.from_openai(asynchronous, mode=mode)


def create(mode, **changes):
    return patched(mode).chat.completions.create(**OPTIONS | {"response_model": Weather} | changes)


@scenario
def mode_tools():
    is_weather(create(instructor.Mode.TOOLS).model_dump())


@scenario
def mode_tools_strict():
    is_weather(create(instructor.Mode.TOOLS_STRICT).model_dump())


@scenario
def mode_json_schema():
    is_weather(create(instructor.Mode.JSON_SCHEMA).model_dump())


@scenario
def mode_json_sends_a_json_object():
    """A small model seldom follows a schema that it only reads, so the text is what is checked."""
    found = outcome_of(lambda: create(instructor.Mode.JSON))
    if isinstance(found, Weather):
        return
    assert isinstance(found, InstructorRetryException | IncompleteOutputException), found
    assert found.last_completion.choices[0].message.content.startswith("{"), found


@scenario
def mode_responses_tools():
    found = patched(instructor.Mode.RESPONSES_TOOLS).responses.create(
        model=MODEL, input=ASKED, max_output_tokens=96, temperature=0, response_model=Weather, max_retries=0
    )
    is_weather(found.model_dump())


@scenario
def plain_chat_is_the_servers_text():
    reply = create(instructor.Mode.TOOLS, response_model=None, max_tokens=LIMIT)
    equal(reply.choices[0].message.content, chat_text())


@scenario
def the_raw_reply_comes_with_the_object():
    patched_client = patched(instructor.Mode.TOOLS)
    found, raw = patched_client.chat.completions.create_with_completion(**OPTIONS, response_model=Weather)
    is_weather(found.model_dump())
    assert raw.usage.completion_tokens > 0


@scenario
def an_invalid_object_is_asked_for_again():
    """Each try is one more call with the error in the conversation."""
    calls = []
    patched_client = patched(instructor.Mode.TOOLS)
    patched_client.on("completion:kwargs", lambda *_, **options: calls.append(options["messages"]))
    found = outcome_of(
        lambda: patched_client.chat.completions.create(**OPTIONS | {"response_model": Rome, "max_retries": 2})
    )
    assert len(calls) > 1 or isinstance(found, Rome), found
    if len(calls) > 1:
        equal([message["role"] for message in calls[-1]][:3], ["user", "assistant", "tool"])


@scenario
def partial_objects_are_streamed():
    *parts, last = patched(instructor.Mode.TOOLS).chat.completions.create_partial(**OPTIONS, response_model=Weather)
    assert parts
    is_weather(last.model_dump())


@scenario
def a_list_of_objects_has_its_length():
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        trip = create(mode, response_model=Trip)
        equal(len(trip.stops), 2)
        for stop in trip.stops:
            is_weather(stop.model_dump())


@scenario
async def async_tools():
    found = await patched_async(instructor.Mode.TOOLS).chat.completions.create(**OPTIONS, response_model=Weather)
    is_weather(found.model_dump())


@scenario
async def async_json_schema():
    found = await patched_async(instructor.Mode.JSON_SCHEMA).chat.completions.create(**OPTIONS, response_model=Weather)
    is_weather(found.model_dump())


@scenario
def a_provider_name_makes_a_client():
    made = instructor.from_provider(f"openai/{MODEL}", base_url=BASE_URL, api_key=KEY)
    options = {name: value for name, value in OPTIONS.items() if name != "model"}
    is_weather(made.chat.completions.create(**options, response_model=Weather).model_dump())


@scenario
def errors_name_their_cause():
    kinds = (openai.APIStatusError, InstructorRetryException)
    wrong = instructor.from_openai(openai.OpenAI(base_url=BASE_URL, api_key=WRONG_KEY, max_retries=0))
    ask = wrong.chat.completions.create
    raises(kinds, lambda: ask(**OPTIONS, response_model=Weather), "missing or invalid API key")
    raises(kinds, lambda: create(instructor.Mode.TOOLS, model="gpt-x"), "gpt-x")
    raises(kinds, lambda: create(instructor.Mode.TOOLS, top_p=2.0), "top_p=2.0")


run("instructor")
