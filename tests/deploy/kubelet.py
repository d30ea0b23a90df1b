"""What Kubernetes does with pods, on one machine: starts containers from their manifests, probes them, restarts them,
stops them with preStop, SIGTERM and a grace period, and rolls Deployments.

A pod has no file system and network of its own here. So paths of volumes become folders of this machine, the name of
the scheduler's Service becomes its address, and 0.0.0.0 becomes an address of the loopback network that no other pod
has. All else is as in the manifest.
"""
import http.client
import os
import re
import signal
import subprocess
import threading
import time

import manifests
import processes

SCHEDULER_IP = "127.0.0.1"


class Machine:
    """What pods share. `volumes`: name of a secret or a claim -> its folder."""

    def __init__(self, binary, folder, volumes):
        self.folder, self.volumes = folder, volumes
        self.path = os.path.join(folder, "bin")
        os.makedirs(self.path)
        os.symlink(binary, os.path.join(self.path, "dovetail"))
        self.count = 0
        self.lock = threading.Lock()

    def number(self):
        with self.lock:
            self.count += 1
            return self.count


class Pod:
    """A pod with one container. Its events are lines in `events`: what a cluster's administrator would see."""

    def __init__(self, machine, name, template):
        number = machine.number()
        self.machine, self.template, self.name = machine, template, f"{name}-{number}"
        self.spec, self.container = template["spec"], manifests.container(template)
        scheduler = manifests.role_of(template) == "scheduler"
        self.ip = SCHEDULER_IP if scheduler else f"127.0.1.{number % 250 + 1}"
        self.paths = self._paths()
        self.variables = {variable["name"]: self._value(variable) for variable in self.container["env"]}
        self.events, self.ready, self.terminating, self.started = [], False, False, False
        self.changed = threading.Condition()
        self.process = None
        self.watcher = threading.Thread(target=self._live)
        self.watcher.start()

    def _paths(self):
        volumes = {volume["name"]: volume for volume in self.spec["volumes"]}
        paths = {}
        for mount in self.container["volumeMounts"]:
            volume = volumes[mount["name"]]
            source = volume.get("secret", {}).get("secretName") or \
                volume.get("persistentVolumeClaim", {}).get("claimName")
            if source:
                paths[mount["mountPath"]] = self.machine.volumes[source]
        return paths

    def _value(self, variable):
        if "value" in variable:
            return variable["value"]
        source = variable["valueFrom"]
        if "resourceFieldRef" in source:
            assert source["resourceFieldRef"]["resource"] == "limits.cpu"
            return str(self.container["resources"]["limits"]["cpu"])
        return {"metadata.name": self.name, "status.podIP": self.ip}[source["fieldRef"]["fieldPath"]]

    def here(self, word):
        """A word of a command line as this machine has it."""
        for path, folder in self.paths.items():
            word = word.replace(path, folder)
        word = re.sub(r"\b[\w-]+-scheduler:(\d+)", rf"{SCHEDULER_IP}:\1", word)
        return word.replace("0.0.0.0", self.ip)

    def environment(self):
        return {**self.variables, "PATH": f"{self.machine.path}:{os.environ['PATH']}", "HOME": self.machine.folder}

    def _start(self):
        words = manifests.expanded(self.container["command"] + self.container["args"], self.variables)
        command = [os.path.join(self.machine.path, "dovetail"), *[self.here(word) for word in words[1:]]]
        self.process = processes.Process(*command, environment=self.environment())
        self._event("started")

    def _event(self, what):
        with self.changed:
            self.events.append(what)
            self.changed.notify_all()

    def _set_ready(self, ready):
        with self.changed:
            if ready != self.ready:
                self.events.append("ready" if ready else "not ready")
            self.ready = ready
            self.changed.notify_all()

    def succeeds(self, action, limit):
        """Whether a probe or hook does, within `limit` seconds."""
        if "exec" in action:
            command = [self.here(word) for word in action["exec"]["command"]]
            try:
                return subprocess.run(command, env=self.environment(), capture_output=True, timeout=limit,
                                      check=False).returncode == 0
            except subprocess.TimeoutExpired:
                return False
        ports = {port["name"]: port["containerPort"] for port in self.container["ports"]}
        target = action.get("httpGet", action.get("tcpSocket"))
        connection = http.client.HTTPConnection(self.ip, ports[target["port"]], timeout=limit)
        try:
            connection.connect()
            if "tcpSocket" in action:
                return True
            connection.request("GET", target["path"])
            return 200 <= connection.getresponse().status < 400
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _live(self):
        """The kubelet's loop: containers that end are started again; probes go on until the pod terminates."""
        while not self.terminating:
            self._start()
            self._probe()
            self._set_ready(False)
            if not self.terminating:
                self._event("restarted")
                self.process.stop(limit=self.spec["terminationGracePeriodSeconds"])

    def _probe(self):
        probes = {name: self.container[name + "Probe"] for name in ("startup", "readiness", "liveness")}
        due, failures, started = dict.fromkeys(probes, 0.0), dict.fromkeys(probes, 0), False
        while not self.terminating and self.process.process.poll() is None:
            now = time.monotonic()
            for name in ("readiness", "liveness") if started else ("startup",):
                probe = probes[name]
                if now < due[name] or self.terminating:
                    continue
                due[name] = now + probe.get("periodSeconds", 10)
                good = self.succeeds(probe, probe.get("timeoutSeconds", 1))
                failures[name] = 0 if good else failures[name] + 1
                threshold = probe.get("failureThreshold", 3)
                started = started or good
                if name == "readiness" and (good or failures[name] >= threshold):
                    self._set_ready(good)
                if name != "readiness" and failures[name] >= threshold:
                    return self._event(f"{name} probe failed")
            with self.changed:
                self.changed.wait(0.05)
        return None

    def wait_until_ready(self, limit):
        end = time.monotonic() + limit
        with self.changed:
            while not self.ready:
                left = end - time.monotonic()
                if left <= 0 or "restarted" in self.events:
                    log = "\n".join(self.process.lines[-20:]) if self.process else ""
                    raise AssertionError(f"{self.name} is not ready: {self.events}\n{log}")
                self.changed.wait(left)

    def terminate(self):
        """As when it is deleted: no endpoint any more, preStop, SIGTERM, and SIGKILL after the grace period."""
        with self.changed:
            self.terminating, self.ready = True, False
            self.changed.notify_all()
        self.watcher.join()
        end = time.monotonic() + self.spec["terminationGracePeriodSeconds"]
        hook = self.container.get("lifecycle", {}).get("preStop")
        if hook:
            self._event("preStop " + ("done" if self.succeeds(hook, end - time.monotonic()) else "failed"))
        if self.process.process.poll() is None:
            self.process.send(signal.SIGTERM)
        try:
            self.process.process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.process.kill()
            self._event("killed")
        self._event(f"ended with {self.process.stop()}")


