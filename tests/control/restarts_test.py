#!/usr/bin/env python3
"""Processes of a cluster that end, and what the others do meanwhile: servers and workers wait for their scheduler, `up`
starts another of whatever ends, and requests do not wait without limit.

Arguments: the dovetail binary.
"""
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.error
import urllib.request

import processes

BINARY = sys.argv.pop(1)
DATA = os.environ.get("DOVETAIL_TEST_DATA")
MODEL = os.path.join(DATA, "models/stories260K/stories260K-f32.gguf") if DATA else None
PROMPT = {"prompt": "Once upon a time", "max_tokens": 24}


def ask(url, limit=60):
    """Status and answer of a completion that is not streamed."""
    body = json.dumps({"model": "x", "temperature": 0, **PROMPT}).encode()
    request = urllib.request.Request(url + "/v1/completions", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=limit) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as refused:
        return refused.code, json.load(refused)
    except OSError as error:  # between two processes that listen there
        return 0, str(error)


def text_of(url):
    """What a cluster that serves, or will soon, says."""
    end = time.monotonic() + 60
    while True:
        status, answer = ask(url)
        if status == 200:
            return answer["choices"][0]["text"]
        assert status in (0, 503) and time.monotonic() < end, (status, answer)
        time.sleep(0.05)


class Role(processes.Process):
    def __init__(self, *arguments, **how):
        super().__init__(BINARY, *arguments, **how)


class Cluster:
    """One process of each role, started by hand; ended by `with`."""

    def __init__(self, *scheduler_flags):
        self.flags = scheduler_flags
        self.scheduler = Role("scheduler", "--listen", "127.0.0.1:0", *scheduler_flags)
        self.address = self.scheduler.wait_for(r"^listening on (\S+)").group(1)
        joining = ("--scheduler", self.address, "--join-timeout", "1", "--threads", "1", "--lanes", "shm")
        self.compute = Role("compute-worker", MODEL, "--name", "c1", *joining)
        self.attention = Role("attention-worker", "--kv-capacity", "8MiB", "--name", "a1", *joining)
        self.files = tempfile.mkdtemp()
        self.server = Role("server", "--scheduler", self.address, "--port", "0", "--ignore-model-name",
                           "--shutdown-timeout", "1", environment={"TMPDIR": self.files})
        self.wait_until_whole()
        self.url = self.server.wait_for(r"^listening on (http://\S+)").group(1)

    def wait_until_whole(self):
        for name in ("c1", "a1"):
            self.scheduler.wait_for(f"{name} serves as")

    def start_scheduler(self):
        self.scheduler = Role("scheduler", "--listen", self.address, *self.flags)
        self.scheduler.wait_for(r"^listening on ")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for role in (self.server, self.attention, self.compute, self.scheduler):
            role.stop()
        shutil.rmtree(self.files)


class ASchedulerThatIsStartedAgain(unittest.TestCase):
    def test_servers_and_workers_that_were_with_it_are_back_at_once_and_whatever_time_it_takes(self):
        with Cluster() as cluster:
            expected = text_of(cluster.url)
            # A server that serves has no files left, which would stay behind if it were killed.
            self.assertEqual(os.listdir(cluster.files), [])
            cluster.scheduler.stop(number=signal.SIGKILL)
            time.sleep(0.3)  # several attempts fail
            seen = len(cluster.server.lines)
            cluster.start_scheduler()
            begun = time.monotonic()
            cluster.server.wait_for(r"scheduler \S+: back", after=seen)
            took = time.monotonic() - begun
            print(f"the server was back after {took:.2f} s", file=sys.stderr)
            self.assertLess(took, 2)
            self.assertEqual(text_of(cluster.url), expected)

            seen = [len(role.lines) for role in (cluster.compute, cluster.attention)]
            cluster.scheduler.stop(number=signal.SIGKILL)
            for role, after in zip((cluster.compute, cluster.attention), seen):
                role.wait_for("cannot be reached.*; trying until it is back", after=after)
            time.sleep(2)  # twice as long as a worker waits that was never with it
            for role in (cluster.compute, cluster.attention, cluster.server):
                self.assertIsNone(role.process.poll(), "\n".join(role.lines))
            cluster.start_scheduler()
            cluster.wait_until_whole()
            self.assertEqual(text_of(cluster.url), expected)
            self.assertEqual(sum("loaded " in line for line in cluster.compute.lines), 1)


class RequestsThatNothingCanRun(unittest.TestCase):
    def test_they_end_with_503_after_the_time_given_and_are_taken_again_with_the_next_worker(self):
        with Cluster("--unserved-timeout", "1", "--lease-ms", "3000") as cluster:
            expected = text_of(cluster.url)
            cluster.attention.send(signal.SIGSTOP)  # it is a member for three more seconds
            try:
                begun = time.monotonic()
                status, answer = ask(cluster.url)
                took = time.monotonic() - begun
                self.assertEqual((status, answer["error"]["code"]), (503, "unavailable"))
                print(f"the request ended after {took:.2f} s", file=sys.stderr)
                self.assertLess(took, 15)
                cluster.scheduler.wait_for("no attention worker serves; .*; requests end with 503 until one does")
                self.assertEqual(ask(cluster.url)[0], 503)
            finally:
                cluster.attention.send(signal.SIGCONT)
            cluster.scheduler.wait_for("requests are taken again")
            self.assertEqual(text_of(cluster.url), expected)


