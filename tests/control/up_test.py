#!/usr/bin/env python3
"""`dovetail up` as its users run it: every role a process of its own, tensors over UCX. Arguments: the dovetail binary.

Compares what the cluster says with what one process says, kills workers under a stream, and looks for what a stopped
cluster leaves.
"""
import os
import re
import signal
import socket
import subprocess
import sys
import time
import unittest

import processes

BINARY = sys.argv.pop(1)
DATA = os.environ.get("DOVETAIL_TEST_DATA")
MODEL = os.path.join(DATA, "models/stories260K/stories260K-f32.gguf") if DATA else None
PROMPTS = ["Once upon a time", "Lily and Tom went to the park. They saw", "The little dog was"]
TOKENS = 96


def run(*arguments):
    return subprocess.run([BINARY, *arguments], capture_output=True, text=True, timeout=60)


def embedded(prompt):
    done = run("run", MODEL, prompt, "--raw", "--max-tokens", str(TOKENS))
    assert done.returncode == 0, done.stderr
    return done.stdout.rstrip("\n")


class Up(processes.Up):
    """A running cluster."""

    def __init__(self, *flags):
        super().__init__(BINARY, MODEL, *flags)

    def wait_until_serving(self, workers, limit=20):
        """Returns the status once so many workers serve and have told their lanes."""
        end = time.monotonic() + limit
        attention = workers - 1
        # compute worker and each attention worker, those among each other, all and the scheduler
        links = 2 * attention + attention * (attention - 1) + workers
        while True:
            status = self.status()
            serving = len(re.findall(r" (?:attention|compute) +serving ", status))
            if serving == workers and len(re.findall(r" -> (?!gone)", status)) == links:
                return status
            assert time.monotonic() < end, status

    def stream(self, prompt):
        return processes.stream(self.url, prompt, max_tokens=TOKENS)

    def complete(self, prompt):
        return "".join(self.stream(prompt))

    def interrupt(self):
        """As Ctrl-C does. Its exit status, and the processes it had."""
        pids = list(processes.children_of(self.pid))
        return self.stop(number=signal.SIGINT), pids


