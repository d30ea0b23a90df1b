#!/usr/bin/env python3
"""Every role ends soon after SIGTERM or Ctrl-C, whatever it is at: it reads a model, connects, waits for others, or
serves while others do not answer.

Arguments: the dovetail binary.
"""
import json
import os
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
import unittest

import processes

BINARY = sys.argv.pop(1)
LIMIT = 2  # seconds: half a second by itself, and what a machine under load takes


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


class StoppingTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.folder)

    def ends_soon(self, role, number=signal.SIGTERM, status=0):
        begun = time.monotonic()
        self.assertEqual(role.stop(number=number), status, "\n".join(role.lines))
        took = time.monotonic() - begun
        print(f"{took:.2f} s", end=" ", file=sys.stderr)
        self.assertLess(took, LIMIT, "\n".join(role.lines))

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
                with Role(command[0], self.folder, *command[1:]) as role:
                    self.wait_until_it_loads(role, lambda: role.pid)
                    self.ends_soon(role, number, status)
        with Role("up", self.folder, "--port", "0", *few) as up:
            workers = lambda: [pid for pid, line in processes.children_of(up.pid).items() if "compute-worker" in line]
            self.wait_until_it_loads(up, lambda: next(iter(workers()), None))
            self.ends_soon(up, signal.SIGINT)

    def test_while_a_scheduler_says_nothing(self):
        deaf, address = self.deaf_scheduler()
        for command in (("attention-worker", "--kv-capacity", "8MiB", "--lanes", "shm"), ("server", "--port", "0")):
            with self.subTest(command=command[0]), Role(*command, "--scheduler", address) as role:
                connection, _ = deaf.accept()
                with connection:
                    self.ends_soon(role)

    def test_while_there_is_no_scheduler(self):
        with Role("server", "--port", "0", "--scheduler", "127.0.0.1:1") as server:
            server.wait_for("waiting: scheduler")
            self.ends_soon(server, signal.SIGINT)
        with Role("attention-worker", "--kv-capacity", "8MiB", "--scheduler", "127.0.0.1:1") as worker:
            worker.wait_for("cannot be reached")
            self.ends_soon(worker, signal.SIGINT)

    def test_a_scheduler_and_members_of_one_that_is_stopped(self):
        with Role("scheduler", "--listen", "127.0.0.1:0") as scheduler:
            address = scheduler.wait_for(r"^listening on (\S+)").group(1)
            with (Role("attention-worker", "--kv-capacity", "8MiB", "--scheduler", address, "--name", "a1") as worker,
                  Role("server", "--port", "0", "--scheduler", address) as server):
                scheduler.wait_for("a1 joins")
                server.wait_for("waiting: no compute worker")
                scheduler.send(signal.SIGSTOP)
                try:
                    self.ends_soon(worker)
                    self.ends_soon(server)
                finally:
                    scheduler.send(signal.SIGCONT)
            self.ends_soon(scheduler, signal.SIGINT)


if __name__ == "__main__":
    unittest.main(verbosity=2)
