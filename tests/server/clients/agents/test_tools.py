"""What users of OpenAI's client, LiteLLM and an agent framework see of tools, over a real model. A grammar makes the
model call; what it calls with is its own."""

import json
from typing import Literal

import litellm
import openai
import pytest
from pydantic import BaseModel, Field
from pydantic_ai import Agent, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "The weather in a city.", "parameters": {
        "type": "object", "properties": {"city": {"type": "string", "maxLength": 20},
                                         "unit": {"enum": ["celsius", "fahrenheit"]}},
        "required": ["city", "unit"]}}}
CLOCK = {"type": "function", "function": {
    "name": "get_time", "description": "The time in a city.", "parameters": {
        "type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}}}
ASK = [{"role": "user", "content": "What is the weather in Rome?"}]


class City(BaseModel):  # bounded, so that a small model comes to its end
    name: Literal["Rome", "Oslo"]
    inhabitants: int = Field(ge=0, le=9_999_999)


def named(name):
    return {"type": "function", "function": {"name": name}}


def ask(client, model, **more):
    options = dict(model=model, messages=ASK, tools=[WEATHER, CLOCK], temperature=0, max_tokens=150,
                   parallel_tool_calls=False)
    return client.chat.completions.create(**{**options, **more})


def check(call):
    assert call.id and call.type == "function"
    arguments = json.loads(call.function.arguments)
    if call.function.name == "get_weather":
        assert set(arguments) == {"city", "unit"} and arguments["unit"] in ("celsius", "fahrenheit")
    else:
        assert call.function.name == "get_time" and arguments["city"] in ("Rome", "Oslo")


def test_a_required_call_comes(client, model):
    choice = ask(client, model, tool_choice="required").choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert len(choice.message.tool_calls) == 1
    check(choice.message.tool_calls[0])


@pytest.mark.parametrize("name", ["get_weather", "get_time"])
def test_a_named_call_is_of_that_function(client, model, name):
    call = ask(client, model, tool_choice=named(name)).choices[0].message.tool_calls[0]
    check(call)
    assert call.function.name == name


def test_streamed_deltas_add_up_to_the_whole_call(client, model):
    whole = ask(client, model, tool_choice=named("get_weather"), seed=5).choices[0].message.tool_calls[0]
    name, arguments, ids, last = "", "", [], None
    for chunk in ask(client, model, tool_choice=named("get_weather"), seed=5, stream=True):
        last = chunk.choices[0]
        for call in last.delta.tool_calls or []:
            assert call.index == 0
            ids += [call.id] if call.id else []
            name += call.function.name or ""
            arguments += call.function.arguments or ""
    assert (name, arguments) == (whole.function.name, whole.function.arguments)
    assert len(ids) == 1 and last.finish_reason == "tool_calls"


def test_the_stream_helper_understands_it(client, model):
    with client.chat.completions.stream(model=model, messages=ASK, tools=[openai.pydantic_function_tool(City)],
                                        tool_choice="required", parallel_tool_calls=False, temperature=0,
                                        max_tokens=150) as stream:
        for _ in stream:
            pass
        call = stream.get_final_completion().choices[0].message.tool_calls[0]
    assert isinstance(call.function.parsed_arguments, City)


def test_parse_gives_a_pydantic_object(client, model):
    completion = client.chat.completions.parse(
        model=model, messages=[{"role": "user", "content": "Describe Rome."}], response_format=City, temperature=0,
        max_tokens=300)
    assert isinstance(completion.choices[0].message.parsed, City)


def test_two_tools_in_turn_with_their_results(client, model):
    messages = list(ASK)
    for name, result in (("get_weather", "sunny"), ("get_time", "12:00")):
        message = ask(client, model, messages=messages, tool_choice=named(name)).choices[0].message
        messages += [message.model_dump(exclude_none=True),
                     {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": result}]
    answer = ask(client, model, messages=messages, tool_choice="none").choices[0]
    assert answer.message.content and not answer.message.tool_calls


def test_litellm_knows_a_prompt_that_is_too_long(base_url, model):
    server = dict(model="openai/" + model, api_base=base_url + "/v1", api_key="none", num_retries=0)
    for more in (dict(messages=[{"role": "user", "content": "x " * 9000}]), dict(messages=ASK, max_tokens=100_000)):
        with pytest.raises(litellm.ContextWindowExceededError):
            litellm.completion(**server, **more)


def test_litellm_understands_calls(base_url, model):
    options = dict(model="openai/" + model, api_base=base_url + "/v1", api_key="none", messages=ASK,
                   tools=[WEATHER, CLOCK], tool_choice="required", temperature=0, max_tokens=150)
    check(litellm.completion(**options).choices[0].message.tool_calls[0])
    chunks = list(litellm.completion(stream=True, **options))
    check(litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls[0])


class Report(BaseModel):
    warm: bool


def test_an_agent_calls_two_tools_in_turn(base_url, model):
    called = []

    def next_call(_):  # the model is a small one, so it is told what to call
        name = (["get_weather", "get_time"] + ["final_result"] * 9)[len(called)]
        return ModelSettings(temperature=0, max_tokens=200, parallel_tool_calls=False,
                             extra_body={"tool_choice": named(name)})

    chat = OpenAIChatModel(model, provider=OpenAIProvider(base_url=base_url + "/v1", api_key="none"))
    agent = Agent(chat, output_type=ToolOutput(Report), model_settings=next_call)

    @agent.tool_plain
    def get_weather(city: Literal["Rome", "Oslo"]) -> str:
        """The weather in a city."""
        called.append("get_weather")
        return "sunny in " + city

    @agent.tool_plain
    def get_time(city: Literal["Rome", "Oslo"]) -> str:
        """The time in a city."""
        called.append("get_time")
        return "12:00 in " + city

    result = agent.run_sync("What are the weather and the time in Rome?")
    assert called == ["get_weather", "get_time"]
    assert isinstance(result.output, Report)
