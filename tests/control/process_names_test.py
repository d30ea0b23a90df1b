#!/usr/bin/env python3
"""What an operator sees of the processes of a cluster: names, command lines, threads; and that none leaves a core dump.

Arguments: the dovetail binary.
"""
import os
import re
import shutil
import sys
import tempfile
import time
import unittest

import processes

BINARY = os.path.realpath(sys.argv.pop(1))
DATA = os.environ.get("DOVETAIL_TEST_DATA")
MODEL = os.path.join(DATA, "models/stories260K/stories260K-f32.gguf") if DATA else None


def read(pid, file):
    with open(f"/proc/{pid}/{file}", encoding="utf-8") as text:
        return text.read()


def name_of(pid):
    return read(pid, "comm").strip()


def arguments_of(pid):
    return read(pid, "cmdline").split("\0")[:-1]


def threads_of(pid):
    return {name_of(f"{pid}/task/{thread}") for thread in os.listdir(f"/proc/{pid}/task")}


def threads_once_there(pid, expected, limit=60):
    """The names of its threads, as soon as `expected` are among them: a thread names itself when it first runs, which
    may be after the process has said that it serves."""
    end = time.monotonic() + limit
    while not expected <= (threads := threads_of(pid)) and time.monotonic() < end:
        time.sleep(0.01)
    return threads


class ProcessesOfAClusterTest(unittest.TestCase):
    def check(self, pid, name, command, threads):
        self.assertEqual(name_of(pid), name)
        self.assertEqual(arguments_of(pid)[1], command)
        self.assertEqual(os.path.basename(arguments_of(pid)[0]), "dovetail")
        there = threads_once_there(pid, threads)
        self.assertLessEqual(threads, there, name)
        self.assertNotIn("exe", there)
        # One byte: too few for a file, and the limit at which the kernel starts no program that would take the dump.
        self.assertRegex(read(pid, "limits"), r"Max core file size +1 +1 ")

    def test_all_of_up_have_the_names_of_their_roles(self):
        with processes.Up(BINARY, MODEL, "--attention-workers", "2") as up:
            found = {name_of(pid): pid for pid in processes.children_of(up.pid)}
            worker = {"dt-loop", "dt-heartbeat"}
            for name, command, threads in (("dt-scheduler", "scheduler", {"dt-loop"}),
                                           ("dt-server", "server", {"dt-http", "dt-reading", "dt-updates"}),
                                           ("dt-compute-1", "compute-worker", worker),
                                           ("dt-attention-1", "attention-worker", worker),
                                           ("dt-attention-2", "attention-worker", worker)):
                self.check(found.pop(name), name, command, threads)
                self.assertRegex("\n".join(up.lines), name.removeprefix("dt-"))
            self.assertEqual(found, {})
            self.check(up.pid, "dt-up", "up", {"dt-scheduler", "dt-attention-1"})  # they read what those print

    def test_one_process_that_serves_has_one_too(self):
        with processes.Process(BINARY, "serve", MODEL, "--port", "0", "--threads", "2") as serve:
            serve.wait_for("listening on http://")
            self.check(serve.pid, "dt-serve", "serve", {"dt-engine", "dt-pool-1", "dt-http"})

    def test_a_binary_that_was_replaced_meanwhile_still_starts_processes_of_its_own_build(self):
        folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, folder)
        copy = os.path.join(folder, "dovetail")
        shutil.copy(BINARY, copy)
        with processes.Up(copy, MODEL) as up:
            os.unlink(copy)
            with open(copy, "w", encoding="ascii") as other:
                other.write("#!/bin/sh\necho another build\n")
            os.chmod(copy, 0o755)
            pid, seen = up.pid_of("attention-1"), len(up.lines)
            os.kill(pid, 9)
            up.wait_for("attention-1 serves as", after=seen)
            self.assertEqual(name_of(up.pid_of("attention-1")), "dt-attention-1")
            self.assertFalse(any(re.search("another build", line) for line in up.lines))


if __name__ == "__main__":
    if MODEL is None or not os.path.exists(MODEL):
        print("missing test data: models/stories260K/stories260K-f32.gguf")
        sys.exit(77)
    unittest.main(verbosity=2)
