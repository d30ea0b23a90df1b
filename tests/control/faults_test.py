#!/usr/bin/env python3
"""Faults under streams, one after another, for many requests: workers killed, stopped and continued, all of `up`.

Arguments: the dovetail binary, the number of requests, and a model (a small one of the test data where none is given;
of one with linear states, those are what is lost and stopped). Every stream says what it says undisturbed, once; at the
end nothing is held and nothing is left.
"""
import os
import random
import re
import signal
import sys
import time
import unittest

import processes

BINARY = sys.argv.pop(1)
REQUESTS = int(sys.argv.pop(1))
DATA = os.environ.get("DOVETAIL_TEST_DATA")
MODEL = os.path.join(DATA, "models/stories260K/stories260K-f32.gguf") if DATA else None
OWN_MODEL = len(sys.argv) > 1 and os.path.isdir(sys.argv[1])
if OWN_MODEL:
    MODEL = sys.argv.pop(1)
BETWEEN_FAULTS = 2.0  # seconds; `up` gives up on a worker that ends again and again as soon as it has begun
WORKERS = ("attention-1", "attention-2", "attention-3", "compute-1")
TEXTS = [{"prompt": "Once upon a time", "max_tokens": 120},
         {"prompt": "Lily and Tom went to the park. They saw", "max_tokens": 60, "temperature": 0.9, "seed": 11},
         {"prompt": "The little dog was", "max_tokens": 90},
         {"prompt": "One day", "max_tokens": 200, "temperature": 0.7, "top_p": 0.9, "seed": 12}]


class Up(processes.Up):
    def __init__(self, *flags):
        super().__init__(BINARY, MODEL, "--ignore-model-name", "--shutdown-timeout", "2", *flags)

    def pids(self):
        """name -> process, of the workers that run."""
        found = {}
        for pid, arguments in processes.children_of(self.pid).items():
            if name := re.search(r"--name (\S+) ", arguments):
                found[name.group(1)] = pid
        return found

    def wait_for_status(self, condition, limit=60):
        end = time.monotonic() + limit
        while not condition(status := self.status()):
            assert time.monotonic() < end, status
        return status

    def wait_until_whole(self):
        return self.wait_for_status(lambda text: len(re.findall(r" (?:attention|compute) +serving ", text)) == 4)

    def wait_until_nothing_is_held(self):
        def nothing(status):
            used = re.findall(r" attention +serving .* ([0-9.]+)% ", status)
            return len(used) == 3 and all(float(share) == 0 for share in used) and " 0 sequences running" in status

        return self.wait_for_status(nothing)


class FaultsTest(unittest.TestCase):
    def run_under(self, up, fault, requests, between=BETWEEN_FAULTS, least_faults=4, heal=None):
        """Streams run until so many are done, with a fault every now and then; everything must be as undisturbed."""
        with processes.Load(up.url, TEXTS, streams=4) as load:
            next_fault, done, faults = time.monotonic(), 0, 0
            while done < requests or faults < least_faults:
                with load.lock:
                    load.lock.wait_for(lambda: load.finished >= requests and faults >= least_faults,
                                       max(0, next_fault - time.monotonic()))
                    done = load.finished
                if time.monotonic() >= next_fault:
                    fault()
                    faults += 1
                    next_fault = time.monotonic() + between
            if heal:
                heal()
        print(f"{load.finished} requests, {faults} faults, longest gap {load.longest_gap():.2f} s", file=sys.stderr)
        self.assertEqual(load.problems, [], "\n".join(up.lines[-400:]))
        self.assertGreaterEqual(load.finished, requests)
        return load

    def leaves_nothing(self, up, before):
        pids = list(processes.children_of(up.pid))
        self.assertEqual(up.stop(number=signal.SIGINT), 0, "\n".join(up.lines[-30:]))
        self.assertEqual([pid for pid in pids if os.path.exists(f"/proc/{pid}")], [])
        self.assertEqual(processes.left_in_shared_memory(before), set())

    def test_workers_killed_again_and_again(self):
        before, order = processes.shared_memory(), random.Random(1)
        up = Up("--attention-workers", "3", "--placement", "mixed")
        killed, turns = [], []

        def kill():
            running = up.pids()
            if len(killed) % 4 == 0:
                turns.extend(order.sample(WORKERS, 4))
            killed.append(victim := turns[len(killed)])
            if victim in running:
                os.kill(running[victim], signal.SIGKILL)

        try:
            up.wait_until_whole()
            self.run_under(up, kill, REQUESTS)
            up.wait_until_whole()
            up.wait_until_nothing_is_held()
        finally:
            self.leaves_nothing(up, before)

    def test_workers_stopped_and_continued(self):
        before, order = processes.shared_memory(), random.Random(2)
        up = Up("--attention-workers", "3", "--placement", "mixed")
        stopped = {}  # pid -> when it goes on

        def go_on(now):
            for pid in [pid for pid, then in stopped.items() if then <= now]:
                os.kill(pid, signal.SIGCONT)
                del stopped[pid]

        def stop():
            now = time.monotonic()
            go_on(now)
            if len(stopped) >= 2:
                return
            victim = up.pids()[order.choice(WORKERS)]
            if victim not in stopped:
                # Shorter than any lease, and much longer.
                stopped[victim] = now + order.choice([0.05, 0.3, 0.6, 2.5])
                os.kill(victim, signal.SIGSTOP)

        try:
            up.wait_until_whole()
            self.run_under(up, stop, max(20, REQUESTS // 4), between=0.5, least_faults=8,
                           heal=lambda: go_on(float("inf")))
            up.wait_until_whole()
            up.wait_until_nothing_is_held()
        finally:
            go_on(float("inf"))
            self.leaves_nothing(up, before)

    def test_more_sequences_than_blocks(self):
        """Attention workers without enough memory for what is asked: some streams wait for others, none is changed."""
        if OWN_MODEL:
            self.skipTest("the memory is measured for the model of the test data")
        before = processes.shared_memory()
        up = Up("--attention-workers", "2", "--kv-cache-memory-bytes", "700KiB")
        try:
            up.wait_for_status(lambda text: len(re.findall(r" (?:attention|compute) +serving ", text)) == 3)
            self.run_under(up, lambda: None, max(20, REQUESTS // 10), least_faults=0)
        finally:
            self.leaves_nothing(up, before)

    def test_a_worker_that_stutters_is_waited_for_and_not_fenced(self):
        # A lease that outlasts the pauses even where asking for the status takes a second, as under sanitizers.
        up = Up("--attention-workers", "3", "--placement", "mixed", "--lease-ms", "4000")
        try:
            up.wait_until_whole()
            slow = up.pids()["attention-2"]
            seen = len(up.lines)

            def hiccup():
                for number in (signal.SIGSTOP, signal.SIGCONT):
                    os.kill(slow, number)
                    up.status()  # takes some 20 ms

            self.run_under(up, hiccup, max(20, REQUESTS // 10), between=0.2)
            self.assertEqual([line for line in up.lines[seen:] if "is out" in line], [])
        finally:
            self.assertEqual(up.stop(number=signal.SIGINT), 0)


if __name__ == "__main__":
    if MODEL is None or not os.path.exists(MODEL):
        print("missing test data: models/stories260K/stories260K-f32.gguf")
        sys.exit(77)
    unittest.main(verbosity=2)
