#!/usr/bin/env python3
"""Compute workers killed one after another under streams, with tensors over TCP: their ends cost no other worker.

Arguments: the dovetail binary and the number of kills.
"""
import os
import re
import signal
import sys
import time
import unittest

import hosts
import processes

BINARY = sys.argv.pop(1)
KILLS = int(sys.argv.pop(1))
DATA = os.environ.get("DOVETAIL_TEST_DATA")
MODEL = os.path.join(DATA, "models/stories260K/stories260K-f32.gguf") if DATA else None
REQUESTS = [{"prompt": "Once upon a time", "max_tokens": 60},
            {"prompt": "Lily and Tom went to the park. They saw", "max_tokens": 60},
            {"prompt": "The little dog was", "max_tokens": 60, "temperature": 0.8, "seed": 7}]
PATIENT = ("--lease-ms", "4000")  # so that a busy machine alone costs no membership


class OverTcp(hosts.OneHost):
    data = ("--lanes", "tcp", "--data-devices", "lo")


class KillsOverTcpTest(unittest.TestCase):
    def setUp(self):
        self.cluster = hosts.Cluster(OverTcp(), BINARY, MODEL, "--placement", "mixed", *PATIENT)
        self.addCleanup(self.cluster.stop)
        first = self.cluster.roles["compute"].arguments
        self.cluster.start(0, *["compute2" if argument == "compute" else argument for argument in first])
        self.cluster.serves("compute2")

    def test_every_kill_of_a_compute_worker_costs_that_worker_alone(self):
        scheduler, killed, waits = self.cluster.scheduler, [], []
        with processes.Load(self.cluster.url, REQUESTS) as load:
            load.wait_for_pieces(5)
            for turn in range(KILLS):
                name = ("compute", "compute2")[turn % 2]
                number, seen, begun = self.cluster.number(name), len(scheduler.lines), time.monotonic()
                self.cluster.roles[name].send(signal.SIGKILL)
                scheduler.wait_for(rf"worker {number} is out", after=seen)
                waits.append(time.monotonic() - begun)
                killed.append(number)
                self.cluster.restart(name)
                self.cluster.serves(name, after=seen)
                load.wait_for_pieces(10)
        out = [line for line in scheduler.lines if " is out: " in line]
        print(f"{KILLS} kills, {len(out)} workers out, {load.finished} requests, longest gap "
              f"{load.longest_gap():.2f} s, longest wait for the end {max(waits):.2f} s", file=sys.stderr)
        self.assertEqual([re.search(r"worker (\d+) is out", line).group(1) for line in out], killed, "\n".join(out))
        self.assertEqual(load.problems, [])


if __name__ == "__main__":
    if MODEL is None or not os.path.exists(MODEL):
        print("missing test data: models/stories260K/stories260K-f32.gguf")
        sys.exit(77)
    unittest.main(verbosity=2)
