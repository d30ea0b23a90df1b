"""The Messages API as Anthropic's official client sees it."""

import anthropic
import pytest

WEATHER = {"name": "get_weather", "description": "The weather in a city.", "input_schema": {
    "type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}}
ASK = [{"role": "user", "content": "What is the weather in Rome?"}]


@pytest.fixture(scope="session")
def messages(base_url):
    return anthropic.Anthropic(base_url=base_url, api_key="none", max_retries=0, timeout=240).messages


@pytest.fixture
def ask(messages, model):
    def create(extra_body=None, **more):
        options = {**dict(model=model, messages=ASK, max_tokens=16), **more}
        return messages.create(**options, extra_body={"temperature": 0, **(extra_body or {})})
    return create


def test_an_answer_has_text_a_reason_and_usage(ask):
    message = ask(system="Be brief.", metadata={"user_id": "x"})
    assert message.id.startswith("msg_") and message.type == "message" and message.role == "assistant"
    assert [block.type for block in message.content] == ["text"] and message.content[0].text
    assert message.stop_reason in ("end_turn", "max_tokens") and message.stop_sequence is None
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens > 0
    assert 0 < message.usage.output_tokens <= 16


def test_what_the_length_ends_says_so(ask):
    message = ask(max_tokens=2, extra_body={"ignore_eos": True})
    assert message.stop_reason == "max_tokens" and message.usage.output_tokens == 2


def test_a_stop_sequence_ends_the_answer(ask):
    text = ask().content[0].text
    message = ask(stop_sequences=[text[3:5]])
    assert message.stop_reason == "stop_sequence" and message.stop_sequence == text[3:5]
    assert "".join(block.text for block in message.content) == text[:text.index(text[3:5])]


def test_a_stream_adds_up_to_the_whole_answer(ask):
    whole = ask()
    events = list(ask(stream=True))
    types = [event.type for event in events]
    assert types[0] == "message_start" and types[-2:] == ["message_delta", "message_stop"]
    assert types.count("content_block_start") == types.count("content_block_stop") == 1
    text = "".join(event.delta.text for event in events if event.type == "content_block_delta")
    assert text == whole.content[0].text
    assert events[-2].delta.stop_reason == whole.stop_reason
    assert events[-2].usage.output_tokens == whole.usage.output_tokens


def test_the_stream_helper_understands_it(ask, messages, model):
    with messages.stream(model=model, messages=ASK, max_tokens=16, extra_body={"temperature": 0}) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert text == message.content[0].text == ask().content[0].text
    assert message.usage.output_tokens > 0


def test_tokens_are_counted_as_they_are_used(ask, messages, model):
    options = dict(messages=ASK, system="Be brief.", tools=[WEATHER])
    counted = messages.count_tokens(model=model, **options).input_tokens
    usage = ask(**options).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens


def test_a_document_of_text_is_what_its_words_are(messages, model):
    def counted(*blocks):
        return messages.count_tokens(model=model, messages=[{"role": "user", "content": list(blocks)}]).input_tokens
    question = {"type": "text", "text": "What colour is it?"}
    source = {"type": "text", "media_type": "text/plain", "data": "The sky is green."}
    document = {"type": "document", "source": source, "title": "Sky", "citations": {"enabled": False}}
    assert counted(document, question) == counted({"type": "text", "text": "Sky\nThe sky is green."}, question)
    with pytest.raises(anthropic.BadRequestError) as caught:
        counted({"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "aa"}})
    assert "messages.0.content.0.source.type" in caught.value.message


def test_an_answer_can_be_begun(ask, messages, model):
    begun = ASK + [{"role": "assistant", "content": "The weather"}]
    assert ask(messages=begun).content[0].text
    assert messages.count_tokens(model=model, messages=begun).input_tokens > messages.count_tokens(
        model=model, messages=ASK).input_tokens


def test_calls_and_results_are_history(ask):
    history = ASK + [
        {"role": "assistant", "content": [{"type": "text", "text": "Looking."},
                                          {"type": "tool_use", "id": "t1", "name": "get_weather",
                                           "input": {"city": "Rome"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "sunny"},
                                     {"type": "text", "text": "And?"}]}]
    message = ask(messages=history, tools=[WEATHER], tool_choice={"type": "none"})
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens > 20


@pytest.mark.parametrize("options, where", [
    (dict(max_tokens=0), "max_tokens"), (dict(messages=[]), "messages"),
    (dict(mcp_servers=[{"url": "x"}]), "mcp_servers"),
    (dict(messages=[{"role": "system", "content": "x"}]), "messages.0.role"),
    (dict(messages=[{"role": "user", "content": [{"type": "image", "source": {}}]}]), "messages.0.content.0.type"),
    (dict(messages=[{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]),
     "messages.0.content.0.tool_use_id"),
    (dict(tools=[{"type": "web_search_20250305", "name": "web_search"}]), "tools.0.type"),
    (dict(tools=[{"name": "", "input_schema": {}}]), "tools.0.name"), (dict(stop_sequences=[1]), "stop_sequences.0"),
    (dict(thinking={"type": "maybe"}), "thinking.type"), (dict(messages=[{"role": "user", "content": "x" * 200_000}]),
                                                          "prompt is too long"),
])
def test_errors_have_the_shape_of_this_api(ask, options, where):
    extra = {name: options.pop(name) for name in list(options) if name == "mcp_servers"}
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(**options, extra_body=extra)
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    assert caught.value.body["error"]["message"].startswith(where)


def test_an_unknown_model_is_not_found(ask):
    with pytest.raises(anthropic.NotFoundError) as caught:
        ask(model="claude")
    assert caught.value.body["error"]["type"] == "not_found_error"