class Deployment:
    def __init__(self, machine, document):
        self.machine, self.spec, self.name = machine, document["spec"], document["metadata"]["name"]
        self.role = manifests.role_of(self.spec["template"])
        self.pods = [self._new() for _ in range(self.spec["replicas"])]
        self.gone = []

    def _new(self):
        return Pod(self.machine, self.name, self.spec["template"])

    def wait_until_ready(self, limit=120):
        for pod in self.pods:
            pod.wait_until_ready(limit)

    def roll(self):
        """As `kubectl rollout restart` does. The next pod starts while an old one still terminates."""
        if self.spec["strategy"]["type"] == "Recreate":
            for pod in self.pods:
                pod.terminate()
            self.gone += self.pods
            self.pods = [self._new() for _ in self.pods]
            return self.wait_until_ready()
        assert self.spec["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
        stopping = []
        for old in list(self.pods):
            new = self._new()
            self.pods.append(new)
            new.wait_until_ready(120)
            time.sleep(self.spec.get("minReadySeconds", 0))  # as long as Kubernetes waits
            assert new.ready, f"{new.name}: {new.events}"
            self.pods.remove(old)
            self.gone.append(old)
            stopping.append(threading.Thread(target=old.terminate))
            stopping[-1].start()
        for thread in stopping:
            thread.join()
        return None

    def stop(self):
        for pod in self.pods:
            with pod.changed:
                pod.terminating = True
                pod.changed.notify_all()
            pod.watcher.join()
            pod.process.stop(limit=60)
