#!/usr/bin/env python3
"""The roles of a cluster started by hand, as on several hosts: mutual TLS, a join token, tensors over TCP within a
range of ports.

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
import urllib.request

import processes
import proxy
from certificates import Certificates

BINARY = sys.argv.pop(1)
DATA = os.environ.get("DOVETAIL_TEST_DATA")
MODEL = os.path.join(DATA, "models/stories260K/stories260K-f32.gguf") if DATA else None
FIRST_PORT = 20000 + os.getpid() % 20000  # of 40
PORTS = f"{FIRST_PORT}-{FIRST_PORT + 39}"


def run(*arguments):
    return subprocess.run([BINARY, *arguments], capture_output=True, text=True, timeout=60)


class Role(processes.Process):
    def __init__(self, *arguments):
        super().__init__(BINARY, *arguments)


def listening_ports(pid):
    """TCP ports that a process listens on."""
    inodes = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            link = os.readlink(f"/proc/{pid}/fd/{name}")
        except OSError:
            continue
        if link.startswith("socket:["):
            inodes.add(link[8:-1])
    ports = set()
    for table in ("tcp", "tcp6"):
        with open(f"/proc/{pid}/net/{table}", encoding="ascii") as rows:
            for row in rows.readlines()[1:]:
                fields = row.split()
                if fields[3] == "0A" and fields[9] in inodes:
                    ports.add(int(fields[1].split(":")[1], 16))
    return ports


class RolesTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.folder)
        self.certificates = Certificates(self.folder)
        for name in ("scheduler", "attention-worker", "compute-worker", "server", "operator"):
            self.certificates.issue(name)
        self.token = os.path.join(self.folder, "token")
        with open(self.token, "w", encoding="ascii") as token:
            token.write("a-secret-of-this-cluster\n")
        self.data = ["--lanes", "tcp", "--data-devices", "lo", "--data-ports", PORTS]

    def control(self, name, address):
        return ["--scheduler", address, "--join-token-file", self.token, *self.certificates.flags(name)]

    def scheduler(self, *flags):
        return Role("scheduler", "--listen", "127.0.0.1:0", "--join-token-file", self.token, *self.data, *flags,
                    *self.certificates.flags("scheduler"))

    def worker(self, address, name, *flags):
        return Role("attention-worker", "--kv-capacity", "8MiB", "--name", name, "--threads", "1", *self.data,
                    *self.control("attention-worker", address), *flags)

    def test_a_cluster_with_mutual_tls_a_token_and_tcp_lanes_in_a_range_of_ports(self):
        expected = run("run", MODEL, "Once upon a time", "--raw", "--max-tokens", "40")
        self.assertEqual(expected.returncode, 0, expected.stderr)
        with self.scheduler() as scheduler:
            address = scheduler.wait_for(r"^listening on (\S+)").group(1)
            with (self.worker(address, "a1") as one, self.worker(address, "a2") as two,
                  Role("compute-worker", MODEL, "--name", "c1", "--threads", "1", *self.data,
                       *self.control("compute-worker", address)) as compute,
                  Role("server", "--port", "0", "--ignore-model-name", "--shutdown-timeout", "1",
                       *self.control("server", address)) as server):
                url = server.wait_for(r"^listening on (http://\S+)").group(1)
                for name in ("a1", "a2", "c1"):
                    self.assertIn("tcp", scheduler.wait_for(rf"{name} serves as .* over (\S+)").group(1))
                processes.wait_until_ready(url)
                body = {"model": "x", "prompt": "Once upon a time", "temperature": 0, "max_tokens": 40}
                request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(),
                                                 {"Content-Type": "application/json"})
                with urllib.request.urlopen(request, timeout=60) as response:
                    text = json.load(response)["choices"][0]["text"]
                self.assertEqual(text, expected.stdout.rstrip("\n"))
                series = r'certificate_expiration_timestamp_seconds{role="(\S+)",worker="(\S*)"} (\S+)'
                told, give_up = [], time.monotonic() + 30
                while len(told) < 5 and time.monotonic() < give_up:  # with heartbeats
                    with urllib.request.urlopen(url + "/metrics", timeout=60) as response:
                        told = re.findall(series, response.read().decode())
                ends = {role: self.certificates.end(role) for role in ("scheduler", "server", "attention-worker",
                                                                       "compute-worker")}
                self.assertEqual({(role, name): int(float(end)) for role, name, end in told},
                                 {("scheduler", ""): ends["scheduler"], ("server", ""): ends["server"],
                                  ("attention", "a1"): ends["attention-worker"],
                                  ("attention", "a2"): ends["attention-worker"],
                                  ("compute", "c1"): ends["compute-worker"]})
                for role in (one, two, compute):
                    ports = listening_ports(role.process.pid)
                    self.assertTrue(ports, "a worker listens for tensors")
                    self.assertTrue(all(FIRST_PORT <= port < FIRST_PORT + 40 for port in ports), ports)

                # Certificates renewed under the scheduler, and a CA that replaces the old one, are used at once.
                renewed = Certificates(self.folder, "ca2")
                for name in ("scheduler", "attention-worker"):
                    renewed.issue(name)
                shutil.copyfile(renewed.path("ca2.pem"), self.certificates.path("ca.pem.new"))
                os.replace(self.certificates.path("ca.pem.new"), self.certificates.path("ca.pem"))
                with self.worker(address, "a3") as three:
                    three.wait_for("a3 is attention worker")
                    scheduler.wait_for("a3 serves as")

    def test_who_lacks_the_token_or_a_certificate_is_told_so_and_the_cluster_goes_on(self):
        with self.scheduler() as scheduler:
            address = scheduler.wait_for(r"^listening on (\S+)").group(1)
            patient = ["attention-worker", "--kv-capacity", "1MiB", *self.data, "--scheduler", address]
            worker = [*patient, "--join-timeout", "0"]
            token = ["--join-token-file", self.token]

            def fails(*arguments):
                done = run(*arguments)
                self.assertEqual(done.returncode, 1, done.stderr)
                return done.stderr.strip().splitlines()[-1]

            # A refusal ends it at once; a handshake that a busy machine breaks off is tried again.
            self.assertIn("the join token is missing", fails(*patient, *self.certificates.flags("attention-worker")))
            self.assertIn("it may ask for TLS", fails(*worker, *token))
            self.certificates.issue("late", days="-1")
            self.assertIn("late.pem expired on", fails(*worker, *token, *self.certificates.flags("late")))
            self.certificates.issue_for_the_future("early")
            self.assertIn("early.pem is not valid before 2099-01-01 00:00 UTC; is this machine's clock right?",
                          fails(*worker, *token, *self.certificates.flags("early")))
            Certificates(self.folder, "stranger").issue("foreign")
            foreign = [*self.certificates.flags("foreign")]
            self.assertIn("cannot be reached", fails(*worker, *token, *foreign))
            distrusting = self.certificates.flags("attention-worker", "stranger")
            self.assertIn("the TLS handshake failed", fails(*worker, *token, *distrusting))
            path = self.certificates.path
            mixed = ["--tls-cert", path("attention-worker.pem"), "--tls-key", path("late.key"), "--tls-ca",
                     path("ca.pem")]
            self.assertIn("is not the key of the certificate", fails(*worker, *token, *mixed))
            status = run("status", *self.control("operator", address))
            self.assertEqual(status.returncode, 0, status.stderr)
            self.assertIn("no compute worker has joined yet", status.stdout)

    def test_a_worker_that_is_stopped_is_fenced_within_its_lease_and_joins_anew_when_it_goes_on(self):
        with self.scheduler("--lease-ms", "400") as scheduler:
            address = scheduler.wait_for(r"^listening on (\S+)").group(1)
            with self.worker(address, "a1") as worker:
                number = worker.wait_for(r"a1 is attention worker (\d+)").group(1)
                while " waiting " not in run("status", *self.control("operator", address)).stdout:
                    pass  # its lease has not begun
                worker.send(signal.SIGSTOP)
                begun = time.monotonic()
                lasted = scheduler.wait_for(rf"worker {number} is out: silent for (\d+) ms: stopped").group(1)
                self.assertGreaterEqual(int(lasted), 400)
                # Longer only where the machine was so busy before that heartbeats were late.
                self.assertLess(time.monotonic() - begun, int(lasted) / 1000 + 1.1)
                worker.send(signal.SIGCONT)
                scheduler.wait_for(rf"a1 joins as attention worker (?!{number}:)")

    def test_a_worker_that_is_stopped_as_it_joins_is_fenced_and_the_others_go_on_sleeping(self):
        # Its connections are half made then: the kernel has accepted what the process never answers. Who waits for
        # such an answer must not spin: not while the worker is a member, and not once it is none.
        with self.scheduler("--lease-ms", "400") as scheduler:
            address = scheduler.wait_for(r"^listening on (\S+)").group(1)
            with Role("compute-worker", MODEL, "--name", "c1", "--threads", "1", *self.data,
                      *self.control("compute-worker", address)) as compute:
                scheduler.wait_for("c1 joins as")
                pids = {"scheduler": scheduler.pid, "compute worker": compute.pid}
                begun, before = time.monotonic(), {role: processes.cpu_seconds(pid) for role, pid in pids.items()}
                for name in ("a1", "a2", "a3", "a4", "a5"):  # each at another moment
                    worker = self.worker(address, name)
                    self.addCleanup(worker.stop)
                    number = worker.wait_for(rf"{name} is attention worker (\d+)").group(1)
                    worker.send(signal.SIGSTOP)
                    self.addCleanup(worker.process.kill)
                    scheduler.wait_for(rf"worker {number} is out: silent")
                elapsed = time.monotonic() - begun
                for role, pid in pids.items():
                    share = (processes.cpu_seconds(pid) - before[role]) / elapsed
                    self.assertLess(share, 0.3, f"of a core, taken by the {role}")
                with self.worker(address, "a6"):
                    scheduler.wait_for("a6 serves as")

    def test_a_worker_that_is_stopped_again_and_again_joins_anew_for_longer_than_it_would_try_in_vain(self):
        with self.scheduler("--lease-ms", "200") as scheduler:
            address = scheduler.wait_for(r"^listening on (\S+)").group(1)
            with self.worker(address, "a1", "--join-timeout", "1") as worker:
                begun, seen = time.monotonic(), 0
                for _ in range(6):
                    number = scheduler.wait_for(r"a1 joins as attention worker (\d+)", after=seen).group(1)
                    while " waiting " not in run("status", *self.control("operator", address)).stdout:
                        pass
                    seen = len(scheduler.lines)
                    worker.send(signal.SIGSTOP)
                    scheduler.wait_for(rf"worker {number} is out: silent", after=seen)
                    worker.send(signal.SIGCONT)
                self.assertGreater(time.monotonic() - begun, 2)
                scheduler.wait_for(r"a1 joins as attention worker", after=seen)

    def test_probes_say_whether_a_worker_serves_and_whether_it_is_a_member(self):
        def probe(flag, name, address):
            done = run("status", flag, name, *self.control("operator", address))
            self.assertEqual(done.stdout, "")
            return done.returncode, done.stderr.strip().removeprefix("dovetail: ")

        with self.scheduler() as scheduler:
            address = scheduler.wait_for(r"^listening on (\S+)").group(1)
            with self.worker(address, "a1") as worker:
                worker.wait_for("a1 is attention worker")
                # Without a compute worker it waits for what to prepare.
                self.assertEqual(probe("--ready", "a1", address), (1, "a1 is waiting, not serving"))
                self.assertEqual(probe("--alive", "a1", address), (0, ""))
                for flag in ("--ready", "--alive"):
                    self.assertEqual(probe(flag, "a2", address), (1, "a2 is no member of the cluster"))
        code, why = probe("--ready", "a1", address)
        self.assertEqual((code, "cannot be reached" in why), (1, True), why)
        self.assertEqual(probe("--alive", "a1", address), (0, ""))
        both = run("status", "--ready", "a1", "--alive", "a1")
        self.assertEqual(both.returncode, 2)

    @unittest.skipUnless(os.path.exists("/proc/self/numa_maps"), "the system has no NUMA policies")
    def test_a_worker_on_a_numa_node_has_its_memory_there_and_a_node_that_is_not_there_is_refused(self):
        with self.scheduler() as scheduler:
            address = scheduler.wait_for(r"^listening on (\S+)").group(1)
            with self.worker(address, "a1", "--numa-node", "0") as worker:
                worker.wait_for("a1 is attention worker")
                with open(f"/proc/{worker.pid}/numa_maps", encoding="ascii") as maps:
                    policies = [line.split()[1] for line in maps]
                if not any("does not let a process choose its memory" in line for line in worker.lines):
                    self.assertEqual({policy.split(":")[0] for policy in policies}, {"prefer"})
            with self.worker(address, "a2", "--numa-node", "1023") as worker:
                worker.wait_for("--numa-node: 1023 is no NUMA node with memory and with cores .* those are 0")
                self.assertEqual(worker.process.wait(30), 1)

    def test_a_worker_whose_dismissal_is_lost_when_it_is_drained_hears_of_it_when_it_joins_again(self):
        with self.scheduler("--lease-ms", "20000") as scheduler:
            address = scheduler.wait_for(r"^listening on (\S+)").group(1)
            with proxy.Proxy(address) as between, self.worker(between.address, "a1") as worker:
                number = worker.wait_for(r"a1 is attention worker (\d+)").group(1)
                while " waiting " not in run("status", *self.control("operator", address)).stdout:
                    pass
                worker.send(signal.SIGSTOP)  # so that the answer to a heartbeat is not what it hears next
                between.hold()
                drained = run("drain", "a1", *self.control("operator", address))
                self.assertEqual(drained.returncode, 0, drained.stderr)
                scheduler.wait_for(rf"worker {number} is out: drained")
                seen = len(scheduler.lines)
                between.cut()
                worker.send(signal.SIGCONT)
                worker.wait_for("joining again")
                worker.wait_for("a1 was drained")
                self.assertEqual(worker.process.wait(60), 0)
                self.assertEqual([line for line in scheduler.lines[seen:] if "a1 joins" in line], [])
                # Its name is free for another process.
                with self.worker(address, "a1") as another:
                    another.wait_for("a1 is attention worker")


if __name__ == "__main__":
    if MODEL is None or not os.path.exists(MODEL):
        print("missing test data: models/stories260K/stories260K-f32.gguf")
        sys.exit(77)
    unittest.main(verbosity=2)
