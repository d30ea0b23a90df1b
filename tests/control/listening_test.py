#!/usr/bin/env python3
"""Which ports a cluster opens, on which addresses, and what a client without its keys can do there.
Arguments: the dovetail binary, a model.
"""
import os
import re
import socket
import struct
import subprocess
import sys
import unittest

import hosts
import processes

BINARY, MODEL = sys.argv[1:3]
del sys.argv[1:3]
UCX_MAGIC = 0xCAFEBABE12345678
ANY_WORKER = ("--threads", "1", "--scheduler")


def listening(pid):
    """Where a process listens on TCP, as {"127.0.0.1"} -> ports."""
    inodes = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{name}")
        except OSError:
            continue
        if found := re.fullmatch(r"socket:\[(\d+)\]", target):
            inodes.add(found.group(1))
    addresses = {}
    for table, family in ((f"/proc/{pid}/net/tcp", socket.AF_INET), (f"/proc/{pid}/net/tcp6", socket.AF_INET6)):
        with open(table, encoding="ascii") as lines:
            for line in list(lines)[1:]:
                fields = line.split()
                if fields[3] != "0A" or fields[9] not in inodes:
                    continue
                host, port = fields[1].split(":")
                words = [struct.pack("=I", int(host[i:i + 8], 16)) for i in range(0, len(host), 8)]
                address = socket.inet_ntop(family, b"".join(words)).removeprefix("::ffff:")
                addresses.setdefault(address, []).append(int(port, 16))
    return addresses


