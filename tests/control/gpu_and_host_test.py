#!/usr/bin/env python3
"""`dovetail up --placement tiers` with layers and a small KV cache on one GPU, and more of it in host memory.
Arguments: the dovetail binary.

Skipped where there is no GPU.
"""
import os
import signal
import sys
import threading
import time
import unittest

import processes
import two_gpus_test as gpus

BLOCK_BYTES = 20 * 3072  # of stories260K: 64 tokens of 5 layers with 4 KV heads; a GPU may need a third less
STREAMS = 6
KILLS = 3


class Up(gpus.Up):
    """`blocks` for the GPU's attention worker (attention-1), and as many for the host's (attention-2)."""

    def __init__(self, blocks):
        size = blocks * BLOCK_BYTES
        processes.Up.__init__(self, gpus.BINARY, gpus.MODEL, "--compute-device", "cuda:0", "--attention-devices",
                              f"cuda:0={size},cpu={size}", "--attention-workers", "2", "--placement", "tiers",
                              "--no-enable-prefix-caching", "--ignore-model-name", "--shutdown-timeout", "2")

    def settled_steps_of(self, name):
        """Status knows of a worker's last steps by its next heartbeats."""
        steps = -1
        while steps != (now := self.steps_of(name)):
            steps = now
            time.sleep(1)
        return steps


class GpuAndHostTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        if gpus.MODEL is None or gpus.gpu_count() < 1:
            print("skipped: needs DOVETAIL_TEST_DATA" if gpus.MODEL is None else "skipped: needs a GPU")
            sys.exit(77)
        cls.choices = {prompt: gpus.choices(prompt) for prompt in gpus.PROMPTS}

    def assert_says_what_one_gpu_says(self, text, prompt):
        return gpus.assert_parts_at_a_near_tie_only(self, text, *self.choices[prompt])

    def test_a_sequence_that_the_gpu_cannot_hold_continues_in_host_memory(self):
        with Up(blocks=3) as up:  # one has five
            for prompt in gpus.PROMPTS:
                self.assert_says_what_one_gpu_says(up.complete(prompt), prompt)
            for name in ("attention-1", "attention-2"):
                self.assertGreater(up.steps_of(name), gpus.TOKENS / 8)

    def test_streams_that_together_need_more_than_the_gpu_has_go_on_in_host_memory(self):
        with Up(blocks=16) as up:  # three sequences on each
            texts = {}

            def complete(number):
                texts[number] = up.complete(gpus.PROMPTS[number % len(gpus.PROMPTS)])

            threads = [threading.Thread(target=complete, args=(number,)) for number in range(STREAMS)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            self.assertEqual(len(texts), STREAMS)
            for number, text in texts.items():
                self.assert_says_what_one_gpu_says(text, gpus.PROMPTS[number % len(gpus.PROMPTS)])
            self.assertGreater(up.steps_of("attention-2"), 0)
            # One alone lies on the GPU.
            before = up.settled_steps_of("attention-2")
            self.assert_says_what_one_gpu_says(up.complete(gpus.PROMPTS[0]), gpus.PROMPTS[0])
            self.assertEqual(up.settled_steps_of("attention-2"), before)

    def test_a_stream_over_both_goes_on_after_one_of_them_was_killed(self):
        with Up(blocks=3) as up:
            for i in range(KILLS):
                name = f"attention-{2 - i % 2}"
                seen, text = len(up.lines), ""
                for count, piece in enumerate(processes.stream(up.url, gpus.PROMPTS[0], max_tokens=gpus.TOKENS)):
                    text += piece
                    if count == gpus.TOKENS * 9 // 10:
                        os.kill(up.pid_of(name), signal.SIGKILL)
                self.assert_says_what_one_gpu_says(text, gpus.PROMPTS[0])
                up.wait_for(rf"{name} was killed by signal 9; starting another", after=seen)


if __name__ == "__main__":
    unittest.main(verbosity=2)
