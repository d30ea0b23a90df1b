#!/usr/bin/env python3
"""`dovetail up` on a machine that gives one of its workers no time: it stays a member, for its process lives.

Arguments: the dovetail binary, a model.
"""
import contextlib
import os
import signal
import subprocess
import sys
import time
import unittest

import processes

BINARY, MODEL = sys.argv.pop(1), sys.argv.pop(1)
ROUNDS = 12  # at most, until the worker was late; the system decides who waits for how long
# In turn. The first is four leases. A worker whose heartbeats were late may be twice as late the
# next time, so each is longer than twice the one before; after ten seconds it would be taken out.
BUSY_S, IDLE_S = (1.5, 3.5, 8), 0.5


def threads_of(pid):
    return [int(thread) for thread in os.listdir(f"/proc/{pid}/task")]


class Starved:
    """A process whose threads get time from one processor, and only what others leave there. `neighbours`, processes,
    have the other processors, so that they are not starved as well."""

    def __init__(self, pid, neighbours):
        processors = os.sched_getaffinity(0)
        self.processor = min(processors)
        for thread in threads_of(pid):
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(thread, {self.processor})
                os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
        for neighbour in neighbours - {pid} if len(processors) > 1 else ():
            for thread in threads_of(neighbour):
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(thread, processors - {self.processor})

    def __enter__(self):
        self.others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
        for other in self.others:
            os.sched_setaffinity(other.pid, {self.processor})
            other.send_signal(signal.SIGSTOP)
        # Where that is allowed, the first one leaves the processor for 50 ms of each second only.
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(self.others[0].pid, os.SCHED_FIFO, os.sched_param(1))
        return self

    def __exit__(self, *_):
        for other in self.others:
            other.kill()
            other.wait()

    def for_a_while(self, busy_s):
        """No time for so long; then some."""
        for number, seconds in ((signal.SIGCONT, busy_s), (signal.SIGSTOP, IDLE_S)):
            for other in self.others:
                other.send_signal(number)
            time.sleep(seconds)


class BusyMachineTest(unittest.TestCase):
    def setUp(self):
        self.up = self.enterContext(processes.Up(
            BINARY, MODEL, "--compute-workers", "4", "--threads", "1", "--attention-workers", "2",
            "--kv-cache-memory-bytes", "16MiB", "--ignore-model-name", "--shutdown-timeout", "1"))

    def lines_with(self, text, seen):
        return [line for line in self.up.lines[seen:] if text in line]

    def test_a_worker_that_gets_no_time_stays_a_member(self):
        for name in ("compute-2", "attention-1"):
            seen = len(self.up.lines)
            with contextlib.ExitStack() as rest:
                all_of_it = {self.up.pid, *processes.children_of(self.up.pid)}
                starved = rest.enter_context(Starved(self.up.pid_of(name), all_of_it))
                late, rounds = f"{name} is late, and was not stopped: this machine is busy", 0
                while not self.lines_with(late, seen) and rounds < ROUNDS:
                    starved.for_a_while(BUSY_S[rounds % len(BUSY_S)])
                    self.assertEqual(self.lines_with(" is out: ", seen), [])
                    rounds += 1
            self.assertNotEqual(self.lines_with(late, seen), [], f"got its time in {rounds} rounds")
        self.assertTrue("".join(processes.stream(self.up.url, "Once upon a time", max_tokens=20)))

    def test_a_worker_that_is_stopped_is_taken_out_within_its_lease(self):
        pid, seen = self.up.pid_of("compute-2"), len(self.up.lines)
        os.kill(pid, signal.SIGSTOP)
        self.addCleanup(os.kill, pid, signal.SIGCONT)
        begun = time.monotonic()
        self.up.wait_for(r"worker \d+ is out: silent for \d+ ms: stopped, or cut off", after=seen)
        self.assertLess(time.monotonic() - begun, 8, "one that gets no time has 10 s")


if __name__ == "__main__":
    unittest.main(verbosity=2)
