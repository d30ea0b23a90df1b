#!/usr/bin/env python3
"""`dovetail up` as its users run it: every role a process of its own, tensors over UCX. Arguments: the dovetail binary.

Compares what the cluster says with what one process says, kills workers under a stream, and looks for what a stopped
cluster leaves.
"""
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import unittest
import urllib.request

BINARY = sys.argv.pop(1)
DATA = os.environ.get("DOVETAIL_TEST_DATA")
MODEL = os.path.join(DATA, "models/stories260K/stories260K-f32.gguf") if DATA else None
PROMPTS = ["Once upon a time", "Lily and Tom went to the park. They saw", "The little dog was"]
TOKENS = 96
START_LIMIT = 60


def run(*arguments):
    return subprocess.run([BINARY, *arguments], capture_output=True, text=True, timeout=60)


def shared_memory():
    return {name for name in os.listdir("/dev/shm") if "ucx" in name or "ucp" in name}


def embedded(prompt):
    done = run("run", MODEL, prompt, "--raw", "--max-tokens", str(TOKENS))
    assert done.returncode == 0, done.stderr
    return done.stdout.rstrip("\n")


class Up:
    """A running cluster; its output is read as it comes."""

    def __init__(self, *flags):
        self.lines, self.changed = [], threading.Condition()
        self.process = subprocess.Popen([BINARY, "up", MODEL, "--port", "0", *flags], stdout=subprocess.PIPE,
                                        stderr=subprocess.STDOUT, text=True)
        self.reader = threading.Thread(target=self._read)
        self.reader.start()
        ready = self.wait_for(r"^ready: (http://\S+)  \(scheduler (\S+);")
        self.url, self.scheduler = ready.group(1), ready.group(2)

    def _read(self):
        for line in self.process.stdout:
            with self.changed:
                self.lines.append(line.rstrip("\n"))
                self.changed.notify_all()
        with self.changed:
            self.lines.append("(end)")
            self.changed.notify_all()

    def wait_for(self, pattern, after=0, limit=START_LIMIT):
        end = time.monotonic() + limit
        with self.changed:
            while True:
                for line in self.lines[after:]:
                    if found := re.search(pattern, line):
                        return found
                if self.lines and self.lines[-1] == "(end)" or time.monotonic() > end:
                    raise AssertionError(f"no line matches {pattern}:\n" + "\n".join(self.lines))
                self.changed.wait(end - time.monotonic())

    def status(self):
        done = run("status", "--scheduler", self.scheduler)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def wait_until_serving(self, workers, limit=20):
        """Returns the status once so many workers serve and have told their lanes."""
        end = time.monotonic() + limit
        links = 2 * (workers - 1) + workers  # compute worker and each attention worker, all and the scheduler
        while True:
            status = self.status()
            serving = len(re.findall(r" (?:attention|compute) +serving ", status))
            if serving == workers and len(re.findall(r" -> (?!gone)", status)) == links:
                return status
            assert time.monotonic() < end, status

    def children(self):
        listed = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(self.process.pid)], capture_output=True,
                                text=True, check=False).stdout
        found = (line.split(None, 1) for line in listed.splitlines() if "dovetail" in line)
        return {int(pid): arguments for pid, arguments in found}

    def pid_of(self, name):
        return next(pid for pid, arguments in self.children().items() if f"--name {name} " in arguments)

    def stream(self, prompt, **fields):
        body = {"model": "x", "prompt": prompt, "temperature": 0, "max_tokens": TOKENS, "stream": True, **fields}
        request = urllib.request.Request(self.url + "/v1/completions", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    chunk = json.loads(line[6:])
                    assert "error" not in chunk, chunk
                    if chunk["choices"]:
                        yield chunk["choices"][0]["text"]

    def complete(self, prompt):
        return "".join(self.stream(prompt))

    def stop(self):
        pids = list(self.children())
        self.process.send_signal(signal.SIGINT)
        code = self.process.wait(30)
        self.reader.join()
        return code, pids


class UpTest(unittest.TestCase):
    def test_a_cluster_of_processes_says_what_one_process_says_and_leaves_nothing(self):
        before = shared_memory()
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
            code, pids = up.stop()
        self.assertEqual(code, 0, "\n".join(up.lines[-30:]))
        self.assertEqual(len(pids), 6)
        for pid in pids:
            self.assertFalse(os.path.exists(f"/proc/{pid}"), f"process {pid} is left")
        for address in (up.url.removeprefix("http://"), up.scheduler):
            host, port = address.split(":")
            with socket.socket() as free:
                free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                free.bind((host, int(port)))
        # Other programs of this machine may be in the middle of opening a segment; what a dead process left stays.
        left, end = shared_memory() - before, time.monotonic() + 10
        while left and time.monotonic() < end:
            left &= shared_memory()
        self.assertEqual(left, set())


class CommandLineTest(unittest.TestCase):
    def fails(self, *arguments):
        done = run(*arguments)
        self.assertNotEqual(done.returncode, 0, done.stdout)
        last = done.stderr.strip().splitlines()[-1]
        self.assertTrue(last.startswith("dovetail: "), done.stderr)
        return last

    def test_addresses_that_are_none_or_lead_nowhere_are_named(self):
        with socket.socket() as held:  # bound, not listening: nobody answers there
            held.bind(("127.0.0.1", 0))
            nobody = f"127.0.0.1:{held.getsockname()[1]}"
            worker = ("attention-worker", "--kv-capacity", "1MiB")
            for arguments, text in (
                    (("status", "--scheduler", "http://x"), "'http://x' is no address; write HOST:PORT"),
                    (("status", "--scheduler", nobody), f"scheduler {nobody}: cannot be reached; is it running"),
                    ((*worker, "--scheduler", nobody, "--join-timeout", "0"), f"scheduler {nobody}: cannot be reached"),
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
