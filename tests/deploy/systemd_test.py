#!/usr/bin/env python3
"""The units in deploy/systemd: systemd takes them, and a cluster that is started and stopped by their command lines and
settings serves a model.

Arguments: the project's folder, the dovetail binary. Needs models/stories260K below DOVETAIL_TEST_DATA.
"""
import configparser
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.request

PROJECT, BINARY = sys.argv.pop(1), sys.argv.pop(1)
UNITS = os.path.join(PROJECT, "deploy", "systemd")
DATA = os.environ.get("DOVETAIL_TEST_DATA")
ROLES = ("scheduler", "compute-worker", "attention-worker", "server")


def read(*path):
    return pathlib.Path(*path).read_text(encoding="utf-8")


def service(role):
    """The [Service] section; of keys that come several times the last."""
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    unit.read(os.path.join(UNITS, f"dovetail-{role}.service"))
    return unit["Service"]


def settings(role, **changes):
    found = {}
    for line in read(UNITS, f"{role}.env").splitlines():
        if line.strip() and not line.startswith("#"):
            name, value = line.split("=", 1)
            found[name] = value
    return {**found, **changes}


def words(line, variables):
    """As systemd expands them: ${NAME} is one word, $NAME alone any number of them."""
    result = []
    for word in shlex.split(line):
        if match := re.fullmatch(r"\$(\w+)", word):
            result += variables[match.group(1)].split()
        else:
            result.append(re.sub(r"\$\{(\w+)\}", lambda m: variables[m.group(1)], word))
    return [BINARY if word.lstrip("-") == "/opt/dovetail/bin/dovetail" else word for word in result]


class Units(unittest.TestCase):
    def test_one_attention_worker_drains_at_a_time(self):
        self.assertIn(" --alone ", service("attention-worker")["ExecStop"])

    def test_systemd_takes_them(self):
        analyze = shutil.which("systemd-analyze")
        if analyze is None:
            self.skipTest("no systemd-analyze")
        with tempfile.TemporaryDirectory() as folder:
            files = []
            for role in ROLES:
                text = read(UNITS, f"dovetail-{role}.service")
                files.append(os.path.join(folder, f"dovetail-{role}.service"))
                with open(files[-1], "w", encoding="utf-8") as out:
                    out.write(text.replace("/opt/dovetail/bin/dovetail", os.path.abspath(BINARY)))
            done = subprocess.run([analyze, "verify", "--man=no", *files], capture_output=True, text=True)
            said = [line for line in done.stderr.splitlines() if "dovetail" in line]
            self.assertEqual((done.returncode, said), (0, []), done.stderr)

    def test_install_keeps_settings_and_names_a_role_that_is_not_there(self):
        with tempfile.TemporaryDirectory() as folder:
            os.makedirs(os.path.join(folder, "dovetail-x", "bin"))
            os.symlink(os.path.abspath(BINARY), os.path.join(folder, "dovetail-x", "bin", "dovetail"))
            tarball = os.path.join(folder, "x.tar.xz")
            subprocess.run(["tar", "-cJf", tarball, "-C", folder, "dovetail-x"], check=True)
            root = os.path.join(folder, "root")
            environment = {**os.environ, "DOVETAIL_ROOT": root}
            install = [os.path.join(UNITS, "install"), tarball]
            for _ in range(2):
                subprocess.run([*install, *ROLES], check=True, env=environment, capture_output=True)
                kept = os.path.join(root, "etc/dovetail/server.env")
                with open(kept, "a", encoding="utf-8") as settings_file:
                    settings_file.write("# mine\n")
            self.assertEqual(read(kept).count("# mine"), 2)
            for role in ROLES:
                self.assertTrue(os.path.exists(os.path.join(root, f"etc/systemd/system/dovetail-{role}.service")))
            wrong = subprocess.run([*install, "sever"], env=environment, capture_output=True, text=True)
            self.assertEqual((wrong.returncode, wrong.stderr), (2, "install: there is no role sever\n"))


class Cluster(unittest.TestCase):
    def setUp(self):
        if DATA is None:
            self.skipTest("missing test data: models/stories260K")
        self.folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.folder)

    def start(self, role, **changes):
        variables = settings(role, **changes)
        path = os.path.join(self.folder, f"{role}-{variables.get('DOVETAIL_NAME', '')}")
        with open(path, "w", encoding="utf-8") as log:
            process = subprocess.Popen(words(service(role)["ExecStart"], variables), stdout=log,
                                       stderr=subprocess.STDOUT)
        self.addCleanup(process.wait, 30)
        self.addCleanup(process.kill)
        return process, path, variables

    def wait_for(self, log, pattern):
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if found := re.search(pattern, read(log), re.M):
                return found
            time.sleep(0.05)
        self.fail(f"{pattern} did not come:\n{read(log)}")

    def stop(self, role, process, variables):
        unit = service(role)
        if "ExecStop" in unit:
            subprocess.run(words(unit["ExecStop"], variables), check=True, capture_output=True, timeout=60)
        else:
            process.send_signal(getattr(signal, unit["KillSignal"]))
        self.assertEqual(process.wait(float(unit["TimeoutStopSec"])), 0, role)

    def test_their_command_lines_serve_a_model_and_stop_in_order(self):
        scheduler = self.start("scheduler", DOVETAIL_LISTEN="127.0.0.1:0")
        address = self.wait_for(scheduler[1], r"^listening on (\S+)").group(1)
        at = {"DOVETAIL_SCHEDULER": address}
        compute = self.start("compute-worker", DOVETAIL_MODEL=f"{DATA}/models/stories260K/stories260K-f32.gguf",
                             DOVETAIL_FLAGS="--threads 1 --device cpu", **at)
        attention = [self.start("attention-worker", DOVETAIL_NAME=f"attention-{i}",
                                DOVETAIL_FLAGS="--kv-capacity 16MiB --threads 1", **at) for i in (1, 2)]
        server = self.start("server", DOVETAIL_FLAGS="--host 127.0.0.1 --port 0 --ignore-model-name", **at)
        url = self.wait_for(server[1], r"^listening on (http://\S+)").group(1)
        for i in (1, 2):
            self.wait_for(scheduler[1], f"attention-{i} serves as")
        ask = urllib.request.Request(url + "/v1/completions", json.dumps({"prompt": "Once", "max_tokens": 5}).encode(),
                                     {"Content-Type": "application/json"})
        before = json.load(urllib.request.urlopen(ask, timeout=60))
        self.assertEqual(before["usage"]["completion_tokens"], 5)
        self.stop("attention-worker", attention[0][0], attention[0][2])
        self.assertEqual(json.load(urllib.request.urlopen(ask, timeout=60))["usage"]["completion_tokens"], 5)
        for role, (process, _, variables) in (("server", server), ("compute-worker", compute),
                                              ("scheduler", scheduler)):
            self.stop(role, process, variables)


if __name__ == "__main__":
    result = unittest.main(exit=False).result
    sys.exit(77 if result.skipped and result.wasSuccessful() and not DATA else not result.wasSuccessful())
