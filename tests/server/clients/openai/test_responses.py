"""The Responses API as the official client sees it."""

import openai
import pytest


def ask(client, model, **more):
    options = dict(model=model, input="Tell me a story.", max_output_tokens=16, temperature=0)
    return client.responses.create(**{**options, **more})


def test_an_answer_has_text_status_and_usage(client, model):
    response = ask(client, model, instructions="Be brief.", metadata={"a": "b"})
    assert response.id.startswith("resp_") and response.object == "response"
    assert response.output_text and response.output[0].type == "message"
    assert response.status in ("completed", "incomplete")
    assert (response.incomplete_details is not None) == (response.status == "incomplete")
    assert response.instructions == "Be brief." and response.metadata == {"a": "b"} and response.temperature == 0
    usage = response.usage
    assert usage.output_tokens > 0 and usage.total_tokens == usage.input_tokens + usage.output_tokens


def test_what_the_length_ends_is_incomplete(client, model):
    response = ask(client, model, max_output_tokens=2, extra_body={"ignore_eos": True})
    assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
    assert response.usage.output_tokens == 2


def test_a_stream_adds_up_to_the_whole_answer(client, model):
    whole = ask(client, model)
    events = list(ask(client, model, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    types = [event.type for event in events]
    assert types[:2] == ["response.created", "response.in_progress"]
    assert types[-1] == "response." + whole.status
    for begin, end in (("output_item.added", "output_item.done"), ("content_part.added", "content_part.done")):
        assert types.count("response." + begin) == types.count("response." + end) == 1
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text == events[-1].response.output_text
    assert events[-1].response.usage.output_tokens == whole.usage.output_tokens
    assert events[0].response.id == events[-1].response.id


def test_the_stream_helper_understands_it(client, model):
    with client.responses.stream(model=model, input="Tell me a story.", max_output_tokens=16, temperature=0) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        types = {event.type for event in stream}
        response = stream.get_final_response() if "response.completed" in types else None
    assert text == ask(client, model).output_text
    assert response is None or response.output_text == text


def test_an_answer_can_be_part_of_the_next_input(client, model):
    question = {"role": "user", "content": [{"type": "input_text", "text": "Tell me a story."}]}
    first = ask(client, model, input=[question])
    history = [question, *(item.model_dump(exclude_none=True) for item in first.output),
               {"role": "user", "content": "And then?"}]
    second = ask(client, model, input=history)
    assert second.usage.input_tokens > first.usage.input_tokens and second.output_text


@pytest.mark.parametrize("options, param", [
    (dict(previous_response_id="resp_1"), "previous_response_id"), (dict(background=True), "background"),
    (dict(truncation="auto"), "truncation"), (dict(max_output_tokens=0), "max_output_tokens"),
    (dict(tools=[{"type": "web_search"}]), "tools.0.type"), (dict(input=[]), "input"),
    (dict(tools=[{"type": "function", "name": "", "parameters": {}}]), "tools.0.name"),
    (dict(input=[{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]),
     "input.0.content.0.type"),
    (dict(input=[{"role": "user", "content": "a"}, {"type": "item_reference", "id": "x"}]), "input.1.type"),
    (dict(input=[{"type": "function_call_output", "call_id": "x", "output": "y"}]), "input.0.call_id"),
    (dict(text={"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}), "text.format.schema.not"),
    (dict(reasoning={"effort": "enormous"}), "reasoning.effort"),
    (dict(include=["web_search_call.results"]), "include.0"),
    (dict(input="x" * 200_000), "input"),
])
def test_errors_name_the_fields_of_this_api(client, model, options, param):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, model, **options)
    assert caught.value.param == param
    assert caught.value.body["message"].startswith(param.split(".")[0])