def refused(*arguments):
    done = subprocess.run([BINARY, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done
    return done.stderr


class Roles:
    """A scheduler, a compute and an attention worker with these flags of the data plane."""

    def __init__(self, network, *data, listen="127.0.0.1"):
        self.processes = {}
        self.network, self.data = network, data
        try:
            scheduler = self.start("scheduler", "--listen", f"{listen}:0")
            self.address = scheduler.wait_for(r"^listening on (\S+)").group(1)
            self.start("attention-worker", "--name", "attention", "--kv-capacity", "8MiB", *ANY_WORKER, self.address)
            self.start("compute-worker", MODEL, "--name", "compute", *ANY_WORKER, self.address)
            for name in ("attention", "compute"):
                scheduler.wait_for(rf"{name} serves as")
        except BaseException:
            self.stop()
            raise

    def start(self, role, *arguments):
        process = processes.Process(*self.network.on(0, BINARY, role, *arguments, *self.data))
        self.processes[role] = process
        return process

    def number_of(self, name):
        done = subprocess.run(self.network.on(0, BINARY, "status", "--scheduler", self.address), capture_output=True,
                              text=True, timeout=60, check=True)
        return re.search(rf"(\d+) +{name} +attention +serving", done.stdout).group(1)

    def stop(self):
        for role in reversed(self.processes):
            self.processes[role].stop()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()


class WhatListens(unittest.TestCase):
    def test_up_opens_the_scheduler_and_the_api_on_loopback_and_nothing_else(self):
        with processes.Up(BINARY, MODEL, "--attention-workers", "2") as up:
            ports = {int(up.url.rsplit(":", 1)[1]), int(up.scheduler.rsplit(":", 1)[1])}
            found = [listening(pid) for pid in (up.pid, *processes.children_of(up.pid))]
            self.assertEqual({address for one in found for address in one}, {"127.0.0.1"})
            self.assertEqual({port for one in found for list in one.values() for port in list}, ports)

    def test_roles_of_a_scheduler_on_loopback_open_no_port_for_tensors(self):
        with Roles(hosts.OneHost()) as roles:
            self.assertEqual(listening(roles.processes["attention-worker"].pid), {})
            self.assertEqual(listening(roles.processes["compute-worker"].pid), {})
            ports = listening(roles.processes["scheduler"].pid)
            self.assertEqual(ports, {"127.0.0.1": [int(roles.address.rsplit(":", 1)[1])]})
            roles.processes["attention-worker"].wait_for("attention is attention worker .*; data plane: shared memory$")

    def test_tcp_lanes_of_a_scheduler_on_loopback_listen_there_alone_and_say_so(self):
        with Roles(hosts.OneHost(), "--lanes", "tcp") as roles:
            attention = roles.processes["attention-worker"]
            said = attention.wait_for(r"data plane: tcp (127\.0\.0\.1):(\d+)$")
            self.assertEqual(listening(attention.pid), {said.group(1): [int(said.group(2))]})
            self.assertEqual(set(listening(roles.processes["scheduler"].pid)), {"127.0.0.1"})

    def test_a_client_without_the_ticket_is_reset_and_the_worker_goes_on(self):
        with Roles(hosts.OneHost(), "--lanes", "tcp") as roles:
            attention = roles.processes["attention-worker"]
            port = int(attention.wait_for(r"data plane: tcp 127\.0\.0\.1:(\d+)$").group(1))
            number = roles.number_of("attention")
            greeting = struct.pack("<QBIIBQ", UCX_MAGIC, 32, 29, 1, 0, 0) + struct.pack("=HH12x", socket.AF_INET, 1)
            put = struct.pack("<BIQQI", 33, 20, 0x1000, 16, 1) + b"sixteen bytes ok"
            malformed = struct.pack("<QBI", UCX_MAGIC, 32, 1) + b"\1"
            for attack in (greeting + put, malformed, os.urandom(4096), b"GET / HTTP/1.1\r\nHost: x\r\n\r\n") * 8:
                with socket.create_connection(("127.0.0.1", port), timeout=20) as stranger:
                    try:
                        stranger.sendall(attack)
                        self.assertEqual(stranger.recv(1), b"")
                    except ConnectionError:
                        pass
            self.assertEqual(roles.number_of("attention"), number)

    def test_a_network_without_mutual_tls_is_refused_unless_it_is_trusted(self):
        said = refused("scheduler", "--listen", "0.0.0.0:0")
        self.assertIn("would listen on every network of this host", said)
        self.assertIn("--trust-network", said)
        self.assertIn("--tls-cert", said)
        with processes.Process(BINARY, "scheduler", "--listen", "0.0.0.0:0", "--trust-network") as scheduler:
            scheduler.wait_for(r"^listening on 0\.0\.0\.0:")
        with processes.Process(BINARY, "scheduler", "--listen", "0.0.0.0:0", "--lanes", "shm") as scheduler:
            scheduler.wait_for(r"data plane: .*, shared memory$")


class SharedMemory(unittest.TestCase):
    def test_is_readable_by_its_owner_only_whatever_the_umask(self):
        before = os.umask(0)
        try:
            up = processes.Up(BINARY, MODEL, "--attention-workers", "2")
        finally:
            os.umask(before)
        with up:
            found = {}
            for pid in processes.children_of(up.pid):
                for name in os.listdir(f"/proc/{pid}/fd"):
                    path = f"/proc/{pid}/fd/{name}"
                    try:
                        target, mode = os.readlink(path), os.stat(path).st_mode
                    except OSError:
                        continue
                    if kind := re.search(r"ucx_shm|/memfd:dovetail", target):
                        found.setdefault(kind.group(0), set()).add(oct(mode & 0o777))
        self.assertEqual(found, {"ucx_shm": {"0o600"}, "/memfd:dovetail": {"0o600"}})


@unittest.skipIf(hosts.why_not(), hosts.why_not())
class WhatListensBetweenHosts(unittest.TestCase):
    def test_by_default_tensors_use_the_device_that_leads_to_the_scheduler(self):
        with hosts.Network(2) as network, Roles(network, "--lanes", "tcp", "--trust-network",
                                                listen=network.address(0, "data0")) as roles:
            other = processes.Process(*network.on(1, BINARY, "attention-worker", "--name", "other", "--kv-capacity",
                                                  "8MiB", *roles.data, *ANY_WORKER, roles.address))
            with other:
                said = other.wait_for(r"data plane: tcp ([\d.]+):(\d+)$")
                self.assertEqual(said.group(1), network.address(1, "data0"))
                roles.processes["scheduler"].wait_for("other serves as")
                for process in (other, *roles.processes.values()):
                    self.assertLessEqual(set(listening(process.pid)),
                                         {network.address(host, "data0") for host in (0, 1)})
        # On the other network the same roles find the other device.
        with hosts.Network(1) as network, Roles(network, "--lanes", "tcp", "--trust-network",
                                                listen=network.address(0, "ctl0")) as roles:
            said = roles.processes["attention-worker"].wait_for(r"data plane: tcp ([\d.]+):\d+$")
            self.assertEqual(said.group(1), network.address(0, "ctl0"))

    def test_a_worker_is_refused_on_a_network_that_it_was_not_told_to_trust(self):
        with hosts.Network(1) as network:
            address = network.address(0, "data0")
            command = network.on(0, BINARY, "attention-worker", "--kv-capacity", "8MiB", "--scheduler",
                                 f"{address}:7100")
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            self.assertEqual(done.returncode, 1)
            self.assertIn("would listen on data0", done.stderr)


if __name__ == "__main__":
    unittest.main(verbosity=2)
