#!/usr/bin/env python3
"""Dashboards and alerts: promtool takes the rules and their unit tests, and a real Prometheus that scrapes a real
cluster under load has data for every panel.

Arguments: the dovetail binary. Run by with_tools.
"""
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import urllib.parse
import urllib.request

import yaml

import manifests

BINARY = os.path.abspath(sys.argv.pop(1))
FOLDER = os.path.join(manifests.PROJECT, "deploy", "observability")
MODEL = os.path.join(manifests.PROJECT, "models", "tales-hybrid")
sys.path.insert(0, os.path.join(manifests.PROJECT, "tests", "control"))
import processes  # noqa: E402

LIMIT = 100  # seconds until every panel has data
KEYS = {"blue": "key-of-the-blue-tenant", "green": "key-of-the-green-tenant"}


def dashboards():
    for name in ("cluster", "worker", "tenant"):
        with open(os.path.join(FOLDER, "dashboards", f"{name}.json"), encoding="utf-8") as file:
            yield name, json.load(file)


def panels():
    """(dashboard, title, query)"""
    return [(name, panel["title"], target["expr"]) for name, dashboard in dashboards()
            for panel in dashboard["panels"] for target in panel["targets"]]


def rules():
    with open(os.path.join(FOLDER, "alerts.yaml"), encoding="utf-8") as file:
        return [rule for group in yaml.safe_load(file)["groups"] for rule in group["rules"]]


def fetch(url, key=None, body=None):
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    request = urllib.request.Request(url, json.dumps(body).encode() if body else None, headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return response.read().decode()


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Files(unittest.TestCase):
    def test_dashboards_are_what_their_panels_say(self):
        done = subprocess.run([os.path.join(FOLDER, "render"), "--check"], capture_output=True, text=True, check=False)
        self.assertEqual((done.returncode, done.stderr), (0, ""))

    def test_promtool_takes_the_rules_and_their_tests(self):
        for arguments in (("check", "rules", "alerts.yaml"), ("test", "rules", "alerts_test.yaml")):
            done = subprocess.run(["promtool", *arguments], cwd=FOLDER, capture_output=True, text=True, check=False)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_each_alert_is_tested_and_explained(self):
        with open(os.path.join(FOLDER, "alerts_test.yaml"), encoding="utf-8") as file:
            fired = {case["alertname"] for test in yaml.safe_load(file)["tests"] for case in test["alert_rule_test"]
                     if case["exp_alerts"]}
        names = {rule["alert"] for rule in rules()}
        self.assertEqual(fired, names)
        with open(os.path.join(manifests.PROJECT, "docs", "operations.md"), encoding="utf-8") as file:
            explained = set(re.findall(r"`(Dovetail\w+)`", file.read()))
        self.assertEqual(names - explained, set())


class RealPrometheus(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.folder)
        keys = self.write("keys", "".join(f"{key} {tenant}\n" for tenant, key in KEYS.items()))
        self.up = processes.Up(BINARY, MODEL, "--attention-workers", "2", "--device", "cpu", "--threads", "1",
                               "--kv-cache-memory-bytes", "64MiB", "--api-key-file", keys, "--ignore-model-name",
                               "--kv-checksums")
        self.addCleanup(self.up.stop)

    def write(self, name, text):
        path = os.path.join(self.folder, name)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(path, 0o600)
        return path

    def start_prometheus(self):
        target = urllib.parse.urlsplit(self.up.url).netloc
        config = {"global": {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "1s"},
                  "rule_files": [os.path.join(FOLDER, "alerts.yaml")],
                  "scrape_configs": [{"job_name": "dovetail", "authorization": {"credentials": KEYS["blue"]},
                                      "static_configs": [{"targets": [target], "labels": {"namespace": "llm"}}]}]}
        port = free_port()
        prometheus = processes.Process(
            "prometheus", f"--config.file={self.write('prometheus.yaml', yaml.safe_dump(config))}",
            f"--storage.tsdb.path={self.folder}/data", f"--web.listen-address=127.0.0.1:{port}", "--log.level=info")
        self.addCleanup(prometheus.stop)
        prometheus.wait_for("Server is ready to receive web requests")
        return f"http://127.0.0.1:{port}"

    def load(self, tenant, ended):
        turn = 0
        while not ended.is_set():
            body = {"prompt": "Once upon a time " * (1 + turn % 3), "max_tokens": 20, "temperature": 0}
            fetch(self.up.url + "/v1/completions", KEYS[tenant], body)
            turn += 1

    def values(self, prometheus, query):
        """Numbers of the series that a query gives, without those that are none."""
        answer = fetch(f"{prometheus}/api/v1/query?query={urllib.parse.quote(query)}")
        found = [float(series["value"][1]) for series in json.loads(answer)["data"]["result"]]
        return [value for value in found if value == value]

    def test_no_panel_is_empty(self):
        prometheus = self.start_prometheus()
        ended = threading.Event()
        threads = [threading.Thread(target=self.load, args=(tenant, ended)) for tenant in KEYS]
        for thread in threads:
            thread.start()
        try:
            empty, end = panels(), time.monotonic() + LIMIT
            self.assertGreater(len(empty), 40)
            while empty and time.monotonic() < end:
                empty = [panel for panel in empty if not self.values(
                    prometheus, panel[2].replace("$namespace", "llm").replace("$__rate_interval", "10s"))]
                time.sleep(0.5)
            self.assertEqual(empty, [])
            tenants = fetch(prometheus + "/api/v1/label/tenant/values")
            self.assertEqual(json.loads(tenants)["data"], sorted(KEYS))
            moving = self.values(prometheus, "sum(rate(dovetail:generation_tokens_total[10s]))")
            self.assertGreater(moving[0], 0)
        finally:
            ended.set()
            for thread in threads:
                thread.join()
        self.assertEqual(json.loads(fetch(prometheus + "/api/v1/alerts"))["data"]["alerts"], [])

    def test_panels_and_alerts_name_metrics_that_there_are(self):
        fetch(self.up.url + "/v1/completions", KEYS["blue"], {"prompt": "Once", "max_tokens": 2})
        text = fetch(self.up.url + "/metrics", KEYS["blue"])
        there = set(re.findall(r"^(dovetail:\w+)", text, flags=re.M))
        there.add("dovetail:certificate_expiration_timestamp_seconds")  # there with TLS only: server_tls_test
        used = {name for query in [panel[2] for panel in panels()] + [rule["expr"] for rule in rules()]
                for name in re.findall(r"dovetail:\w+", query)}
        self.assertEqual(used - there, set())


if __name__ == "__main__":
    unittest.main()
