"""What users of the official client see. Nothing here depends on which model is served."""

import array
import asyncio
import time
import urllib.request

import openai
import pytest


def chat(client, model, **more):
    options = dict(model=model, messages=[{"role": "user", "content": "Say something."}], max_tokens=16, temperature=0)
    return client.chat.completions.create(**{**options, **more})


def complete(client, model, **more):
    options = dict(model=model, prompt="Once upon a time", max_tokens=16, temperature=0)
    return client.completions.create(**{**options, **more})


def metric(base_url, name):
    with urllib.request.urlopen(base_url + "/metrics") as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((name + "{", name + " ")))


def wait_until(condition, seconds=10):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "not reached in time"


def test_models_are_listed_and_retrieved(client, model):
    assert client.models.retrieve(model).id == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no-such-model")


def test_a_completion(client, model):
    result = complete(client, model)
    assert result.object == "text_completion" and result.id.startswith("cmpl-")
    assert result.choices[0].finish_reason in ("stop", "length")
    assert result.usage.total_tokens == result.usage.prompt_tokens + result.usage.completion_tokens
    assert result.usage.completion_tokens <= 16
    assert result.usage.prompt_tokens_details.cached_tokens >= 0
    assert result._request_id


def test_a_chat(client, model):
    result = chat(client, model)
    assert result.object == "chat.completion" and result.id.startswith("chatcmpl-")
    message = result.choices[0].message
    assert message.role == "assistant" and isinstance(message.content, str)
    assert result.choices[0].finish_reason in ("stop", "length")


def test_a_chat_stream_is_the_same_text(client, model):
    whole = chat(client, model).choices[0].message.content
    chunks = list(chat(client, model, stream=True))
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    assert [chunk.choices[0].finish_reason for chunk in chunks].count(None) == len(chunks) - 1
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")


def test_a_completion_stream_is_the_same_text(client, model):
    whole = complete(client, model).choices[0].text
    assert "".join(chunk.choices[0].text for chunk in complete(client, model, stream=True)) == whole


def test_usage_comes_in_a_last_chunk_when_asked_for(client, model):
    chunks = list(chat(client, model, stream=True, stream_options={"include_usage": True}))
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage == chat(client, model).usage or chunks[-1].usage.completion_tokens > 0


def test_chat_logprobs(client, model):
    result = chat(client, model, logprobs=True, top_logprobs=3)
    content = result.choices[0].logprobs.content
    assert content
    for token in content:
        assert token.logprob <= 0 and len(token.top_logprobs) == 3
        assert isinstance(token.bytes, list)
    text = b"".join(bytes(token.bytes) for token in content).decode("utf-8", "replace")
    assert text.strip() == result.choices[0].message.content.strip()


def test_completion_logprobs(client, model):
    result = complete(client, model, logprobs=2)
    logprobs = result.choices[0].logprobs
    per_token = (logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, logprobs.text_offset)
    assert len(logprobs.tokens) > 0 and len({len(values) for values in per_token}) == 1
    assert logprobs.text_offset == sorted(logprobs.text_offset)
    assert all(2 <= len(top) <= 3 for top in logprobs.top_logprobs)
    assert len(complete(client, model, logprobs=0).choices[0].logprobs.tokens) == len(logprobs.tokens)


def test_echo(client, model):
    result = complete(client, model, echo=True, logprobs=1, max_tokens=1)
    assert result.choices[0].text.lstrip().startswith("Once upon a time")
    assert result.choices[0].logprobs.token_logprobs[0] is None
    assert len(result.choices[0].logprobs.tokens) >= result.usage.prompt_tokens


def test_n_choices(client, model):
    result = chat(client, model, n=3, temperature=1, seed=1)
    assert [choice.index for choice in result.choices] == [0, 1, 2]
    finishes = {}
    for chunk in chat(client, model, n=3, temperature=1, seed=1, stream=True):
        for choice in chunk.choices:
            if choice.finish_reason:
                finishes[choice.index] = finishes.get(choice.index, 0) + 1
    assert finishes == {0: 1, 1: 1, 2: 1}


def test_several_prompts(client, model):
    result = complete(client, model, prompt=["Once", "Twice"], n=2)
    assert [choice.index for choice in result.choices] == [0, 1, 2, 3]
    assert len(complete(client, model, prompt=[[5, 6, 7], [8, 9]]).choices) == 2


def test_best_of(client, model):
    result = complete(client, model, best_of=3, n=1, temperature=1, seed=3)
    assert len(result.choices) == 1
    assert result.usage.completion_tokens > 0


