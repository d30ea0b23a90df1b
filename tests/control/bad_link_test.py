#!/usr/bin/env python3
"""One bad link between a compute worker and an attention worker, on hosts of their own (network namespaces), while
another compute worker reaches all.

Arguments: the dovetail binary.
"""
import os
import signal
import sys
import unittest

import hosts
import processes

BINARY = sys.argv.pop(1)
DATA = os.environ.get("DOVETAIL_TEST_DATA")
MODEL = os.path.join(DATA, "models/stories260K/stories260K-f32.gguf") if DATA else None
REQUESTS = [{"prompt": "Once upon a time", "max_tokens": 60},
            {"prompt": "The little dog was", "max_tokens": 60, "temperature": 0.8, "seed": 7}]
PARTED = (1, 2)  # hosts


class BadLinkTest(unittest.TestCase):
    def setUp(self):
        network = self.enterContext(hosts.Network(3))
        network.enter(0)
        self.network = network
        self.cluster = hosts.Cluster(network, BINARY, MODEL, "--placement", "mixed", "--lease-ms", "2000")
        self.addCleanup(self.cluster.stop)
        self.cluster.roles["far2"].stop()
        first = self.cluster.roles["compute"].arguments
        self.cluster.start(2, *["compute2" if argument == "compute" else argument for argument in first])
        self.cluster.serves("compute2")

    def test_it_costs_the_compute_worker_until_the_link_is_there_and_never_the_attention_worker(self):
        scheduler, cluster = self.cluster.scheduler, self.cluster
        refused = "is out: compute2 and far1 cannot reach each other: nothing came"
        with processes.Load(cluster.url, REQUESTS, streams=2) as load:
            load.wait_for_pieces(5)
            seen = len(scheduler.lines)
            self.network.part(PARTED, "data0")
            scheduler.wait_for(rf"worker {cluster.number('compute2')} {refused}", after=seen)
            load.wait_for_pieces(20)

            # The compute worker serves while that attention worker is not there, and must go when another one is.
            number, seen_kill = cluster.number("far1"), len(scheduler.lines)
            cluster.roles["far1"].send(signal.SIGKILL)
            scheduler.wait_for(rf"worker {number} is out", after=seen)
            cluster.serves("compute2", after=seen_kill)
            cluster.restart("far1")
            cluster.serves("far1", after=seen_kill)
            load.wait_for_pieces(20)

            seen_mend = len(scheduler.lines)
            self.network.part(PARTED, "data0", parted=False)
            cluster.serves("compute2", after=seen_mend)
            load.wait_for_pieces(20)
        refusals = [line for line in scheduler.lines[seen:] if "cannot reach each other" in line]
        self.assertEqual([line for line in refusals if refused not in line], [])
        self.assertEqual(load.problems, [], "\n".join(scheduler.lines + cluster.roles["server"].lines))


if __name__ == "__main__":
    hosts.run_tests(MODEL)
