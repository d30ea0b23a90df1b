#!/usr/bin/env python3
"""What a token costs on each link, counted by the ports and compared with the formula. Arguments: the dovetail binary.

Per token and layer, with Hq query heads, Hk KV heads, d = head dimension, e bytes a number: out Hq d e of queries and
2 Hk d e of keys and values, back Hq d e; of a worker that holds a part of the heads, that part of it.
"""
import json
import os
import re
import signal
import sys
import unittest
import urllib.request

import processes

BINARY = sys.argv.pop(1)
DATA = os.environ.get("DOVETAIL_TEST_DATA")
MODEL = os.path.join(DATA, "models/stories260K/stories260K-f32.gguf") if DATA else None
LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM, BYTES = 5, 8, 4, 8, 2  # of stories260K with K and V in bf16


class Cluster(processes.Up):
    def __init__(self, *flags):
        super().__init__(BINARY, MODEL, "--ignore-model-name", "--shutdown-timeout", "1",
                         "--kv-cache-dtype", "bfloat16", "--no-enable-prefix-caching", *flags)

    def generate(self, tokens):
        body = {"model": "x", "prompt": "Once upon a time", "temperature": 0, "max_tokens": tokens}
        request = urllib.request.Request(self.url + "/v1/completions", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            assert json.load(response)["usage"]["completion_tokens"] == tokens

    def tensor_bytes(self):
        """(from, to) -> bytes, once the heartbeats have caught up."""
        last, same = None, 0
        while same < 10:
            rows = re.findall(r"^  (\S+) +-> (\S+) +\S+ +(\d+) +\d+$", self.status(), re.MULTILINE)
            now = {(one, other): int(count) for one, other, count in rows}
            last, same = now, same + 1 if now == last else 0
        return last


class LinkBytesTest(unittest.TestCase):
    def bytes_per_token(self, *flags):
        cluster = Cluster(*flags)
        try:
            counts = [cluster.tensor_bytes()]
            for tokens in (20, 70):
                cluster.generate(tokens)
                counts.append(cluster.tensor_bytes())
        finally:
            self.assertEqual(cluster.stop(number=signal.SIGINT), 0)
        short, long = ({link: after[link] - before[link] for link in after}
                       for before, after in zip(counts, counts[1:]))
        return {link: (long[link] - short[link]) / 50 for link in long}  # the prompt's part is the same

    def test_one_worker_that_holds_everything(self):
        each = self.bytes_per_token("--attention-workers", "1")
        out = LAYERS * (QUERY_HEADS + 2 * KV_HEADS) * HEAD_DIM * BYTES
        back = LAYERS * QUERY_HEADS * HEAD_DIM * BYTES
        self.assertEqual(each[("compute-1", "attention-1")], out)
        self.assertEqual(each[("attention-1", "compute-1")], back)
        self.assertEqual(each[("compute-1", "scheduler")], 0)
        self.assertEqual(each[("attention-1", "scheduler")], 0)

    def test_two_workers_that_share_the_heads(self):
        """Who holds how many depends on the read speeds measured when they joined."""
        each = self.bytes_per_token("--attention-workers", "2", "--placement", "heads")
        group = QUERY_HEADS // KV_HEADS
        out, back = LAYERS * (group + 2) * HEAD_DIM * BYTES, LAYERS * group * HEAD_DIM * BYTES  # of one KV head
        heads = [each[("compute-1", worker)] / out for worker in ("attention-1", "attention-2")]
        self.assertEqual(sum(heads), KV_HEADS)
        for worker, held in zip(("attention-1", "attention-2"), heads):
            self.assertIn(held, range(1, KV_HEADS))
            self.assertEqual(each[(worker, "compute-1")], held * back)


if __name__ == "__main__":
    if MODEL is None or not os.path.exists(MODEL):
        print("missing test data: models/stories260K/stories260K-f32.gguf")
        sys.exit(77)
    unittest.main(verbosity=2)
