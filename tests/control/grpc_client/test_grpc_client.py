"""A client from the public proto against `dovetail up`: what routers rely on."""
import contextlib
import hashlib
import io
import json
import os
import pathlib
import re
import signal
import subprocess
import threading
import time
import urllib.request
import zipfile

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as service

KEY = "a-key-of-the-test"
METADATA = [("authorization", f"Bearer {KEY}")]
OTHER_KEY = "a-key-of-another-tenant"
OTHER = [("authorization", f"Bearer {OTHER_KEY}")]
PROMPT = [1, 403, 407, 261, 378]


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"{KEY} tests\n{OTHER_KEY} others\n", encoding="ascii")
    process = subprocess.Popen(
        [os.environ["DOVETAIL_BINARY"], "up", os.environ["DOVETAIL_MODEL"], "--attention-workers", "2", "--port", "0",
         "--grpc-listen", "127.0.0.1:0", "--api-key-file", str(keys), "--placement", "mixed",
         "--shutdown-timeout", "1"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    found = {}
    for line in process.stdout:
        if at := re.search(r"listening on (grpc|http)://(\S+)", line):
            found[at.group(1)] = at.group(2)
        if line.startswith("ready: "):
            break
    assert set(found) == {"grpc", "http"}
    drain = threading.Thread(target=lambda: [None for _ in process.stdout])
    drain.start()
    yield found
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0
    drain.join()


@pytest.fixture(scope="session")
def channel(cluster):
    with grpc.insecure_channel(cluster["grpc"]) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        end = time.monotonic() + 20
        while health.Check(health_pb2.HealthCheckRequest(), timeout=5).status != health_pb2.HealthCheckResponse.SERVING:
            assert time.monotonic() < end, "never became healthy"
        yield channel


@pytest.fixture(scope="session")
def stub(channel):
    return service.VllmEngineStub(channel)


def request(**fields):
    sampling = {"temperature": 0, "max_tokens": 24, "ignore_eos": True} | fields.pop("sampling", {})
    made = pb.GenerateRequest(request_id=fields.pop("request_id", ""), stream=fields.pop("stream", True),
                              sampling_params=pb.SamplingParams(**sampling), **fields)
    if made.WhichOneof("input") is None:
        made.tokenized.input_ids.extend(PROMPT)
    return made


def generate(stub, made):
    return list(stub.Generate(made, metadata=METADATA, timeout=60))


def over_http(cluster, **fields):
    body = {"model": "stories260K-f32", "temperature": 0, "max_tokens": 24, "ignore_eos": True}
    body |= {"return_token_ids": True} | fields
    made = urllib.request.Request(f"http://{cluster['http']}/v1/completions", json.dumps(body).encode(),
                                  {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"})
    return json.load(urllib.request.urlopen(made, timeout=60))["choices"][0]


def test_a_stream_brings_every_token_once_and_then_all_of_them(stub, cluster):
    messages = generate(stub, request())
    assert [m.WhichOneof("response") for m in messages] == ["chunk"] * (len(messages) - 1) + ["complete"]
    complete = messages[-1].complete
    streamed = [token for m in messages[:-1] for token in m.chunk.token_ids]
    assert streamed == list(complete.output_ids) and len(streamed) == 24
    assert (complete.finish_reason, complete.prompt_tokens, complete.completion_tokens) == ("length", len(PROMPT), 24)
    assert messages[0].chunk.prompt_tokens == len(PROMPT)
    assert over_http(cluster, prompt=PROMPT)["token_ids"] == streamed


def test_without_stream_there_is_one_answer_a_choice(stub):
    messages = generate(stub, request(stream=False, sampling={"n": 3, "temperature": 1.0, "seed": 5}))
    assert sorted(m.complete.index for m in messages) == [0, 1, 2]
    again = generate(stub, request(stream=False, sampling={"n": 3, "temperature": 1.0, "seed": 5}))

    def by_choice(answers):
        return {answer.complete.index: list(answer.complete.output_ids) for answer in answers}
    assert by_choice(messages) == by_choice(again)


def test_text_is_tokenised_as_over_http(stub, cluster):
    [answer] = generate(stub, request(stream=False, text="Once upon a time"))
    assert over_http(cluster, prompt="Once upon a time")["token_ids"] == list(answer.complete.output_ids)


def test_a_stop_string_and_a_stop_token_end_a_choice_and_are_named(stub, cluster):
    text = over_http(cluster, prompt=PROMPT)["text"]
    word = text.split()[4]
    [answer] = generate(stub, request(stream=False, sampling={"stop": [word]}))
    assert (answer.complete.finish_reason, answer.complete.matched_stop_str) == ("stop", word)
    [whole] = generate(stub, request(stream=False))
    token = whole.complete.output_ids[7]
    [answer] = generate(stub, request(stream=False, sampling={"stop_token_ids": [token]}))
    assert answer.complete.matched_token_id == token
    assert len(answer.complete.output_ids) <= 8


def test_logprobs_of_prompt_and_output(stub):
    [answer] = generate(stub, request(stream=False, sampling={"logprobs": 2, "prompt_logprobs": 1, "max_tokens": 4}))
    output, prompt = answer.complete.output_logprobs, answer.complete.input_logprobs
    assert list(output.token_ids) == list(answer.complete.output_ids)
    assert [len(top.token_ids) for top in output.top_logprobs] == [2] * 4
    assert [top.token_ids[0] for top in output.top_logprobs] == list(output.token_ids)  # greedy
    assert list(prompt.token_ids) == PROMPT
    assert not prompt.token_logprobs[0].HasField("value") and prompt.token_logprobs[1].value < 0


@pytest.mark.parametrize("constraint, text", [
    ({"regex": "[0-9]{3}x"}, r"\d{3}x"), ({"choice": pb.ChoiceConstraint(choices=["north", "south"])}, "north|south"),
    ({"json_schema": json.dumps({"enum": ["red", "blue"]})}, '"(red|blue)"'),
    ({"structural_tag": json.dumps({"type": "structural_tag", "format": {
        "type": "tag", "begin": "<n>", "content": {"type": "regex", "pattern": "[0-9]{2}"}, "end": "</n>"}})},
     "<n>[0-9]{2}</n>")])
def test_a_constraint_is_followed(stub, cluster, constraint, text):
    [answer] = generate(stub, request(stream=False, sampling={"temperature": 1, "ignore_eos": False, **constraint}))
    tokens = {"tokens": list(answer.complete.output_ids)}
    asked = urllib.request.Request(f"http://{cluster['http']}/detokenize", json.dumps(tokens).encode(),
                                   {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"})
    written = json.loads(urllib.request.urlopen(asked, timeout=20).read())["prompt"]
    assert re.fullmatch(text, written.replace("</s>", "").strip()), written


def test_what_is_wrong_is_named_with_the_right_code(stub):
    cases = [
        (request(sampling={"temperature": -1}), grpc.StatusCode.INVALID_ARGUMENT, "temperature"),
        (request(sampling={"n": 99}), grpc.StatusCode.INVALID_ARGUMENT, "n"),
        (request(sampling={"max_tokens": 1_000_000}), grpc.StatusCode.INVALID_ARGUMENT, "max_tokens"),
        (request(sampling={"structural_tag": "{}"}), grpc.StatusCode.INVALID_ARGUMENT, "ignore_eos"),
        (request(sampling={"structural_tag": "{}", "ignore_eos": False}), grpc.StatusCode.INVALID_ARGUMENT,
         "structural_tag.format"),
        (request(sampling={"regex": "(", "ignore_eos": False}), grpc.StatusCode.INVALID_ARGUMENT, "regex"),
        (request(tokenized=pb.TokenizedInput(input_ids=[99_999])), grpc.StatusCode.INVALID_ARGUMENT, "99999"),
        (pb.GenerateRequest(request_id="none"), grpc.StatusCode.INVALID_ARGUMENT, "input"),
    ]
    for made, code, text in cases:
        with pytest.raises(grpc.RpcError) as refused:
            generate(stub, made)
        assert refused.value.code() == code and text in refused.value.details()
    with pytest.raises(grpc.RpcError) as refused:
        list(stub.Generate(request(), timeout=20))
    assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
    with pytest.raises(grpc.RpcError) as refused:
        stub.Embed(pb.EmbedRequest(), metadata=METADATA, timeout=20)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    for call in (lambda: stub.StartProfile(common.StartProfileRequest(), metadata=METADATA, timeout=20),
                 lambda: stub.StopProfile(common.StopProfileRequest(), metadata=METADATA, timeout=20)):
        with pytest.raises(grpc.RpcError) as refused:
            call()
        assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED and "is not served: " in refused.value.details()


@contextlib.contextmanager
def serving(*arguments):
    """A stub of a server of its own, in one process."""
    process = subprocess.Popen([os.environ["DOVETAIL_BINARY"], "serve", *arguments, "--port", "0", "--grpc-listen",
                                "127.0.0.1:0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        at = next(found.group(1) for line in process.stdout if (found := re.search(r"listening on grpc://(\S+)", line)))
        threading.Thread(target=lambda: [None for _ in process.stdout], daemon=True).start()
        with grpc.insecure_channel(at) as channel:
            yield service.VllmEngineStub(channel)
    finally:
        process.terminate()
        process.wait(30)


def test_a_flush_empties_the_prefix_cache_of_its_tenant(tmp_path):
    prompt = [1] + [300 + i % 150 for i in range(199)]
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY} tests\n{OTHER_KEY} others\n", encoding="ascii")
    with serving(os.environ["DOVETAIL_MODEL"], "--api-key-file", str(keys)) as stub:
        def cached(metadata):
            made = request(stream=False, sampling={"max_tokens": 1}, tokenized=pb.TokenizedInput(input_ids=prompt))
            return list(stub.Generate(made, metadata=metadata, timeout=60))[-1].complete.cached_tokens
        assert [cached(METADATA), cached(OTHER), cached(METADATA), cached(OTHER)] == [0, 0, 192, 192]
        for _ in range(2):
            assert stub.FlushCache(common.FlushCacheRequest(timeout_s=1), metadata=METADATA, timeout=20).success
            assert [cached(METADATA), cached(METADATA), cached(OTHER)] == [0, 192, 192]


def test_a_tokenizer_that_is_no_file_of_its_own_is_not_sent(stub):
    with pytest.raises(grpc.RpcError) as refused:
        list(stub.GetTokenizer(common.GetTokenizerRequest(), metadata=METADATA, timeout=20))
    assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION and "GGUF" in refused.value.details()


def test_a_folders_tokenizer_comes_as_an_archive():
    folder = pathlib.Path(os.environ["DOVETAIL_TALES"])
    with serving(str(folder)) as stub:
        pieces = list(stub.GetTokenizer(common.GetTokenizerRequest(), timeout=20))
    whole = b"".join(piece.data for piece in pieces)
    assert [piece.sha256 for piece in pieces] == [""] * (len(pieces) - 1) + [hashlib.sha256(whole).hexdigest()]
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        assert archive.testzip() is None
        for name in archive.namelist():
            assert archive.read(name) == (folder / name).read_bytes()
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= set(archive.namelist())


def test_a_vector_is_that_of_http(stub, cluster):
    made = pb.EmbedRequest(tokenized=pb.TokenizedInput(input_ids=PROMPT))
    reply = stub.Embed(made, metadata=METADATA, timeout=60)
    body = json.dumps({"input": PROMPT}).encode()
    asked = urllib.request.Request(f"http://{cluster['http']}/v1/embeddings", body,
                                   {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=60) as response:
        over_http = json.load(response)["data"][0]["embedding"]
    assert (reply.prompt_tokens, reply.embedding_dim) == (len(PROMPT), len(over_http)) and reply.embedding_dim > 0
    assert max(abs(ours - theirs) for ours, theirs in zip(reply.embedding, over_http)) < 1e-6


def test_abort_ends_a_stream_and_cancelling_one_leaves_nothing_running(stub):
    stream = stub.Generate(request(request_id="long", sampling={"max_tokens": 480}), metadata=METADATA, timeout=60)
    first = next(stream)
    assert first.WhichOneof("response") == "chunk"
    stub.Abort(pb.AbortRequest(request_ids=["long", "unknown"]), metadata=METADATA, timeout=20)
    try:
        assert list(stream)[-1].complete.finish_reason == "length"  # a fast machine may be done before
    except grpc.RpcError as error:
        assert error.code() == grpc.StatusCode.CANCELLED
        assert "aborted" in error.details()
    stream = stub.Generate(request(request_id="left", sampling={"max_tokens": 480}), metadata=METADATA, timeout=60)
    next(stream)
    stream.cancel()
    end = time.monotonic() + 20
    while stub.GetServerInfo(pb.GetServerInfoRequest(), metadata=METADATA, timeout=20).active_requests > 0:
        assert time.monotonic() < end, "a cancelled request is still there"


def test_tenants_neither_end_nor_block_each_others_requests(stub):
    made = request(request_id="mine", sampling={"max_tokens": 480})
    stream = stub.Generate(made, metadata=METADATA, timeout=60)
    next(stream)
    with pytest.raises(grpc.RpcError) as refused:
        list(stub.Generate(made, metadata=METADATA, timeout=20))
    assert refused.value.code() == grpc.StatusCode.ALREADY_EXISTS
    stub.Abort(pb.AbortRequest(request_ids=["mine"]), metadata=OTHER, timeout=20)
    theirs = request(request_id="mine", sampling={"max_tokens": 4})
    assert list(stub.Generate(theirs, metadata=OTHER, timeout=60))[-1].complete.completion_tokens == 4
    stub.Abort(pb.AbortRequest(request_ids=["mine"]), metadata=OTHER, timeout=20)
    assert list(stream)[-1].complete.completion_tokens == 480


def test_default_ids_cannot_be_guessed(stub):
    stream = stub.Generate(request(sampling={"max_tokens": 480}), metadata=METADATA, timeout=60)
    next(stream)
    stub.Abort(pb.AbortRequest(request_ids=[f"grpc-{i}" for i in range(1000)]), metadata=METADATA, timeout=20)
    assert list(stream)[-1].complete.completion_tokens == 480


def test_a_stream_brings_the_prompts_logprobs_in_its_first_chunk(stub):
    sampling = {"max_tokens": 8, "prompt_logprobs": 2}
    streamed = generate(stub, request(sampling=sampling))
    [whole] = generate(stub, request(stream=False, sampling=sampling))
    assert streamed[0].chunk.input_logprobs == whole.complete.input_logprobs
    assert len(whole.complete.input_logprobs.token_ids) == len(PROMPT)
    assert not any(message.chunk.HasField("input_logprobs") for message in streamed[1:-1])


def test_model_server_and_load_are_described(stub):
    model = stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=METADATA, timeout=20)
    assert (model.is_generation, model.vocab_size, model.max_context_length) == (True, 512, 512)
    assert model.served_model_name == "stories260K-f32" and "/" not in model.model_path
    server = stub.GetServerInfo(pb.GetServerInfoRequest(), metadata=METADATA, timeout=20)
    assert (server.block_size, server.max_num_seqs, server.kv_cache_dtype) == (64, 256, "bfloat16")
    [load] = stub.GetLoads(pb.GetLoadsRequest(), metadata=METADATA, timeout=20).loads
    assert load.max_running_requests == 256
    assert stub.HealthCheck(pb.HealthCheckRequest(), timeout=20).healthy


def test_health_and_reflection_name_the_service(channel):
    health = health_pb2_grpc.HealthStub(channel)
    named = health.Check(health_pb2.HealthCheckRequest(service="vllm.grpc.engine.VllmEngine"), timeout=20)
    assert named.status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError) as unknown:
        health.Check(health_pb2.HealthCheckRequest(service="unknown"), timeout=20)
    assert unknown.value.code() == grpc.StatusCode.NOT_FOUND
    assert "vllm.grpc.engine.VllmEngine" in ProtoReflectionDescriptorDatabase(channel).get_services()
