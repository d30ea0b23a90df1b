#!/usr/bin/env python3
"""`dovetail up` with layers and attention in two processes on one GPU.

An attention worker that starts again has as much KV as before, although the weights that the first one left room for
lie on the GPU by then. Arguments: the dovetail binary. Skipped where there is no GPU.
"""
import os
import re
import signal
import sys
import unittest

import processes
import two_gpus_test as gpus

TAKEN = r"^\[attention-1\] .*--kv-capacity auto: bytes for KV: (\d+)$"


class Up(processes.Up):
    def __init__(self, *flags):
        # More KV than the GPU has room for, so that what is free decides.
        super().__init__(gpus.BINARY, gpus.MODEL, "--compute-device", "cuda:0", "--attention-devices", "cuda:0",
                         "--max-model-len", "512", "--max-num-seqs", "4096", "--ignore-model-name",
                         "--shutdown-timeout", "2", *flags)

    def mib_of_kv(self):
        return float(re.search(r"attention-1 .* serving +\d+ +\S+ +(\S+) ", self.status()).group(1))


class GpuRestartTest(unittest.TestCase):
    def kill_and_see(self, up, how):
        first = int(up.wait_for(TAKEN).group(1))
        self.assertAlmostEqual(up.mib_of_kv(), first / 2**20, delta=1)
        seen = len(up.lines)
        os.kill(up.pid_of("attention-1"), signal.SIGKILL)
        up.wait_for(f"attention-1 was killed by signal 9; {how}", after=seen)
        again = int(up.wait_for(TAKEN, after=seen).group(1))
        up.wait_for("attention-1 serves as", after=seen)
        # On a real GPU; the memory of an emulated one is each process's own.
        self.assertLessEqual(again, first)
        self.assertGreater(again, 0.95 * first)
        processes.wait_until_ready(up.url)
        self.assertTrue("".join(processes.stream(up.url, prompt="There was", max_tokens=20)))

    def test_a_worker_that_is_started_again_leaves_nothing_for_the_weights_that_are_there(self):
        with Up() as up:
            self.kill_and_see(up, "starting another")
            (words,) = [line for line in processes.children_of(up.pid).values() if "attention-worker" in line]
            self.assertRegex(words, r"--kv-leave 0\b")

    def test_nor_does_a_spare(self):
        with Up("--spares", "1") as up:
            up.wait_for(r"^\[spare-1\] .*ready, waits for a name")
            self.kill_and_see(up, "a spare takes its place")


if __name__ == "__main__":
    if gpus.MODEL is None or gpus.gpu_count() < 1:
        print("needs DOVETAIL_TEST_DATA and a GPU")
        sys.exit(77)
    unittest.main()
