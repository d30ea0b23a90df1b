#!/usr/bin/env python3
"""`dovetail up` with layers on one GPU and the sequences of each step on two or three others. Arguments: the dovetail
binary.

Skipped where there are no three GPUs that exchange layers by themselves.
"""
import os
import signal
import sys
import threading
import unittest

import processes
import two_gpus_test as gpus

STREAMS = 12
KILLS = 4


class Streams:
    """The same prompts many times at once; `with` ends when all have."""

    def __init__(self, up):
        self.up, self.lock = up, threading.Condition()
        self.texts, self.pieces, self.problems = [""] * STREAMS, [0] * STREAMS, []
        self.threads = [threading.Thread(target=self._run, args=(i,)) for i in range(STREAMS)]

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        for thread in self.threads:
            thread.join()

    def _run(self, number):
        try:
            for piece in processes.stream(self.up.url, gpus.PROMPTS[number % len(gpus.PROMPTS)],
                                          max_tokens=gpus.TOKENS):
                with self.lock:
                    self.texts[number] += piece
                    self.pieces[number] += 1
                    self.lock.notify_all()
        except (OSError, AssertionError, ValueError) as error:
            with self.lock:
                self.problems.append(f"stream {number}: {type(error).__name__}: {error}")
                self.lock.notify_all()

    def wait_for_pieces(self, count):
        with self.lock:
            assert self.lock.wait_for(lambda: self.problems or min(self.pieces) >= count, 60), self.pieces


class ThreeGpusTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        if reason := gpus.why_not(least=3):
            print(f"skipped: {reason}")
            sys.exit(77)
        cls.devices = [f"cuda:{i}" for i in range(1, min(4, gpus.gpu_count()))]
        cls.workers = [f"attention-{i + 1}" for i in range(len(cls.devices))]
        cls.choices = {prompt: gpus.choices(prompt) for prompt in gpus.PROMPTS}

    def up(self, *flags):
        return gpus.Up(",".join(self.devices), len(self.devices), *flags)

    def wait_until_linked(self, up):
        for worker in self.workers:
            up.exchange_with(worker, "^device$")

    def assert_all_say_what_one_gpu_says(self, streams):
        self.assertEqual(streams.problems, [])
        same = sum(gpus.assert_parts_at_a_near_tie_only(self, text, *self.choices[gpus.PROMPTS[i % len(gpus.PROMPTS)]])
                   for i, text in enumerate(streams.texts))
        print(f"{same} of {STREAMS} texts are those of one GPU to the end")
        self.assertGreaterEqual(same, STREAMS // 2)

    def test_a_batch_over_several_gpus_crosses_by_the_gpus_themselves(self):
        with self.up("--exchange", "device") as up:
            self.wait_until_linked(up)
            before = {worker: up.tensor_bytes(worker) for worker in self.workers}
            with Streams(up) as streams:
                streams.wait_for_pieces(1)
            self.assert_all_say_what_one_gpu_says(streams)
            for worker in self.workers:
                self.assertGreater(up.steps_of(worker), gpus.TOKENS // 2, f"{worker} held no sequence")
                self.assertEqual(up.tensor_bytes(worker), before[worker], "tensors went through the hosts")

    def test_divided_sequences_cross_by_the_gpus_themselves(self):
        for how in ("heads", "tokens", "mixed"):
            with self.subTest(how), self.up("--exchange", "device", "--placement", how) as up:
                self.wait_until_linked(up)
                before = {worker: up.tensor_bytes(worker) for worker in self.workers}
                with Streams(up) as streams:
                    streams.wait_for_pieces(1)
                self.assert_all_say_what_one_gpu_says(streams)
                for worker in self.workers[:2]:
                    self.assertGreater(up.steps_of(worker), gpus.TOKENS // 2, f"{worker} held nothing")
                    self.assertEqual(up.tensor_bytes(worker), before[worker], "tensors went through the hosts")

    def test_streams_go_on_after_one_of_their_attention_workers_was_killed(self):
        self.assert_streams_go_on_after_kills(KILLS)

    def test_divided_streams_go_on_after_one_of_their_attention_workers_was_killed(self):
        self.assert_streams_go_on_after_kills(len(self.workers), "--placement", "mixed")

    def assert_streams_go_on_after_kills(self, kills, *flags):
        with self.up("--exchange", "device", *flags) as up:
            for i in range(kills):
                self.wait_until_linked(up)
                name, seen = self.workers[i % len(self.workers)], len(up.lines)
                with Streams(up) as streams:
                    streams.wait_for_pieces(20)
                    os.kill(up.pid_of(name), signal.SIGKILL)
                self.assert_all_say_what_one_gpu_says(streams)
                up.wait_for(rf"{name} was killed by signal 9; starting another", after=seen)

    def test_a_batch_on_gpus_and_a_cpu_goes_through_the_hosts(self):
        with gpus.Up("cuda:1,cuda:2,cpu", None) as up:
            up.exchange_with("attention-2", "^device$")
            up.exchange_with("attention-3", "^host: the attention worker runs on cpu")
            with Streams(up) as streams:
                streams.wait_for_pieces(1)
            self.assertEqual(streams.problems, [])
            self.assertGreater(min(len(text) for text in streams.texts), 100)


if __name__ == "__main__":
    unittest.main(verbosity=2)