def test_a_stop_string_ends_the_text(client, model):
    text = complete(client, model, max_tokens=32).choices[0].text
    assert len(text) > 4
    stop = text[len(text) // 2 :][:2]
    stopped = complete(client, model, max_tokens=32, stop=[stop]).choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.text == text[: text.index(stop)]


def test_a_seed_repeats_itself(client, model):
    ask = lambda seed: complete(client, model, temperature=1, seed=seed, max_tokens=24).choices[0].text
    assert ask(11) == ask(11)
    assert len({ask(seed) for seed in range(8)}) > 1


def test_benchmark_clients_minimum_payload(client, model):
    stream = client.completions.create(
        model=model, prompt="x", stream=True, stream_options={"include_usage": True}, max_tokens=4, stop=None,
        extra_body={"max_completion_tokens": 4, "ignore_eos": True})
    assert list(stream)[-1].usage.completion_tokens == 4


@pytest.mark.parametrize("field,value", [
    ("temperature", 101), ("top_p", -1), ("n", 0), ("n", 9), ("max_tokens", -2), ("presence_penalty", 5),
    ("logit_bias", {"x": 1}), ("stop", ["a"] * 17), ("tools", [{"type": "function", "function": {"name": ""}}]),
    ("response_format", {"type": "grammar"}),
    ("max_tokens", 10**9),
])
def test_bad_fields_are_named(client, model, field, value):
    with pytest.raises(openai.BadRequestError) as error:
        chat(client, model, **{field: value})
    assert error.value.param.startswith(field)
    assert field in error.value.message
    assert error.value.request_id


def test_too_many_logprobs_leave_the_server_usable(client, model):
    with pytest.raises(openai.BadRequestError):
        complete(client, model, logprobs=21)
    assert complete(client, model).choices


def test_images_are_refused_by_name(client, model):
    with pytest.raises(openai.BadRequestError) as error:
        chat(client, model, messages=[{"role": "user", "content": [{"type": "image_url",
                                                                    "image_url": {"url": "data:,"}}]}])
    assert error.value.param == "messages.0.content.0.type"


def test_an_unknown_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError) as error:
        chat(client, "no-such-model")
    assert error.value.code == "model_not_found"


def test_a_prompt_that_does_not_fit(client, model):
    with pytest.raises(openai.BadRequestError) as error:
        complete(client, model, prompt=[5] * 200_000)
    assert error.value.type == "exceed_context_size_error"
    assert error.value.body["n_prompt_tokens"] >= 200_000


def test_leaving_a_stream_cancels_it(client, model, base_url):
    held = lambda: metric(base_url, "vllm:num_requests_running") + metric(base_url, "dovetail:kv_blocks_in_use")
    stream = chat(client, model, stream=True, max_tokens=None, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    wait_until(lambda: held() == 0)
    assert complete(client, model).choices


def test_many_at_once(base_url, model):
    async def run():
        async with openai.AsyncOpenAI(base_url=base_url + "/v1", api_key="none", max_retries=0, timeout=120) as client:
            ask = lambda i: client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": f"Count to {i}."}], max_tokens=8, temperature=0)
            return await asyncio.gather(*(ask(i) for i in range(32)))

    assert len(asyncio.run(run())) == 32


def in_f32(values):
    """Numbers in JSON have as many digits as their floats need."""
    return array.array("f", values).tolist()


def test_embeddings_are_vectors_of_length_one(client, model):
    texts = ["Once upon a time", "there was a little girl.", "Once upon a time"]
    result = client.embeddings.create(model=model, input=texts, encoding_format="float")
    vectors = [data.embedding for data in result.data]
    assert [data.index for data in result.data] == [0, 1, 2]
    for vector in vectors:
        assert abs(sum(value * value for value in vector) - 1) < 1e-5
    assert vectors[0] == vectors[2] and vectors[0] != vectors[1]
    assert result.usage.prompt_tokens == result.usage.total_tokens > 0
    # The client asks for base64 unless it is told otherwise, and reads it.
    unasked = client.embeddings.create(model=model, input=texts).data
    assert [in_f32(data.embedding) for data in unasked] == [in_f32(vector) for vector in vectors]


def test_embeddings_of_fewer_dimensions(client, model):
    full = client.embeddings.create(model=model, input=[1, 2, 3], encoding_format="float").data[0].embedding
    cut = client.embeddings.create(model=model, input=[[1, 2, 3]], dimensions=2, encoding_format="float")
    length = sum(value * value for value in full[:2]) ** 0.5
    assert len(cut.data[0].embedding) == 2
    for ours, value in zip(cut.data[0].embedding, full):
        assert abs(ours - value / length) < 1e-5


def test_embeddings_that_are_refused(client, model):
    for wrong in (dict(input=""), dict(input=[]), dict(input="x", dimensions=10**6), dict(input="word " * 100_000)):
        with pytest.raises(openai.BadRequestError):
            client.embeddings.create(model=model, **wrong)
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="no-such-model", input="x")
