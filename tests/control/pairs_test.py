#!/usr/bin/env python3
"""`up --layout pairs`: each process has layers and attention of its own sequences.

Arguments: the dovetail binary, and a model.
"""
import os
import re
import signal
import subprocess
import sys
import time
import unittest

import processes

BINARY, MODEL = sys.argv.pop(1), sys.argv.pop(1)
DATA = os.environ.get("DOVETAIL_TEST_DATA")
SOFTMAX_MODEL = os.path.join(DATA, "models/stories260K/stories260K-f32.gguf") if DATA else None
REQUESTS = [{"prompt": f"{words} there was", "max_tokens": 120, "ignore_eos": True}
            for words in ("Once upon a time", "In a dark wood", "Far away", "Long ago")]
PAIRS = ["--layout", "pairs", "--device", "cpu", "--threads", "1", "--ignore-model-name", "--max-model-len", "512"]


class Up(processes.Up):
    def __init__(self, *flags, model=MODEL, kv_bytes="64MiB"):
        super().__init__(BINARY, model, *PAIRS, "--kv-cache-memory-bytes", kv_bytes, *flags)

    def workers(self):
        """name -> its line in `dovetail status`."""
        table = self.status().split("\nlanes,")[0]
        return {found.group(1): found.group(0) for found in re.finditer(r"^ +\d+  (pair-\S+) .*$", table, re.MULTILINE)}

    def link(self, one, other):
        """The bytes of tensors and of messages that went from one worker to the other, and over what."""
        found = re.search(rf"^ +{one} +-> {other} +(\S+) +(\d+) +(\d+)", self.status(), re.MULTILINE)
        return found.group(1), int(found.group(2)), int(found.group(3))


def drain(up, name):
    return subprocess.run([BINARY, "drain", name, "--scheduler", up.scheduler], capture_output=True, text=True,
                          timeout=60, check=False)


def texts_of(url):
    return ["".join(processes.stream(url, **request)) for request in REQUESTS]


class Pairs(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        with processes.Serve(BINARY, MODEL, "--device", "cpu", "--threads", "1", "--ignore-model-name",
                             "--max-model-len", "512") as serve:
            cls.expected = texts_of(serve.url)

    def test_one_process_has_both_workers_and_they_meet_in_memory(self):
        with Up() as up:
            self.assertEqual(texts_of(up.url), self.expected)
            roles = [line.split()[1] for line in processes.children_of(up.pid).values()]
            self.assertEqual(sorted(roles), ["pair-worker", "scheduler", "server"])
            workers = up.workers()
            self.assertEqual(sorted(workers), ["pair-1", "pair-1-attention"])
            up.wait_for(r"pair-1 reaches attention worker \d+ over memory")
            up.wait_for(r"pair-1-attention reaches compute worker \d+ over memory")

    def test_a_pair_that_is_killed_costs_no_token_and_is_started_again(self):
        with Up("--compute-workers", "2") as up, processes.Load(up.url, REQUESTS, streams=4) as load:
            self.assertEqual(load.expected, self.expected)
            for name in ("pair-1", "pair-2"):
                load.wait_for_pieces(5)
                seen = len(up.lines)
                os.kill(up.pid_of(name), signal.SIGKILL)
                up.wait_for(f"{name}-attention serves as", after=seen)
                up.wait_for(f"{name} serves as", after=seen)
                load.wait_for_pieces(20)
            load.wait_for(lambda at: at.finished >= 8)
            self.assertEqual(load.problems, [])

    def test_a_pair_that_stops_is_taken_out_and_comes_back_as_a_pair(self):
        with Up("--compute-workers", "2") as up, processes.Load(up.url, REQUESTS, streams=4) as load:
            load.wait_for_pieces(5)
            seen = len(up.lines)
            pid = up.pid_of("pair-2")
            os.kill(pid, signal.SIGSTOP)
            try:
                up.wait_for("worker .* is out", after=seen)
                load.wait_for_pieces(20)
            finally:
                os.kill(pid, signal.SIGCONT)
            up.wait_for("pair-2 serves as", after=seen)
            up.wait_for("pair-2-attention serves as", after=seen)
            load.wait_for_pieces(20)
            self.assertEqual(load.problems, [])
            self.assertEqual(up.pid_of("pair-2"), pid)

    def test_streams_of_each_pair_step_on_it(self):
        with Up("--compute-workers", "2") as up, processes.Load(up.url, REQUESTS, streams=4) as load:
            load.wait_for_pieces(60)
            self.assertEqual(load.problems, [])
            for one, other in (("pair-1", "pair-2"), ("pair-2", "pair-1")):
                load.wait_for(lambda _, name=one: up.link(name, name + "-attention")[1] > 0)
                self.assertEqual(up.link(one, one + "-attention")[0], "memory")
                lanes, tensors, _ = up.link(one, other + "-attention")
                self.assertNotEqual(lanes, "memory")
                self.assertEqual(tensors, 0, "a stream of the other pair stepped here")

    @unittest.skipUnless(DATA, "missing test data: DOVETAIL_TEST_DATA is not set")
    def test_a_sequence_longer_than_the_memory_of_one_pair_continues_on_the_other(self):
        request = {"prompt": "Once upon a time there was a little dog who liked to play. " * 12, "max_tokens": 60}
        with processes.Serve(BINARY, SOFTMAX_MODEL, "--device", "cpu", "--threads", "1",
                             "--ignore-model-name") as serve:
            expected = "".join(processes.stream(serve.url, **request))
        with Up("--compute-workers", "2", "--placement", "tiers", model=SOFTMAX_MODEL, kv_bytes="480KiB") as up:
            up.wait_for("hold sequences of 256 tokens at most")  # until the other one serves
            self.assertEqual("".join(processes.stream(up.url, **request)), expected)
            ways = (("pair-1", "pair-2-attention"), ("pair-2", "pair-1-attention"))
            end = time.monotonic() + 20
            while not any(up.link(*way)[1] > 0 for way in ways):  # with the next heartbeats
                self.assertLess(time.monotonic(), end, up.status())

    def test_draining_one_worker_of_a_pair_drains_both_and_the_process_ends(self):
        for name in ("pair-2", "pair-2-attention"):
            with (self.subTest(name), Up("--compute-workers", "2") as up,
                  processes.Load(up.url, REQUESTS, streams=3) as load):
                load.wait_for_pieces(5)
                done = drain(up, name)
                self.assertEqual(done.returncode, 0, done.stderr)
                up.wait_for("pair-2 was drained and stays away")
                load.wait_for_pieces(10)
                self.assertEqual(sorted(up.workers()), ["pair-1", "pair-1-attention"])
                self.assertEqual(load.problems, [])

    def test_what_does_not_go_together_is_refused_by_name(self):
        def refused(*flags):
            done = subprocess.run([BINARY, "up", MODEL, *flags], capture_output=True, text=True, timeout=60,
                                  check=False)
            self.assertNotEqual(done.returncode, 0)
            return done.stderr

        self.assertIn("--attention-workers", refused("--layout", "pairs", "--attention-workers", "2"))
        self.assertIn("--layout pairs", refused("--layout", "pairs", "--attention-devices", "cpu"))
        self.assertIn("--spares", refused("--layout", "pairs", "--spares", "1"))
        self.assertIn("--gpus", refused("--gpus", "cuda:0", "--device", "cpu"))
        self.assertIn("--layout", refused("--layout", "sideways"))


if __name__ == "__main__":
    unittest.main(verbosity=2)
