#!/usr/bin/env python3
"""Logs of whole processes: every line of a cluster is JSON where that is asked for, says which request it is about and
nothing of its prompt; and a log that is not read delays no stream.

Arguments: the dovetail binary, a model.
"""
import http.client
import json
import os
import re
import subprocess
import sys
import threading
import time
import unittest
import urllib.parse

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, "control"))
import processes  # noqa: E402

BINARY, MODEL = sys.argv[1], sys.argv[2]
del sys.argv[1:3]
PROMPT = "a fox that nobody may read about in a log"


def ask(url, request_id, **fields):
    address = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=120)
    body = {"model": "x", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **fields}
    connection.request("POST", "/v1/completions", json.dumps(body),
                       {"Content-Type": "application/json", "X-Request-Id": request_id})
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response.status, text


class JsonLogs(unittest.TestCase):
    def test_every_line_of_a_cluster_is_an_object(self):
        with processes.Process(BINARY, "up", MODEL, "--port", "0", "--ignore-model-name", "--log-format", "json",
                               "--attention-workers", "2") as up:
            url = up.wait_for(r'"message":"ready: (http://\S+)').group(1)
            for i in range(3):
                self.assertEqual(ask(url, f"request-{i}")[0], 200)
            self.assertEqual(ask(url, "too-long", max_tokens=1 << 24)[0], 400)
            up.wait_for('"too-long"')
        lines = [json.loads(line) for line in up.lines if line and line != "(end)"]
        for line in lines:
            self.assertTrue({"time", "level", "process", "message"} <= line.keys(), line)
            self.assertRegex(line["time"], r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z$")
            self.assertIn(line["level"], ("debug", "info", "warning", "error"))
        said = {line["process"] for line in lines}
        self.assertTrue({"scheduler", "server", "compute-1", "attention-1", "attention-2"} <= said, said)
        ended = {line["request_id"]: line for line in lines if line["message"] == "request ended"}
        for i in range(3):
            line = ended[f"request-{i}"]
            self.assertEqual((line["status"], line["finish"], line["output_tokens"]), ("200", "length", 8))
            self.assertGreater(line["prompt_tokens"], 0)
            for name in ("queue_ms", "ttft_ms", "itl_ms", "total_ms"):
                self.assertGreaterEqual(line[name], 0)
        self.assertEqual(ended["too-long"]["status"], "400")
        self.assertNotIn("nobody may read", "\n".join(up.lines))

    def test_a_process_that_cannot_start_says_so_in_json(self):
        done = subprocess.run([BINARY, "serve", "/nowhere/model.gguf", "--port", "0", "--log-format", "json"],
                              capture_output=True, text=True, timeout=60, check=False)
        self.assertEqual(done.returncode, 1)
        lines = [json.loads(line) for line in (done.stdout + done.stderr).splitlines()]
        self.assertEqual(lines[-1]["level"], "error")
        self.assertIn("model.gguf: no such file", lines[-1]["message"])


class TextLogs(unittest.TestCase):
    def test_lines_have_dates_and_levels_and_a_level_can_be_left_out(self):
        for level, infos in (("info", True), ("warning", False)):
            with processes.Process(BINARY, "serve", MODEL, "--port", "0", "--ignore-model-name", "--log-level",
                                   level) as serve:
                url = serve.wait_for(r"^listening on (http://\S+)").group(1)
                self.assertEqual(ask(url, "mine")[0], 200)
            found = [line for line in serve.lines
                     if re.match(r"I \d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} request ended request_id=mine ", line)]
            self.assertEqual(len(found), 1 if infos else 0, serve.lines)


class UnreadLogs(unittest.TestCase):
    def test_no_stream_waits_for_who_reads_the_log(self):
        """Requests fill the pipe and the queue behind it; streams go on, and the lines that were lost are counted."""
        read, write = os.pipe()
        serve = subprocess.Popen([BINARY, "serve", MODEL, "--port", "0", "--ignore-model-name"], stdout=subprocess.PIPE,
                                 stderr=write, text=True)
        os.close(write)
        try:
            url = re.search(r"http://\S+", serve.stdout.readline()).group(0)
            address = urllib.parse.urlsplit(url)

            def flood():
                connection = http.client.HTTPConnection(address.hostname, address.port, timeout=120)
                for _ in range(3000):
                    connection.request("GET", "/nothing-here", headers={"X-Request-Id": "x" * 100})
                    connection.getresponse().read()
                connection.close()

            threads = [threading.Thread(target=flood) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            text = "".join(processes.stream(url, PROMPT, max_tokens=8, ignore_eos=True))
            self.assertTrue(text)
            connection = http.client.HTTPConnection(address.hostname, address.port, timeout=60)
            connection.request("GET", "/metrics")
            metrics = connection.getresponse().read().decode()
            connection.close()
            dropped = float(re.search(r"^dovetail:log_lines_dropped_total (\S+)$", metrics, re.MULTILINE).group(1))
            self.assertGreater(dropped, 0)
            began = time.monotonic()
            serve.terminate()
            self.assertEqual(serve.wait(60), 0)
            self.assertLess(time.monotonic() - began, 30)
        finally:
            serve.kill()
            serve.wait()
            serve.stdout.close()
            os.close(read)


if __name__ == "__main__":
    unittest.main()
