#!/usr/bin/env python3
"""Every role ends within a second of SIGTERM or Ctrl-C, whatever it is at: it reads a model, connects, waits for
others, or serves while others do not answer.

Arguments: the dovetail binary.
"""
import contextlib
import http.server
import json
import os
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
import unittest

import processes

BINARY = sys.argv.pop(1)
# Seconds. A sanitizer needs time of its own when a process ends.
LIMIT = 5 if os.environ.keys() & {"ASAN_OPTIONS", "TSAN_OPTIONS"} else 1
# On a machine under load a process may get no time for longer than that. What a role needs by itself is the shortest of
# several times: one that is too slow by itself is so each time.
ATTEMPTS = 8


class Role(processes.Process):
    def __init__(self, *arguments):
        super().__init__(BINARY, *arguments)


def write_large_model(folder):
    """A checkpoint of 13 GB, all zeros, that takes no room: it is loaded for many seconds."""
    hidden, inner, vocabulary, layers, heads = 4096, 11008, 32000, 32, 32
    with open(os.path.join(folder, "config.json"), "w", encoding="ascii") as config:
        json.dump({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
                   "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
                   "num_key_value_heads": heads, "vocab_size": vocabulary, "max_position_embeddings": 2048,
                   "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "torch_dtype": "bfloat16", "hidden_act": "silu",
                   "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2}, config)
    shapes = {"model.embed_tokens": [vocabulary, hidden], "model.norm": [hidden], "lm_head": [vocabulary, hidden]}
    for layer in (f"model.layers.{i}." for i in range(layers)):
        shapes |= {layer + norm: [hidden] for norm in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {layer + f"self_attn.{name}_proj": [hidden, hidden] for name in "qkvo"}
        shapes |= {layer + f"mlp.{name}_proj": [inner, hidden] for name in ("gate", "up")}
        shapes[layer + "mlp.down_proj"] = [hidden, inner]
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name + ".weight"] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(os.path.join(folder, "model.safetensors"), "wb") as weights:
        weights.write(struct.pack("<Q", len(text)) + text)
        weights.truncate(8 + len(text) + end)


class EndsSoon(unittest.TestCase):
    def ends_soon(self, role_at, number=signal.SIGTERM, status=0):
        """`role_at()` is a context with a role at the point where it is to end. Returns the last one's lines."""
        times = []
        while not times or times[-1] >= LIMIT and len(times) < ATTEMPTS:
            with role_at() as role:
                begun = time.monotonic()
                self.assertEqual(role.stop(number=number), status, "\n".join(role.lines))
                times.append(time.monotonic() - begun)
        print(*(f"{took:.2f} s" for took in times), end=" ", file=sys.stderr)
        self.assertLess(times[-1], LIMIT, "each time: " + "\n".join(role.lines))
        return role.lines


class StoppingTest(EndsSoon):
    def setUp(self):
        self.folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.folder)

    def wait_until_it_loads(self, role, pid_of):
        """Until the process has mapped the model that it computes with."""
        end = time.monotonic() + 20
        while True:
            assert time.monotonic() < end and role.process.poll() is None, "\n".join(role.lines)
            if pid := pid_of():
                with open(f"/proc/{pid}/maps", encoding="utf-8") as maps:
                    if self.folder in maps.read():
                        return
            time.sleep(0.02)

    def deaf_scheduler(self):
        """It takes connections, and says nothing."""
        deaf = socket.socket()
        self.addCleanup(deaf.close)
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        deaf.settimeout(20)
        return deaf, f"127.0.0.1:{deaf.getsockname()[1]}"

    @contextlib.contextmanager
    def that_loads(self, *arguments, pid_of=lambda role: role.pid):
        with Role(*arguments) as role:
            self.wait_until_it_loads(role, lambda: pid_of(role))
            yield role

    def test_while_a_model_is_read(self):
        write_large_model(self.folder)
        few = ("--max-model-len", "256", "--kv-cache-memory-bytes", "256MiB")
        by_signal = -signal.SIGTERM
        for command, number, status in ((("serve", "--port", "0", *few), signal.SIGTERM, 0),
                                        (("serve", "--port", "0", *few), signal.SIGINT, 0),
                                        (("compute-worker", "--scheduler", "127.0.0.1:1"), signal.SIGTERM, 0),
                                        (("logits", "--ids", "1", *few), signal.SIGTERM, by_signal),
                                        (("bench", *few), signal.SIGTERM, by_signal)):
            with self.subTest(command=command[0], number=number):
                self.ends_soon(lambda: self.that_loads(command[0], self.folder, *command[1:]), number, status)

        def compute_worker_of(up):
            children = processes.children_of(up.pid).items()
            return next((pid for pid, line in children if "compute-worker" in line), None)

        self.ends_soon(lambda: self.that_loads("up", self.folder, "--port", "0", *few, pid_of=compute_worker_of),
                       signal.SIGINT)

    def test_while_a_scheduler_says_nothing(self):
        deaf, address = self.deaf_scheduler()

        @contextlib.contextmanager
        def that_waits(*command):
            with Role(*command, "--scheduler", address) as role:
                connection, _ = deaf.accept()
                with connection:
                    yield role

        for command in (("attention-worker", "--kv-capacity", "8MiB", "--lanes", "shm"), ("server", "--port", "0")):
            with self.subTest(command=command[0]):
                self.ends_soon(lambda: that_waits(*command))

    def test_while_there_is_no_scheduler(self):
        @contextlib.contextmanager
        def that_says(line, *command):
            with Role(*command, "--scheduler", "127.0.0.1:1") as role:
                role.wait_for(line)
                yield role

        self.ends_soon(lambda: that_says("waiting: scheduler", "server", "--port", "0"), signal.SIGINT)
        self.ends_soon(lambda: that_says("cannot be reached", "attention-worker", "--kv-capacity", "8MiB"),
                       signal.SIGINT)

    def test_a_scheduler_and_members_of_one_that_is_stopped(self):
        @contextlib.contextmanager
        def that_serves():
            with Role("scheduler", "--listen", "127.0.0.1:0") as scheduler:
                yield scheduler, scheduler.wait_for(r"^listening on (\S+)").group(1)

        @contextlib.contextmanager
        def of_one_that_is_stopped(line_of_scheduler, line, *command):
            with that_serves() as (scheduler, address), Role(*command, "--scheduler", address) as role:
                scheduler.wait_for(line_of_scheduler)
                role.wait_for(line)
                scheduler.send(signal.SIGSTOP)
                try:
                    yield role
                finally:
                    scheduler.send(signal.SIGCONT)

        @contextlib.contextmanager
        def that_has_a_member():
            with (that_serves() as (scheduler, address),
                  Role("server", "--port", "0", "--scheduler", address) as server):
                server.wait_for("waiting: no compute worker")
                yield scheduler

        self.ends_soon(lambda: of_one_that_is_stopped(
            "a1 joins", ".", "attention-worker", "--kv-capacity", "8MiB", "--name", "a1"))
        self.ends_soon(lambda: of_one_that_is_stopped(".", "waiting: no compute worker", "server", "--port", "0"))
        self.ends_soon(that_has_a_member, signal.SIGINT)


class ServerOfTests(http.server.ThreadingHTTPServer):
    """Serves a model `m`. Of its requests for streams the first `answers` are answered, others with `status`, or never
    if that is 0.
    """
    daemon_threads = True

    def __init__(self, answers, status):
        super().__init__(("127.0.0.1", 0), HandlerOfTests)
        self.answers, self.status = answers, status
        self.streams, self.changed = 0, threading.Condition()

    def wait_for_streams(self, count, limit=60):
        with self.changed:
            assert self.changed.wait_for(lambda: self.streams >= count, limit), f"{self.streams} requests in {limit} s"


class HandlerOfTests(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def answer(self, status, kind, body):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.answer(200, "application/json", b'{"data": [{"id": "m", "max_model_len": 4096}]}')

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            count = len(body["prompt"].split())
            return self.answer(200, "application/json", json.dumps({"count": count}).encode())
        server = self.server
        with server.changed:
            server.streams += 1
            server.changed.notify_all()
            answered = server.streams <= server.answers
        if not answered and server.status == 0:
            self.rfile.read(1)  # until the client leaves
        elif not answered:
            self.answer(server.status, "application/json", b'{"error": {"message": "loading"}}')
        else:
            chunks = ({"choices": [{"index": 0, "text": " a", "finish_reason": "length"}]},
                      {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 1}})
            lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks] + ["data: [DONE]\n\n"]
            self.answer(200, "text/event-stream", "".join(lines).encode())
        return None


