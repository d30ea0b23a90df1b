#!/usr/bin/env python3
"""`dovetail up --compute-devices` with compute workers on two GPUs that divide prompts. Arguments: the dovetail binary.

Skipped where there are no two GPUs.
"""
import os
import re
import signal
import sys
import threading
import time
import unittest
import urllib.request

import processes
import two_gpus_test as gpus

KILLS = 6
# Of more than 128 tokens, which two ranks take.
PROMPTS = {gpus.MODEL: [" ".join(gpus.LONG_PROMPTS), " ".join(reversed(gpus.LONG_PROMPTS))],
           gpus.HYBRID: [" ".join(2 * gpus.LONG_PROMPTS)]}


class Up(processes.Up):
    """Compute workers on both GPUs, attention in host memory."""

    def __init__(self, *flags, model=gpus.MODEL):
        super().__init__(gpus.BINARY, model, "--compute-devices", "cuda:0,cuda:1", "--kv-cache-memory-bytes", "1GiB",
                         "--prefill-ranks", "2", "--prefill-rank-tokens", "64", "--max-num-batched-tokens", "128",
                         "--max-num-seqs", "16", "--no-enable-prefix-caching", "--ignore-model-name",
                         "--shutdown-timeout", "2", *flags)

    def given(self, limit=30, expected="device"):
        """Waits until both say so of what they give each other."""
        end = time.monotonic() + limit
        while True:
            status = self.status()
            said = dict(re.findall(r"^  (compute-\d) +-- compute-\d +(.*)$", status, re.MULTILINE))
            if len(said) == 2 and all(re.match(expected, how) for how in said.values()):
                return
            assert time.monotonic() < end, status

    def divided(self, least, limit=30):
        """Waits until so many groups are counted: the server hears of them once a second."""
        end = time.monotonic() + limit
        while (groups := self.groups()) < least:
            assert time.monotonic() < end, f"{groups} groups; {least} are expected"
            time.sleep(0.1)

    def groups(self):
        text = urllib.request.urlopen(self.url + "/metrics").read().decode()
        return int(float(re.search(r"^dovetail:prefill_groups_total\S* (\S+)$", text, re.MULTILINE).group(1)))

    def complete(self, prompt):
        return "".join(processes.stream(self.url, prompt, max_tokens=gpus.TOKENS))


class RankProcessesTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        if gpus.MODEL is None or gpus.gpu_count() < 2:
            print("skipped: needs DOVETAIL_TEST_DATA" if gpus.MODEL is None else "skipped: needs 2 GPUs")
            sys.exit(77)
        cls.one_gpu = {(model, prompt): gpus.choices(prompt, model)
                       for model, prompts in PROMPTS.items() for prompt in prompts}

    def assert_says_what_one_gpu_says(self, up, model):
        for prompt in PROMPTS[model]:
            gpus.assert_parts_at_a_near_tie_only(self, up.complete(prompt), *self.one_gpu[model, prompt])
        up.divided(least=len(PROMPTS[model]))

    def test_every_exchange_gives_the_tokens_of_one_gpu(self):
        for how in ("auto", "ring", "switch"):
            with self.subTest(how), Up("--prefill-exchange", how) as up:
                up.given()
                self.assert_says_what_one_gpu_says(up, gpus.MODEL)

    def test_a_hybrid_gives_the_tokens_of_one_gpu(self):
        with Up("--prefill-exchange", "gather-direct", model=gpus.HYBRID) as up:
            up.given()
            self.assert_says_what_one_gpu_says(up, gpus.HYBRID)

    def test_through_the_host_as_well(self):
        with Up("--exchange", "host") as up:
            self.assertNotIn("device", re.findall(r"-- compute-\d +(\S+)", up.status()))
            self.assert_says_what_one_gpu_says(up, gpus.MODEL)

    def test_prompts_go_on_after_a_rank_was_killed(self):
        with Up() as up:
            ended, texts, pieces, failed = threading.Event(), [], [], []

            def complete():
                try:
                    while not ended.is_set():
                        text = []
                        for piece in processes.stream(up.url, PROMPTS[gpus.MODEL][0], max_tokens=gpus.TOKENS):
                            text.append(piece)
                            pieces.append(piece)
                        texts.append("".join(text))
                except (AssertionError, OSError) as error:
                    failed.append(error)

            threads = [threading.Thread(target=complete) for _ in range(3)]
            for thread in threads:
                thread.start()
            try:
                for i in range(KILLS):
                    up.given(limit=60)
                    seen, name, more = len(up.lines), f"compute-{i % 2 + 1}", len(pieces) + 7 * i
                    while len(pieces) < more and not failed:  # so that streams are at other places each time
                        time.sleep(0.01)
                    os.kill(up.pid_of(name), signal.SIGKILL)
                    up.wait_for(rf"{name} was killed by signal 9; starting another", after=seen)
            finally:
                ended.set()
                for thread in threads:
                    thread.join()
            self.assertEqual(failed, [])
            self.assertGreater(len(texts), KILLS)
            for text in texts:
                gpus.assert_parts_at_a_near_tie_only(self, text, *self.one_gpu[gpus.MODEL, PROMPTS[gpus.MODEL][0]])
            self.assert_says_what_one_gpu_says(up, gpus.MODEL)


if __name__ == "__main__":
    unittest.main(verbosity=2)
