#!/usr/bin/env python3
"""A cluster over three hosts (network namespaces) with tensors over TCP, whose links are cut and mended under streams.

Arguments: the dovetail binary. Whatever happens, the streams say what they say undisturbed, each token once.
"""
import os
import signal
import sys
import time
import unittest

import hosts
import processes

BINARY = sys.argv.pop(1)
DATA = os.environ.get("DOVETAIL_TEST_DATA")
MODEL = os.path.join(DATA, "models/stories260K/stories260K-f32.gguf") if DATA else None
REQUESTS = [{"prompt": "Once upon a time", "max_tokens": 150},
            {"prompt": "Lily and Tom went to the park. They saw", "max_tokens": 150},
            {"prompt": "The little dog was", "max_tokens": 150, "temperature": 0.8, "seed": 7}]
LONGEST_STALL = 10.0  # seconds: ten times what is promised for a partition, since other work may hold this machine up


class PartitionTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.network = hosts.Network(3)
        cls.enterClassContext(cls.network)
        cls.network.enter(0)
        cls.cluster = hosts.Cluster(cls.network, BINARY, MODEL, "--placement", "mixed")
        cls.addClassCleanup(cls.cluster.stop)

    def run(self, result=None):
        """Shows what the processes said about a test that failed."""
        seen = {name: len(role.lines) for name, role in self.cluster.roles.items()}
        before = len(result.failures) + len(result.errors)
        super().run(result)
        if len(result.failures) + len(result.errors) > before:
            for name, role in self.cluster.roles.items():
                print(f"-- {name}", *role.lines[seen[name]:][-40:], sep="\n", file=sys.stderr)

    def undisturbed_by(self, name, fault, mend, noticed=None):
        """Streams run while `fault` takes the worker `name` out and `mend` lets it come back, once that worker has
        said `noticed`."""
        scheduler = self.cluster.scheduler
        with processes.Load(self.cluster.url, REQUESTS) as load:
            load.wait_for_pieces(5)
            number, seen, begun = self.cluster.number(name), len(scheduler.lines), time.monotonic()
            heard = len(self.cluster.roles[name].lines)
            fault()
            scheduler.wait_for(rf"worker {number} is out", after=seen)
            load.wait_for_pieces(160)  # so that every stream that was disturbed ends, and others begin
            end = time.monotonic()
            if noticed:
                self.cluster.roles[name].wait_for(noticed, after=heard)
            mend()
            self.cluster.serves(name, after=seen)
            load.wait_for_pieces(20)
        self.assertEqual(load.problems, [])
        self.assertLess(load.longest_gap(begun, end), LONGEST_STALL)
        self.cluster.wait_until_nothing_is_held()

    def test_a_host_whose_cables_are_pulled_is_fenced_and_comes_back_when_they_are_put_in_again(self):
        planes = ("data0", "ctl0")
        self.undisturbed_by("far1", lambda: self.network.pull(1, *planes), lambda: self.network.mend(1, *planes))

    def test_a_worker_that_sees_its_cables_pulled_waits_for_its_devices_and_joins_again(self):
        planes = ("data0", "ctl0")
        self.undisturbed_by("far1", lambda: self.network.pull(1, *planes), lambda: self.network.mend(1, *planes),
                            noticed="no such lane on device data0: No such device; trying until it is back")

    def test_a_host_that_only_the_data_plane_has_lost_is_fenced_too_though_its_heartbeats_come(self):
        self.undisturbed_by("far2", lambda: self.network.isolate(2, "data0"), lambda: self.network.mend(2, "data0"))

    def test_a_host_that_hears_and_is_not_heard_is_fenced(self):
        self.undisturbed_by("far1", lambda: self.network.mute(1, "data0", 0),
                            lambda: self.network.unmute(1, "data0", 0))

    def test_a_host_that_only_the_control_plane_has_lost_is_fenced(self):
        self.undisturbed_by("far2", lambda: self.network.isolate(2, "ctl0"), lambda: self.network.mend(2, "ctl0"))

    def test_a_worker_killed_behind_a_cut_leaves_half_open_connections_that_hold_nobody_up(self):
        def vanish():
            self.network.isolate(1, "data0", "ctl0")
            self.cluster.roles["far1"].send(signal.SIGKILL)

        def return_as_another():
            self.network.mend(1, "data0", "ctl0")
            self.cluster.restart("far1")

        self.undisturbed_by("far1", vanish, return_as_another)

    def test_streams_over_a_squeezed_link_are_slow_and_the_same(self):
        with processes.Load(self.cluster.url, REQUESTS) as load:
            load.wait_for_pieces(5)
            if not self.network.squeeze(1, "data0", "1mbit"):
                self.network.release(1, "data0")
                self.skipTest("no token bucket in this kernel (tc qdisc ... tbf)")
            load.wait_for_pieces(320)  # each stream has ended twice, wherever its tokens are kept
            waited = self.network.release(1, "data0")
            load.wait_for_pieces(160)
        self.assertEqual(load.problems, [])
        self.assertGreater(waited, 100)
        self.cluster.wait_until_nothing_is_held()

    def test_a_stopped_worker_is_fenced_and_joins_anew_by_itself_when_it_goes_on(self):
        far = self.cluster.roles["far2"]
        self.undisturbed_by("far2", lambda: far.send(signal.SIGSTOP), lambda: far.send(signal.SIGCONT))

    def test_a_killed_worker_is_replaced(self):
        self.undisturbed_by("near", lambda: self.cluster.roles["near"].send(signal.SIGKILL),
                            lambda: self.cluster.restart("near"))

    def test_a_worker_without_a_link_to_another_one_is_named_and_the_others_serve_on_until_the_link_is_there(self):
        scheduler, parted = self.cluster.scheduler, (1, 2)
        with processes.Load(self.cluster.url, REQUESTS) as load:
            load.wait_for_pieces(5)
            number, seen = self.cluster.number("far2"), len(scheduler.lines)
            self.network.part(parted, "data0")
            self.cluster.roles["far2"].send(signal.SIGKILL)
            scheduler.wait_for(rf"worker {number} is out", after=seen)
            self.cluster.restart("far2")
            end = time.monotonic() + processes.START_LIMIT
            while "far2 has no connection with far1 yet" not in (status := self.cluster.status()):
                self.assertLess(time.monotonic(), end, status)
            scheduler.wait_for("is out: far2 and far1 cannot reach each other: nothing came for [0-9]+ ms; let their "
                               "hosts reach each other's --data-ports, and give --data-devices of one network",
                               after=seen)
            load.wait_for_pieces(20)
            self.assertEqual([line for line in scheduler.lines[seen:] if "far2 serves" in line], [])
            self.network.part(parted, "data0", parted=False)
            self.cluster.serves("far2", after=seen)
            load.wait_for_pieces(20)
        self.assertEqual(load.problems, [])
        self.assertEqual([line for line in scheduler.lines[seen:] if "far1" in line and "joins" in line], [])
        self.cluster.wait_until_nothing_is_held()

    def test_a_stopped_compute_worker_is_fenced_and_its_streams_wait_until_it_joins_anew(self):
        compute, scheduler = self.cluster.roles["compute"], self.cluster.scheduler
        with processes.Load(self.cluster.url, REQUESTS) as load:
            load.wait_for_pieces(5)
            number, seen = self.cluster.number("compute"), len(scheduler.lines)
            compute.send(signal.SIGSTOP)
            scheduler.wait_for(rf"worker {number} is out", after=seen)
            compute.send(signal.SIGCONT)
            self.cluster.serves("compute", after=seen)
            load.wait_for_pieces(160)
        self.assertEqual(load.problems, [])
        self.cluster.wait_until_nothing_is_held()


if __name__ == "__main__":
    hosts.run_tests(MODEL)
