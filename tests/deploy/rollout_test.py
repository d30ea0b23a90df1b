#!/usr/bin/env python3
"""Rolls every role of a cluster that runs from the chart's manifests, one role after the other, under 12 streams: none
is lost and none has other tokens, but for the scheduler, with which running requests end. kubelet.py plays Kubernetes.

Arguments: the dovetail binary. Run by with_tools.
"""
import os
import random
import shutil
import socket
import sys
import tempfile
import unittest

import manifests

BINARY = os.path.abspath(sys.argv.pop(1))
sys.path.insert(0, os.path.join(manifests.PROJECT, "tests", "control"))
import kubelet  # noqa: E402
import processes  # noqa: E402
from certificates import Certificates  # noqa: E402

MODELS = os.path.join(manifests.PROJECT, "models")
STREAMS = 12
ROLES = {"scheduler": "scheduler", "server": "server", "compute": "compute-worker", "attention": "attention-worker",
         "operator": "operator"}


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def pool(name, replicas, **more):
    return {"name": name, "replicas": replicas, "device": "cpu", "resources": {"limits": {"cpu": "1", "memory": "4Gi"}},
            **more}


def settings():
    first = 20000 + os.getpid() % 20000
    return {"tls": {"mode": "secrets"}, "apiKeys": {"existingSecret": ""},
            "model": {"path": "tales-hybrid"},
            "network": {"controlPort": free_port(), "dataPorts": {"first": first, "last": first + 99}},
            "server": {"port": free_port(), "extraArgs": ["--ignore-model-name"]},
            "compute": {"pools": [pool("main", 2)]},
            "attention": {"pools": [pool("one", 2, kvCapacityGiB=1), pool("two", 1, kvCapacityGiB=1)]}}


class Streams(processes.Load):
    """Each goes to a server that is ready, as a Service would send it."""

    def __init__(self, servers):
        self.servers = servers
        requests = [{"prompt": prompt, "max_tokens": 120}
                    for prompt in ("Once upon a time", "The old fox", "A boat", "Every morning the baker")]
        super().__init__(self.url, requests, STREAMS)

    @property
    def url(self):
        pod = random.choice([pod for pod in self.servers.pods if pod.ready])
        return f"http://{pod.ip}:{pod.container['ports'][0]['containerPort']}"

    @url.setter
    def url(self, _):
        pass


class Rollout(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.folder)
        volumes = {"dovetail-model": MODELS, "dovetail-join-token": self.secret("join", token="0123456789abcdef\n")}
        certificates = Certificates(self.folder)
        for name, role in ROLES.items():
            certificates.issue(name, roles=[role])
            files = {"tls.crt": f"{name}.pem", "tls.key": f"{name}.key", "ca.crt": "ca.pem"}
            volumes[f"dovetail-{name}-tls"] = self.secret(
                f"{name}-tls", **{key: self.read(certificates.path(file)) for key, file in files.items()})
        machine = kubelet.Machine(BINARY, self.folder, volumes)
        self.deployments = {}
        for document in manifests.of_kind(manifests.render(settings()), "Deployment"):
            deployment = kubelet.Deployment(machine, document)
            self.addCleanup(deployment.stop)
            self.deployments.setdefault(deployment.role, []).append(deployment)
        for role in ("scheduler", "compute", "attention", "server"):
            for deployment in self.deployments[role]:
                deployment.wait_until_ready()

    def read(self, path):
        with open(path, encoding="ascii") as file:
            return file.read()

    def secret(self, name, **files):
        folder = os.path.join(self.folder, "secrets", name)
        os.makedirs(folder)
        for key, text in files.items():
            with open(os.path.join(folder, key), "w", encoding="ascii") as file:
                file.write(text)
            os.chmod(os.path.join(folder, key), 0o600)
        return folder

    def roll(self, streams, role):
        """Of the streams that ended meanwhile: how many, and what was wrong."""
        before, problems = streams.finished, len(streams.problems)
        for deployment in self.deployments[role]:
            deployment.roll()
        rolled = streams.finished
        streams.wait_for(lambda load: load.finished >= rolled + STREAMS, limit=300)  # those that ran then have ended
        gone = [pod for deployment in self.deployments[role] for pod in deployment.gone]
        return streams.finished - before, streams.problems[problems:], gone

    def test_every_role_is_rolled_under_load(self):
        (servers,) = self.deployments["server"]
        report = []
        with Streams(servers) as streams:
            for role in ("attention", "compute", "server"):
                finished, problems, gone = self.roll(streams, role)
                report.append(f"{role}: {len(gone)} pods rolled, {finished} streams, {len(problems)} lost or different")
                self.assertEqual(problems, [], role)
                for pod in gone:
                    self.assertNotIn("killed", pod.events, pod.name)
                    self.assertNotIn("restarted", pod.events, pod.name)
                    self.assertEqual(pod.events[-1], "ended with 0", f"{pod.name}: {pod.events}")
                    if role == "attention":
                        self.assertIn("preStop done", pod.events)
            finished, problems, _ = self.roll(streams, "scheduler")
            report.append(f"scheduler: {finished} streams, {len(problems)} lost with it")
            # It starts with empty KV; workers join it again by themselves, and what comes later is served as before.
            for deployment in self.deployments["compute"] + self.deployments["attention"]:
                deployment.wait_until_ready()
                for pod in deployment.pods:
                    self.assertNotIn("restarted", pod.events, pod.name)
            again, now = len(streams.problems), streams.finished
            streams.wait_for(lambda load: load.finished >= now + 2 * STREAMS, limit=300)
            self.assertEqual(streams.problems[again:], [])
        print("\n".join(report))


if __name__ == "__main__":
    unittest.main()
