#!/usr/bin/env python3
"""How long sequences may be, as attention workers of different sizes join and leave: in /v1/models and in `dovetail
status`.

Arguments: the dovetail binary.
"""
import json
import os
import re
import subprocess
import sys
import time
import unittest
import urllib.request

import processes

BINARY = sys.argv.pop(1)
DATA = os.environ.get("DOVETAIL_TEST_DATA")
MODEL = os.path.join(DATA, "models/stories260K/stories260K-f32.gguf") if DATA else None
POSITIONS = 512  # of the model


class LongestSequence(unittest.TestCase):
    def start(self, *arguments):
        return self.enterContext(processes.Process(BINARY, *arguments))

    def model(self):
        with urllib.request.urlopen(self.url + "/v1/models", timeout=60) as response:
            return json.load(response)["data"][0]

    def wait_for_length(self, holds):
        end = time.monotonic() + 60
        while not holds(length := self.model()["max_model_len"]):
            self.assertLess(time.monotonic(), end, length)
            time.sleep(0.02)
        return length

    def status(self):
        done = subprocess.run([BINARY, "status", "--scheduler", self.address], capture_output=True, text=True,
                              timeout=60, check=True)
        return re.search(r"^sequences of up to .*", done.stdout, re.MULTILINE).group(0)

    def test_follows_the_workers_that_serve(self):
        scheduler = self.start("scheduler", "--listen", "127.0.0.1:0")
        self.address = scheduler.wait_for(r"^listening on (\S+)").group(1)
        joining = ("--scheduler", self.address, "--threads", "1", "--lanes", "shm")
        self.start("compute-worker", MODEL, "--name", "c1", *joining)
        self.start("attention-worker", "--kv-capacity", "240KiB", "--name", "small", *joining)
        server = self.start("server", "--scheduler", self.address, "--port", "0", "--ignore-model-name")
        self.url = server.wait_for(r"^listening on (http://\S+)").group(1)

        small = self.wait_for_length(lambda length: length < POSITIONS)
        self.assertGreater(small, 0)
        self.assertEqual(self.model()["configured_max_model_len"], POSITIONS)
        kv_caches = "the KV caches hold no longer one; by --max-model-len and the model"
        self.assertEqual(self.status(), f"sequences of up to {small} tokens: {kv_caches} {POSITIONS}")

        large = self.start("attention-worker", "--kv-capacity", "8MiB", "--name", "large", *joining)
        self.wait_for_length(lambda length: length == POSITIONS)
        self.assertNotIn("configured_max_model_len", self.model())
        self.assertEqual(self.status(), f"sequences of up to {POSITIONS} tokens")

        large.stop()
        self.wait_for_length(lambda length: length == small)
        self.assertRegex(self.status(), f"^sequences of up to {small} tokens: ")


if __name__ == "__main__":
    if MODEL is None or not os.path.exists(MODEL):
        print("missing test data: models/stories260K/stories260K-f32.gguf")
        sys.exit(77)
    unittest.main(verbosity=2)
