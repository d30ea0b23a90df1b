#!/usr/bin/env python3
"""Compute workers that give other bits than the cluster's first: refused, or taken with one warning; and what `up` does
so that none is.

Arguments: the dovetail binary.
"""
import os
import sys
import unittest

import processes

BINARY = sys.argv.pop(1)
DATA = os.environ.get("DOVETAIL_TEST_DATA")
MODEL = os.path.join(DATA, "models/stories260K/stories260K-f32.gguf") if DATA else None


class Role(processes.Process):
    def __init__(self, *arguments):
        super().__init__(BINARY, *arguments)


class UnlikeWorkers(unittest.TestCase):
    def start(self, *arguments):
        role = Role(*arguments)
        self.addCleanup(role.stop)
        return role

    def scheduler(self, *flags):
        """With a compute worker c1 of float weights."""
        scheduler = self.start("scheduler", "--listen", "127.0.0.1:0", *flags)
        self.address = scheduler.wait_for(r"^listening on (\S+)").group(1)
        self.compute("c1", "auto")
        scheduler.wait_for("c1 serves as")
        return scheduler

    def compute(self, name, dtype):
        return self.start("compute-worker", MODEL, "--name", name, "--scheduler", self.address, "--threads", "1",
                          "--lanes", "shm", "--device", "cpu", "--dtype", dtype)

    def test_one_that_computes_in_another_way_is_refused_and_both_ways_are_named(self):
        scheduler = self.scheduler()
        refused = self.compute("c2", "bfloat16")
        refused.wait_for(r"c2: computes on CPU a\w+, --dtype bfloat16, but c1 of this cluster on CPU a\w+, "
                         r"--dtype auto; .*--unlike-workers")
        self.assertEqual(refused.process.wait(60), 1)
        scheduler.wait_for("refused: c2: computes on")
        self.compute("c3", "auto")
        scheduler.wait_for("c3 serves as")

    def test_with_unlike_workers_all_are_taken_and_said_once(self):
        scheduler = self.scheduler("--unlike-workers")
        for name in ("c2", "c3"):
            self.compute(name, "bfloat16")
            scheduler.wait_for(f"{name} serves as")
        self.assertEqual(len([line for line in scheduler.lines if "(--unlike-workers)" in line]), 1)

    def test_up_starts_all_its_compute_workers_and_starts_them_again_where_the_first_was(self):
        with processes.Up(BINARY, MODEL, "--ignore-model-name", "--threads", "1", "--kv-cache-memory-bytes", "16MiB",
                          "--compute-workers", "2", "--device", "auto") as up:
            device = up.wait_for(r"\[compute-1\] .*the layers run on (\S+)").group(1)
            chosen = " --device cpu " if device == "cpu" else " --device cuda "
            first = up.pid_of("compute-1")
            self.assertIn(" --device auto ", processes.children_of(up.pid)[first])
            self.assertIn(chosen, processes.children_of(up.pid)[up.pid_of("compute-2")])
            seen = len(up.lines)
            os.kill(first, 9)
            up.wait_for("compute-1 was killed by signal 9; starting another")
            up.wait_for(r"\[compute-1\] .*the layers run on", after=seen)
            again = up.pid_of("compute-1")
            self.assertNotEqual(again, first)
            self.assertIn(chosen, processes.children_of(up.pid)[again])


if __name__ == "__main__":
    if MODEL is None or not os.path.exists(MODEL):
        print("missing test data: models/stories260K/stories260K-f32.gguf")
        sys.exit(77)
    unittest.main(verbosity=2)
