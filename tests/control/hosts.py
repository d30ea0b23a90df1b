"""Hosts for tests: network namespaces, each with a device data0 for tensors and ctl0 for the control plane.

The first host is a bridge in both networks; the cables of the others can be cut. Needs the right to make namespaces.
"""
import ctypes
import os
import re
import subprocess
import sys
import time
import unittest

import processes

CLONE_NEWNET = 0x40000000


def ip(*arguments, check=True):
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=check)


def tc(namespace, *arguments):
    return subprocess.run(["tc", "-n", namespace, *arguments], capture_output=True, text=True, check=False)


def why_not():
    """Empty if hosts can be made here."""
    name = f"dvt-probe{os.getpid()}"
    try:
        if (made := ip("netns", "add", name, check=False)).returncode != 0:
            return f"no network namespaces: {made.stderr.strip()}"
        bridge = ip("-n", name, "link", "add", "probe0", "type", "bridge", check=False)
        veth = ip("-n", name, "link", "add", "probe1", "type", "veth", "peer", "name", "probe2", check=False)
        failed = next((done for done in (bridge, veth) if done.returncode != 0), None)
        return f"no bridges or veth devices: {failed.stderr.strip()}" if failed else ""
    except FileNotFoundError:
        return "the program ip (iproute2) is not installed"
    finally:
        ip("netns", "del", name, check=False)


def run_tests(model):
    """The main function of a test file: skips it where hosts cannot be made or `model`, a path or None, is missing."""
    if model is None or not os.path.exists(model):
        print("missing test data: models/stories260K/stories260K-f32.gguf")
        sys.exit(77)
    if reason := why_not():
        print(f"skipped, hosts cannot be made here: {reason}")
        sys.exit(77)
    unittest.main(verbosity=2)


class Network:
    """`count` hosts, 0 to count - 1. Made on entering, gone on leaving."""

    PLANES = {"data0": "10.77.0", "ctl0": "10.78.0"}
    data = ("--lanes", "tcp", "--data-devices", "data0", "--trust-network")

    def __init__(self, count):
        self.names = [f"dvt{os.getpid()}-{i}" for i in range(count)]

    def __enter__(self):
        for i, name in enumerate(self.names):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            for device, prefix in self.PLANES.items():
                if i == 0:
                    ip("-n", name, "link", "add", device, "type", "bridge")
                else:
                    port = f"{device}-{i}"
                    ip("-n", self.names[0], "link", "add", port, "type", "veth", "peer", "name", device, "netns", name)
                    self.mend(i, device)
                ip("-n", name, "address", "add", f"{prefix}.{i + 1}/24", "dev", device)
                ip("-n", name, "link", "set", device, "up")
        return self

    def __exit__(self, *_):
        for name in self.names:
            ip("netns", "del", name, check=False)

    def address(self, host, device="ctl0"):
        return f"{self.PLANES[device]}.{host + 1}"

    def on(self, host, *arguments):
        return ("ip", "netns", "exec", self.names[host], *arguments)

    def enter(self, host):
        """Makes this thread, and those it starts, a program of the host."""
        with open(f"/run/netns/{self.names[host]}", "rb") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")

    def pull(self, host, *devices):
        """Pulls the cable: the other end sees it."""
        for device in devices:
            ip("-n", self.names[0], "link", "set", f"{device}-{host}", "down")

    def isolate(self, host, *devices):
        """Frames are lost on the way, without an error."""
        for device in devices:
            ip("-n", self.names[0], "link", "set", f"{device}-{host}", "nomaster")

    def mend(self, host, *devices):
        for device in devices:
            port = f"{device}-{host}"
            ip("-n", self.names[0], "link", "set", port, "master", device)
            ip("-n", self.names[0], "link", "set", port, "up")

    def part(self, hosts, device, parted=True):
        """These hosts, none of them the first, hear nothing from each other; the first hears them all."""
        for host in hosts:
            ip("-n", self.names[0], "link", "set", f"{device}-{host}", "type", "bridge_slave", "isolated",
               "on" if parted else "off")

    def mute(self, host, device, towards):
        """What `host` sends to `towards` is lost; what it is sent comes."""
        ip("-n", self.names[host], "route", "add", "blackhole", f"{self.address(towards, device)}/32")

    def unmute(self, host, device, towards):
        ip("-n", self.names[host], "route", "del", "blackhole", f"{self.address(towards, device)}/32")


    def squeeze(self, host, device, rate):
        """Both ways of the cable carry `rate` (as tc spells it) from now on. False: this machine cannot do that."""
        ends = ((self.names[0], f"{device}-{host}"), (self.names[host], device))
        return all(tc(name, "qdisc", "replace", "dev", end, "root", "tbf", "rate", rate, "burst", "4kb", "latency",
                      "100ms").returncode == 0 for name, end in ends)

    def release(self, host, device):
        """Mends squeeze(). How often something had to wait."""
        waited = 0
        for name, end in ((self.names[0], f"{device}-{host}"), (self.names[host], device)):
            said = tc(name, "-s", "qdisc", "show", "dev", end).stdout
            waited += sum(int(count) for count in re.findall(r"overlimits (\d+)", said))
            tc(name, "qdisc", "del", "dev", end, "root")
        return waited