class ASchedulerThatStops(unittest.TestCase):
    def test_requests_end_with_503_and_are_taken_again_when_it_goes_on(self):
        with Cluster() as cluster:
            expected = text_of(cluster.url)
            seen = len(cluster.server.lines)
            cluster.scheduler.send(signal.SIGSTOP)
            try:
                begun = time.monotonic()
                status, answer = ask(cluster.url)
                took = time.monotonic() - begun
                self.assertEqual((status, answer["error"]["code"]), (503, "unavailable"))
                print(f"the request ended after {took:.2f} s", file=sys.stderr)
                self.assertLess(took, 15)
                cluster.server.wait_for("scheduler .*: says nothing for 5s", after=seen)
            finally:
                cluster.scheduler.send(signal.SIGCONT)
            self.assertEqual(text_of(cluster.url), expected)


class AServerThatStops(unittest.TestCase):
    def test_its_streams_go_on_when_it_goes_on(self):
        request = {**PROMPT, "max_tokens": 400, "ignore_eos": True}
        with Cluster() as cluster:
            processes.wait_until_ready(cluster.url)
            text, expected = "", "".join(processes.stream(cluster.url, **request))
            for number, piece in enumerate(processes.stream(cluster.url, **request)):
                text += piece
                if number == 3:
                    cluster.server.send(signal.SIGSTOP)
                    time.sleep(6)  # a scheduler that says nothing for 5 s has stopped
                    cluster.server.send(signal.SIGCONT)
            self.assertEqual(text, expected)
            self.assertEqual([line for line in cluster.server.lines if "says nothing" in line], [])


class Up(processes.Up):
    def __init__(self, *flags):
        super().__init__(BINARY, MODEL, "--ignore-model-name", "--shutdown-timeout", "1", "--threads", "1", *flags)

    def pid_of(self, name):
        """Its process; None: none runs."""
        pattern = f" {name} --" if name in ("scheduler", "server") else f" --name {name} "
        return next((pid for pid, arguments in processes.children_of(self.pid).items()
                     if re.search(pattern, arguments)), None)

    def drain(self, name):
        done = subprocess.run([BINARY, "drain", name, "--scheduler", self.scheduler], capture_output=True, text=True,
                              timeout=60, check=False)
        assert done.returncode == 0, done.stderr

    def wait_for_another(self, name, pid, limit=30):
        """The process of that name once it is not `pid`."""
        end = time.monotonic() + limit
        while (found := self.pid_of(name)) in (None, pid):
            assert time.monotonic() < end, "\n".join(self.lines)
            time.sleep(0.02)
        return found


class UpStartsAgain(unittest.TestCase):
    def test_every_process_that_is_killed_and_serves_as_before_at_the_same_address(self):
        with Up("--attention-workers", "2") as up:
            expected = text_of(up.url)
            for victim in ("scheduler", "server", "attention-1", "compute-1"):
                seen, pid = len(up.lines), up.pid_of(victim)
                os.kill(pid, signal.SIGKILL)
                up.wait_for(f"{victim} was killed by signal 9; starting another", after=seen)
                up.wait_for_another(victim, pid)
                self.assertEqual(text_of(up.url), expected, victim)
            self.assertEqual(up.stop(), 0, "\n".join(up.lines[-30:]))

    def test_no_worker_that_was_drained(self):
        with Up("--attention-workers", "2") as up:
            expected = text_of(up.url)
            up.drain("attention-2")
            up.wait_for("attention-2 was drained and stays away")
            self.assertIsNone(up.pid_of("attention-2"))
            self.assertEqual(text_of(up.url), expected)
            self.assertEqual(up.stop(), 0, "\n".join(up.lines[-30:]))

    def test_no_worker_that_was_drained_where_only_warnings_are_logged(self):
        with Up("--attention-workers", "2", "--log-level", "warning") as up:
            expected = text_of(up.url)
            up.drain("attention-2")
            self.assertEqual(text_of(up.url), expected)
            # One that ends later is started again by now, and so would be the one that was drained.
            pid = up.pid_of("attention-1")
            os.kill(pid, signal.SIGKILL)
            up.wait_for("attention-1 was killed by signal 9; starting another")
            up.wait_for_another("attention-1", pid)
            self.assertIsNone(up.pid_of("attention-2"))
            self.assertEqual(up.stop(), 0, "\n".join(up.lines[-30:]))
            self.assertFalse([line for line in up.lines if "] I 20" in line])

    def test_one_that_does_not_stay_up_later_and_later_names_it_and_goes_on_serving(self):
        with Up("--attention-workers", "2") as up:
            expected = text_of(up.url)
            seen, pid = len(up.lines), None
            for _ in range(4):
                pid = up.wait_for_another("attention-2", pid)
                os.kill(pid, signal.SIGKILL)
                self.assertEqual(text_of(up.url), expected)
            up.wait_for("attention-2 was killed by signal 9; starting another in .*: it does not stay up, "
                        "[34] in a row", after=seen)
            seen = len(up.lines)
            up.wait_for("attention-2 serves as", after=seen)
            self.assertEqual(text_of(up.url), expected)
            self.assertEqual(up.stop(), 0, "\n".join(up.lines[-30:]))


if __name__ == "__main__":
    if MODEL is None or not os.path.exists(MODEL):
        print("missing test data: models/stories260K/stories260K-f32.gguf")
        sys.exit(77)
    unittest.main(verbosity=2)