class BenchServeTest(EndsSoon):
    NOTHING = "stopped before anything was measured"

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    @contextlib.contextmanager
    def that_has_sent(self, count, *flags, answers=0, status=0):
        """`bench serve` of a server that has got `count` requests for streams."""
        server = ServerOfTests(answers, status)
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            with Role("bench", "serve", "--port", str(server.server_address[1]), "--num-prompts", "3",
                      "--input-len", "5", "--output-len", "1", "--max-concurrency", "1", "--save-result",
                      "--result-dir", self.folder, *flags) as bench:
                server.wait_for_streams(count)
                yield bench
        finally:
            server.shutdown()
            serving.join()
            server.server_close()

    def measures_nothing(self, role_at):
        for number in (signal.SIGINT, signal.SIGTERM):
            with self.subTest(number=number):
                lines = self.ends_soon(role_at, number, -number)
                self.assertIn(self.NOTHING, lines)
                self.assertEqual(os.listdir(self.folder), [])

    def test_while_a_server_says_nothing(self):
        with socket.socket() as deaf:
            deaf.bind(("127.0.0.1", 0))
            deaf.listen()
            deaf.settimeout(20)

            @contextlib.contextmanager
            def that_asks():
                with Role("bench", "serve", "--port", str(deaf.getsockname()[1])) as bench:
                    connection, _ = deaf.accept()
                    with connection:
                        yield bench

            self.measures_nothing(that_asks)

    def test_while_a_server_is_not_ready(self):
        self.measures_nothing(lambda: self.that_has_sent(
            2, "--ready-check-timeout-sec", "60", status=503))

    def test_while_no_request_has_ended(self):
        self.measures_nothing(lambda: self.that_has_sent(1))
        self.measures_nothing(lambda: self.that_has_sent(
            1, "--goodput", "ttft:1", "--sweep-rates", "1,2"))

    def test_what_was_measured_is_reported(self):
        lines = self.ends_soon(lambda: self.that_has_sent(2, answers=1), signal.SIGINT)
        self.assertNotIn(self.NOTHING, lines)
        self.assertRegex("\n".join(lines), r"Successful requests: +1\b")
        self.assertRegex("\n".join(lines), "the run was stopped: 1 ")
        self.assertNotEqual(os.listdir(self.folder), [])


if __name__ == "__main__":
    unittest.main(verbosity=2)