class OneHost:
    """This machine, for all roles together: tensors through shared memory."""

    data = ("--lanes", "shm")

    def address(self, _host, _device="ctl0"):
        return "127.0.0.1"

    def on(self, _host, *arguments):
        return arguments


class Cluster:
    """Scheduler and server on host 0, and workers: the host of each, by name."""

    def __init__(self, network, binary, model, *scheduler_flags, attention={"near": 0, "far1": 1, "far2": 2},
                 compute={"compute": 0}):
        self.network, self.binary, self.model, self.attention = network, binary, model, attention
        self.roles, self.hosts = {}, {}
        data = network.data
        try:
            listen = f"{network.address(0)}:0"
            self.scheduler = self.start(0, "scheduler", "--listen", listen, *data, *scheduler_flags)
            self.address = self.scheduler.wait_for(r"^listening on (\S+)").group(1)
            worker = ["--scheduler", self.address, "--threads", "1", *data]
            for name, host in attention.items():
                self.start(host, "attention-worker", "--kv-capacity", "8MiB", "--name", name, *worker)
            for name, host in compute.items():
                self.start(host, "compute-worker", model, "--name", name, *worker)
            server = self.start(0, "server", "--scheduler", self.address, "--host", network.address(0), "--port", "0",
                                "--ignore-model-name", "--shutdown-timeout", "1")
            self.url = server.wait_for(r"^listening on (http://\S+)").group(1)
            for name in (*attention, *compute):
                self.serves(name)
        except BaseException:
            self.stop()
            raise

    def start(self, host, role, *arguments):
        name = arguments[arguments.index("--name") + 1] if "--name" in arguments else role
        process = processes.Process(*self.network.on(host, self.binary, role, *arguments))
        self.roles[name], self.hosts[name] = process, host
        process.arguments = (role, *arguments)
        return process

    def restart(self, name):
        """Starts a worker again that has ended."""
        self.roles[name].stop()
        return self.start(self.hosts[name], *self.roles[name].arguments)

    def serves(self, name, after=0, limit=processes.START_LIMIT):
        """The number of the worker once it serves; `after` so many lines of the scheduler."""
        pattern = rf"^(?:\S+ )*{name} serves as \w+ worker (\d+)"
        return self.scheduler.wait_for(pattern, after, limit).group(1)

    def number(self, name):
        found = [line for line in self.scheduler.lines if f"{name} serves as" in line]
        return re.search(r"worker (\d+)", found[-1]).group(1)

    def status(self):
        done = subprocess.run(self.network.on(0, self.binary, "status", "--scheduler", self.address),
                              capture_output=True, text=True, timeout=60, check=True)
        return done.stdout

    def wait_until_nothing_is_held(self, limit=20):
        """Until no attention worker has a KV block in use."""
        end = time.monotonic() + limit
        while True:
            status = self.status()
            used = re.findall(r" attention +serving .* ([0-9.]+)% ", status)
            idle = " 0 sequences running" in status and all(float(share) == 0 for share in used)
            if idle and len(used) == len(self.attention):
                return
            assert time.monotonic() < end, status

    def stop(self):
        workers = [name for name in self.roles if name not in ("server", "scheduler")]
        for name in ("server", *workers, "scheduler"):
            if name in self.roles:
                self.roles[name].stop()
