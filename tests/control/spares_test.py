#!/usr/bin/env python3
"""Spare attention workers: processes that wait without KV for a name.

Arguments: the dovetail binary.
"""
import contextlib
import json
import signal
import subprocess
import sys
import time
import unittest

import processes

BINARY = sys.argv.pop(1)
READY = "spare attention worker: ready, waits for a name"
NOWHERE = ("--scheduler", "127.0.0.1:1", "--join-timeout", "0")


def name_of(pid):
    """What ps calls it; None: it is gone."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/comm", encoding="ascii") as name:
        return name.read().strip()
    return None


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
    unittest.main(verbosity=2)