class UpTest(unittest.TestCase):
    def test_there_is_an_attention_worker_for_each_device_that_is_named(self):
        with Up("--attention-devices", "cpu,cpu") as up:
            status = up.wait_until_serving(3)
            self.assertIn("attention-1 ", status)
            self.assertIn("attention-2 ", status)

    def test_each_device_may_have_a_size_of_its_own(self):
        with Up("--attention-devices", "cpu=4MiB,cpu=8MiB") as up:
            small, large = (float(re.search(rf"{name} .* serving +\d+ +\S+ +(\S+) ", up.wait_until_serving(3)).group(1))
                            for name in ("attention-1", "attention-2"))
            self.assertAlmostEqual(small, 4, delta=0.2)
            self.assertAlmostEqual(large, 8, delta=0.2)

    def test_a_size_that_is_none_or_too_small_is_refused_with_its_device(self):
        for devices, text in (("cpu=", "--attention-devices: '' is no size; write 8GiB"),
                              ("cpu,cpu=1QiB", "--attention-devices: '1QiB' is no size; write 8GiB"),
                              ("gpu=8GiB", "--attention-devices: 'gpu' is neither cpu nor cuda:N, as in cuda:1,cpu or "
                                           "cuda:0=8GiB,cpu=64GiB"),
                              ("cpu=1GiB,cpu=64KiB", "--attention-devices: cpu: 65536 bytes hold less than 128 "
                                                     "tokens; this model needs ")):
            with self.subTest(devices=devices):
                refused = run("up", MODEL, "--attention-devices", devices)
                self.assertEqual(refused.returncode, 1)
                self.assertIn(text, refused.stderr)

    def test_more_devices_than_workers_can_be_are_refused(self):
        refused = run("up", MODEL, "--attention-devices", ",".join(["cpu"] * 65))
        self.assertEqual(refused.returncode, 1)
        self.assertIn("--attention-devices: 65 devices; 64 attention workers are the most", refused.stderr)

    def test_a_cluster_of_processes_says_what_one_process_says_and_leaves_nothing(self):
        before = processes.shared_memory()
        expected = {prompt: embedded(prompt) for prompt in PROMPTS}
        self.assertGreater(len(expected[PROMPTS[0]]), 40)
        up = Up("--attention-workers", "3", "--placement", "mixed", "--ignore-model-name", "--shutdown-timeout", "2")
        try:
            status = up.wait_until_serving(4)
            self.assertIn("1 server(s)", status)
            for name in ("attention-1", "attention-2", "attention-3"):
                self.assertRegex(status, rf"compute-1 +-> {name} +\S*(posix|sysv|cma)")
            # In turn whole, split by heads, split by tokens.
            for prompt in PROMPTS:
                self.assertEqual(up.complete(prompt), expected[prompt])

            # A worker is killed under a stream: the rest of it is computed elsewhere, and another takes its place.
            for victim in ("attention-1", "attention-2", "attention-3", "compute-1"):
                seen = len(up.lines)
                text = ""
                for i, piece in enumerate(up.stream(PROMPTS[0])):
                    text += piece
                    if i == 8:
                        os.kill(up.pid_of(victim), signal.SIGKILL)
                self.assertEqual(text, expected[PROMPTS[0]], f"after {victim} was killed")
                up.wait_for(rf"{victim} was killed by signal 9; starting another", after=seen)
                up.wait_until_serving(4)
            self.assertEqual(up.complete(PROMPTS[1]), expected[PROMPTS[1]])
        finally:
            code, pids = up.interrupt()
        self.assertEqual(code, 0, "\n".join(up.lines[-30:]))
        self.assertEqual(len(pids), 6)
        for pid in pids:
            self.assertFalse(os.path.exists(f"/proc/{pid}"), f"process {pid} is left")
        for address in (up.url.removeprefix("http://"), up.scheduler):
            host, port = address.split(":")
            with socket.socket() as free:
                free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                free.bind((host, int(port)))
        self.assertEqual(processes.left_in_shared_memory(before), set())


class CommandLineTest(unittest.TestCase):
    def fails(self, *arguments):
        done = run(*arguments)
        self.assertNotEqual(done.returncode, 0, done.stdout)
        last = done.stderr.strip().splitlines()[-1]
        self.assertTrue(last.startswith("dovetail: "), done.stderr)
        return last

    def test_addresses_that_are_none_or_lead_nowhere_are_named(self):
        with socket.socket() as held:  # bound, not listening: no process answers there
            held.bind(("127.0.0.1", 0))
            silent = f"127.0.0.1:{held.getsockname()[1]}"
            worker = ("attention-worker", "--kv-capacity", "1MiB")
            for arguments, text in (
                    (("status", "--scheduler", "http://x"), "'http://x' is no address; write HOST:PORT"),
                    (("status", "--scheduler", silent), f"scheduler {silent}: cannot be reached; is it running"),
                    ((*worker, "--scheduler", silent, "--join-timeout", "0"), f"scheduler {silent}: cannot be reached"),
                    (("attention-worker", "--kv-capacity", "lots"), "--kv-capacity: 'lots' is no size"),
                    ((*worker, "--data-ports", "9-1"), "'9-1' is no range of ports"),
                    (("status", "--tls-cert", "x.pem"), "give all three")):
                self.assertIn(text, self.fails(*arguments))

    def test_a_second_scheduler_on_a_port_is_refused(self):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            refused = self.fails("scheduler", "--listen", address)
            self.assertIn(f"--listen {address}: cannot listen there; the port is taken", refused)

    def test_a_lane_that_this_host_lacks_is_refused(self):
        self.assertIn("rc", self.fails("scheduler", "--listen", "127.0.0.1:0", "--lanes", "rc"))


if __name__ == "__main__":
    if MODEL is None or not os.path.exists(MODEL):
        print("missing test data: models/stories260K/stories260K-f32.gguf")
        del UpTest
    unittest.main(verbosity=2)
