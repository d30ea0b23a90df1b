"""Calls of functions through the Messages API, over a real model."""

import anthropic
import pytest

WEATHER = {"name": "get_weather", "description": "The weather in a city.", "input_schema": {
    "type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}}
ASK = [{"role": "user", "content": "What is the weather in Rome?"}]


@pytest.fixture
def options(model):
    return dict(model=model, messages=ASK, max_tokens=150, tools=[WEATHER], extra_body={"temperature": 0},
                tool_choice={"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True})


@pytest.fixture(scope="session")
def messages(base_url):
    return anthropic.Anthropic(base_url=base_url, api_key="none", max_retries=0, timeout=240).messages


def test_a_call_and_its_result(messages, options):
    message = messages.create(**options)
    call = message.content[-1]
    assert message.stop_reason == "tool_use" and call.type == "tool_use" and call.name == "get_weather"
    assert set(call.input) == {"city"} and call.input["city"] in ("Rome", "Oslo")
    history = ASK + [{"role": "assistant", "content": message.content},
                     {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}]}]
    answer = messages.create(**{**options, "messages": history, "tool_choice": {"type": "none"}})
    assert answer.content[0].type == "text" and answer.content[0].text


def test_a_streamed_call_is_the_whole_one(messages, options):
    whole = messages.create(**options).content[-1]
    with messages.stream(**options) as stream:
        pieces = [event.delta.partial_json for event in stream
                  if event.type == "content_block_delta" and event.delta.type == "input_json_delta"]
        message = stream.get_final_message()
    assert message.stop_reason == "tool_use" and message.content[-1].input == whole.input
    assert "".join(pieces)


def test_any_makes_it_call(messages, options):
    message = messages.create(**{**options, "tool_choice": {"type": "any"}})
    assert [block.name for block in message.content if block.type == "tool_use"]
