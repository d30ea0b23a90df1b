#!/usr/bin/env python3
"""Spare attention workers: processes that wait without KV until an attention worker of `up` ends, and take its place.

Arguments: the dovetail binary.
"""
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest

import processes

BINARY = sys.argv.pop(1)
DATA = os.environ.get("DOVETAIL_TEST_DATA")
MODEL = os.path.join(DATA, "models/stories260K/stories260K-f32.gguf") if DATA else None
REQUESTS = [{"prompt": prompt, "max_tokens": 450, "ignore_eos": True}
            for prompt in ("Once upon a time", "Lily and Tom went to the park. They saw", "The little dog was")]
READY = "spare attention worker: ready, waits for a name"
NOWHERE = ("--scheduler", "127.0.0.1:1", "--join-timeout", "0")


def name_of(pid):
    """What ps calls it; None: it is gone."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/comm", encoding="ascii") as name:
        return name.read().strip()
    return None


class Up(processes.Up):
    def __init__(self, *flags):
        super().__init__(BINARY, MODEL, "--ignore-model-name", "--shutdown-timeout", "1", "--threads", "1", *flags)

    def pids_of(self, name):
        return [pid for pid in processes.children_of(self.pid) if name_of(pid) == f"dt-{name}"]

    def pid_of(self, name, limit=30):
        """A spare that was taken has the worker's name, but not in its arguments; it takes it when it gets to it."""
        end = time.monotonic() + limit
        while not (found := self.pids_of(name)):
            assert time.monotonic() < end, "\n".join(self.lines)
            time.sleep(0.02)
        return found[0]

    def wait_for_spare(self, name="spare-1", after=0):
        self.wait_for(rf"^\[{name}\] {READY}", after=after)

    def kill(self, name):
        """Kills it; the number of the first line that comes after that."""
        seen = len(self.lines)
        os.kill(self.pid_of(name), signal.SIGKILL)
        return seen

    def workers(self):
        """name -> MiB of KV, of attention workers that serve."""
        rows = re.findall(r"(attention-\d+) .* serving +\d+ +\S+ +(\S+) ", self.status())
        return {name: float(size) for name, size in rows}

    def wait_for_workers(self, **sizes):
        """Until these serve, each with so many MiB of KV; attention_1 stands for attention-1."""
        wanted, end = {name.replace("_", "-"): size for name, size in sizes.items()}, time.monotonic() + 30
        while {name: round(size) for name, size in self.workers().items()} != wanted:
            assert time.monotonic() < end, self.status()
            time.sleep(0.05)

    def drain(self, name):
        done = subprocess.run([BINARY, "drain", name, "--scheduler", self.scheduler], capture_output=True, text=True,
                              timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        self.wait_for(f"{name} was drained and stays away")


def wait_until_gone(pids, limit=20):
    end = time.monotonic() + limit
    while left := [pid for pid in pids if name_of(pid)]:
        assert time.monotonic() < end, f"left: {left}"
        time.sleep(0.02)


class SparesOfUp(unittest.TestCase):
    def test_take_the_place_of_the_only_worker_each_time_it_is_killed_and_streams_go_on(self):
        folder = self.enterContext(tempfile.TemporaryDirectory())
        with Up("--spares", "1", "--trace-file", os.path.join(folder, "trace")) as up:
            after, expected = 0, None
            for kill in range(2):
                up.wait_for_spare(after=after)
                spare = up.pid_of("spare")
                with processes.Load(up.url, REQUESTS, turns=1) as load:
                    expected = expected or load.expected
                    load.wait_for_pieces(5)
                    begun = time.monotonic()
                    after = up.kill("attention-1")
                    up.wait_for("attention-1 was killed by signal 9; a spare takes its place$", after=after)
                print(f"kill {kill + 1}: streams stood still for {load.longest_gap(begun):.2f} s", file=sys.stderr)
                self.assertEqual((load.finished, load.problems), (3, []))
                self.assertEqual(load.expected, expected)
                self.assertEqual(up.pid_of("attention-1"), spare)
                self.assertRegex(up.status(), r"attention-1 .* serving ")
                self.assertTrue(any(line.startswith("[attention-1] ") for line in up.lines[after:]))
            self.assertFalse(any(re.search("starting another|\\[spare-1\\] .*attention-1", line) for line in up.lines))
            self.assertEqual(up.stop(), 0, "\n".join(up.lines[-30:]))
            self.assertIn("trace.attention-1", os.listdir(folder))

    def test_are_for_each_place_and_none_is_left_where_the_last_worker_was_drained(self):
        with Up("--attention-devices", "cpu=8MiB,cpu=16MiB", "--attention-workers", "3", "--spares", "1") as up:
            up.wait_for_spare("spare-1")
            up.wait_for_spare("spare-2")
            self.assertEqual(len(up.pids_of("spare")), 2)
            up.wait_for_workers(attention_1=8, attention_2=16, attention_3=8)
            after = up.kill("attention-2")
            up.wait_for("attention-2 was killed by signal 9; a spare takes its place", after=after)
            up.wait_for_workers(attention_1=8, attention_2=16, attention_3=8)
            up.wait_for_spare("spare-2", after=after)

            spares = up.pids_of("spare")
            up.drain("attention-1")  # attention-3 is of its place
            up.wait_for_workers(attention_2=16, attention_3=8)
            self.assertEqual(up.pids_of("spare"), spares)
            up.drain("attention-2")
            up.wait_for("spare-2 ends: no worker is left whose place it could take")
            wait_until_gone(set(spares) - {up.pid_of("spare")})
            up.wait_for_workers(attention_3=8)
            self.assertEqual(len(up.pids_of("spare")), 1)
            self.assertFalse(any("takes its place" in line for line in up.lines[after:] if "attention-2" not in line))
            self.assertEqual(up.stop(), 0, "\n".join(up.lines[-30:]))

    def test_come_after_the_pauses_of_restarts_where_a_worker_does_not_stay_up(self):
        with Up("--spares", "4") as up:
            for number in range(1, 5):
                up.wait_for_spare(f"spare-{number}")
            for _ in range(4):  # the first life may have been a long one
                after = up.kill("attention-1")
                how = up.wait_for("attention-1 was killed by signal 9; (a spare takes its place$|"
                                  "starting another in .*: it does not stay up, 3 in a row)", after=after).group(1)
                if how.startswith("starting"):
                    break
            self.assertRegex(how, "^starting another in ")
            up.wait_for("attention-1: a spare takes its place$", after=after)
            up.wait_for("attention-1 serves as", after=after)
            self.assertEqual(up.stop(), 0, "\n".join(up.lines[-30:]))

    def test_are_started_again_when_they_end_and_end_with_up_however_it_ends(self):
        with Up("--spares", "2") as up:
            for name in ("spare-1", "spare-2"):
                up.wait_for_spare(name)
            after = up.kill("spare")
            name = up.wait_for(r"(spare-\d) was killed by signal 9; starting another", after=after).group(1)
            up.wait_for_spare(name, after=after)
            self.assertEqual(len(up.pids_of("spare")), 2)
            pids = list(processes.children_of(up.pid))
            up.stop(number=signal.SIGKILL)
            wait_until_gone(pids)


class ASpare(unittest.TestCase):
    """By itself."""

    @contextlib.contextmanager
    def spare(self, *flags):
        with subprocess.Popen([BINARY, "attention-worker", "--spare", "--kv-capacity", "8MiB", "--threads", "2",
                               *NOWHERE, *flags], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True) as process:
            try:
                yield process
            finally:
                process.kill()

    def ready(self, process):
        while line := process.stdout.readline():
            if READY in line:
                return
        self.fail("it ended before it was ready")

    def test_waits_without_the_cpu_and_ends_quietly_with_its_input(self):
        with self.spare() as process:
            self.ready(process)
            self.assertEqual(name_of(process.pid), "dt-spare")
            time.sleep(0.2)  # its threads fall asleep
            used = processes.cpu_seconds(process.pid)
            time.sleep(0.5)
            self.assertLessEqual(processes.cpu_seconds(process.pid) - used, 0.02)
            self.assertEqual(process.communicate(timeout=60), ("", None))
            self.assertEqual(process.returncode, 0)

    def test_ends_with_sigterm(self):
        with self.spare() as process:
            self.ready(process)
            process.send_signal(signal.SIGTERM)
            self.assertEqual(process.wait(60), 0)

    def test_is_the_worker_that_it_is_told_to_be(self):
        with self.spare("--log-format", "json") as process:
            self.ready(process)
            output, _ = process.communicate("serve attention-7\n", timeout=60)
            last = json.loads(output.splitlines()[-1])
            self.assertEqual(last["process"], "attention-7")
            self.assertIn("scheduler 127.0.0.1:1: cannot be reached", last["message"])
            self.assertEqual(process.returncode, 1)

    def test_refuses_other_lines_and_flags_that_are_wrong(self):
        with self.spare() as process:
            self.ready(process)
            output, _ = process.communicate("stop\n", timeout=60)
            self.assertIn("--spare: standard input says 'stop'; write `serve NAME`", output)
            self.assertEqual(process.returncode, 1)
        for flags, text in ((("--kv-leave", "lots"), "--kv-leave: 'lots' is no size"),
                            (("--device", "gpu"), "--device: 'gpu' is neither cpu nor cuda:N"),
                            (("--name", "a1"), "--spare")):
            with self.subTest(flags=flags), self.spare(*flags) as process:
                output, _ = process.communicate("serve a1\n", timeout=60)
                self.assertIn(text, output)
                self.assertNotIn(READY, output)
                self.assertNotEqual(process.returncode, 0)


if __name__ == "__main__":
    if MODEL is None or not os.path.exists(MODEL):
        print("missing test data: models/stories260K/stories260K-f32.gguf")
        del SparesOfUp
    unittest.main(verbosity=2)
