#!/usr/bin/env python3
"""Two compute workers on two hosts (network namespaces) that prefill prompts together, and the link between them is cut
and mended while they do.

Arguments: the dovetail binary. Whatever happens, the streams say what they say undisturbed, each token once.
"""
import os
import sys
import unittest

import hosts
import processes

BINARY = sys.argv.pop(1)
DATA = os.environ.get("DOVETAIL_TEST_DATA")
MODEL = os.path.join(DATA, "models/stories260K/stories260K-f32.gguf") if DATA else None
# Of two to three hundred tokens, in groups of 128.
REQUESTS = [{"prompt": "Once upon a time there was a little dog. " * times, "max_tokens": 20} for times in (15, 18, 21)]
RANKS = ("--prefill-ranks", "2", "--prefill-rank-tokens", "64", "--max-num-batched-tokens", "64",
         "--max-num-seqs", "16", "--no-enable-prefix-caching")


class PartedRanksTest(unittest.TestCase):
    def setUp(self):
        self.network = hosts.Network(3)
        self.enterContext(self.network)
        self.network.enter(0)

    def start(self, exchange):
        self.cluster = hosts.Cluster(self.network, BINARY, MODEL, *RANKS, "--prefill-exchange", exchange,
                                     attention={"near": 0}, compute={"c1": 1, "c2": 2})
        self.addCleanup(self.cluster.stop)
        return self.cluster.scheduler

    def part(self, parted=True):
        self.network.part((1, 2), "data0", parted)

    def test_both_serve_on_where_prompts_can_do_without_the_link(self):
        scheduler = self.start("auto")
        linked = "c[12] and c[12] are linked: prompts that both prefill may exchange directly"
        scheduler.wait_for(linked)
        with processes.Load(self.cluster.url, REQUESTS) as load:
            load.wait_for_pieces(30)
            seen = len(scheduler.lines)
            self.part()
            scheduler.wait_for("c[12] and c[12] cannot reach each other: nothing came for [0-9]+ ms; until they do, "
                               "prompts that both prefill go by way of the attention workers",
                               after=seen)
            load.wait_for_pieces(60)
            self.assertRegex(self.cluster.status(), "c[12] has no connection with c[12] yet")
            mended = len(scheduler.lines)
            self.part(False)
            scheduler.wait_for(linked, after=mended)
            load.wait_for_pieces(60)
        self.assertEqual(load.problems, [])
        self.assertEqual([line for line in scheduler.lines if "is out" in line], [])
        self.cluster.wait_until_nothing_is_held()

    def test_one_of_the_two_serves_on_where_the_link_is_needed_and_the_other_one_comes_back(self):
        self.one_serves_on("gather-direct")

    def test_so_it_is_where_k_and_v_go_round(self):
        self.one_serves_on("ring")

    def test_so_it_is_where_tokens_are_exchanged_for_heads(self):
        self.one_serves_on("switch")

    def test_so_it_is_where_ranks_ask_each_other(self):
        self.one_serves_on("pass-q")

    def one_serves_on(self, exchange):
        scheduler = self.start(exchange)
        with processes.Load(self.cluster.url, REQUESTS) as load:
            load.wait_for_pieces(30)
            seen = len(scheduler.lines)
            self.part()
            gone = scheduler.wait_for("is out: (c[12]) and c[12] cannot reach each other: nothing came for [0-9]+ ms",
                                      after=seen).group(1)
            load.wait_for_pieces(60)
            self.part(False)
            self.cluster.serves(gone, after=seen)
            load.wait_for_pieces(60)
        self.assertEqual(load.problems, [])
        self.cluster.wait_until_nothing_is_held()


if __name__ == "__main__":
    hosts.run_tests(MODEL)
