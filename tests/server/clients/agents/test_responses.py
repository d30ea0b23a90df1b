"""Calls of functions, formats and agents through the Responses API, over a real model."""

import json
from typing import Literal

import litellm
from pydantic import BaseModel, Field
from pydantic_ai import Agent, ToolOutput
from pydantic_ai.models.openai import OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

WEATHER = {"type": "function", "name": "get_weather", "description": "The weather in a city.", "strict": True,
           "parameters": {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"],
                          "additionalProperties": False}}


class City(BaseModel):  # bounded, so that a small model comes to its end
    name: Literal["Rome", "Oslo"]
    inhabitants: int = Field(ge=0, le=9_999_999)


def ask(client, model, **more):
    options = dict(model=model, input="What is the weather in Rome?", tools=[WEATHER], tool_choice="required",
                   temperature=0, max_output_tokens=150, parallel_tool_calls=False)
    return client.responses.create(**{**options, **more})


def test_a_call_and_its_result(client, model):
    response = ask(client, model)
    call = response.output[-1]
    assert call.type == "function_call" and call.name == "get_weather" and call.status == "completed"
    assert json.loads(call.arguments)["city"] in ("Rome", "Oslo") and call.call_id != call.id
    history = [{"role": "user", "content": "What is the weather in Rome?"}, call.model_dump(exclude_none=True),
               {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    answer = ask(client, model, input=history, tool_choice="none")
    assert answer.output_text and [item.type for item in answer.output] == ["message"]


def test_streamed_arguments_add_up(client, model):
    whole = ask(client, model, tool_choice={"type": "function", "name": "get_weather"}).output[-1]
    events = list(ask(client, model, tool_choice={"type": "function", "name": "get_weather"}, stream=True))
    arguments = "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta")
    done = [e for e in events if e.type == "response.function_call_arguments.done"]
    assert arguments == whole.arguments and len(done) == 1 and done[0].arguments == arguments
    assert events[-1].type == "response.completed" and events[-1].response.output[-1].arguments == arguments


def test_parse_gives_a_pydantic_object(client, model):
    response = client.responses.parse(model=model, input="Describe Rome.", text_format=City, temperature=0,
                                      max_output_tokens=300)
    assert isinstance(response.output_parsed, City)


def test_litellm_understands_responses(base_url, model):
    response = litellm.responses(model="openai/" + model, api_base=base_url + "/v1", api_key="none",
                                 input="Tell me a story.", temperature=0, max_output_tokens=20)
    assert response.output[0].content[0].text and response.usage.output_tokens > 0


class Report(BaseModel):
    warm: bool


def test_an_agent_calls_a_tool_and_reports(base_url, model):
    called = []

    def next_call(_):  # the model is a small one, so it is told what to call
        name = (["get_weather"] + ["final_result"] * 9)[len(called)]
        return ModelSettings(temperature=0, max_tokens=200, parallel_tool_calls=False,
                             extra_body={"tool_choice": {"type": "function", "name": name}})

    chat = OpenAIResponsesModel(model, provider=OpenAIProvider(base_url=base_url + "/v1", api_key="none"))
    agent = Agent(chat, output_type=ToolOutput(Report), model_settings=next_call)

    @agent.tool_plain
    def get_weather(city: Literal["Rome", "Oslo"]) -> str:
        """The weather in a city."""
        called.append("get_weather")
        return "sunny in " + city

    result = agent.run_sync("What is the weather in Rome?")
    assert called == ["get_weather"]
    assert isinstance(result.output, Report)
