"""A cluster, or one process of all roles, whose prompts are timed."""
import json
import re
import subprocess
import time
import urllib.error
import urllib.request


class Cluster:
    """`words`: `up` or `serve` of the binary `dovetail`, with its flags; listens on a free port."""

    def __init__(self, dovetail, *words, log=subprocess.DEVNULL):
        self.dovetail = dovetail
        command = [dovetail, *words, "--port", "0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        ready = "ready: " if words[0] == "up" else "listening on "
        for line in self.process.stdout:
            if found := re.search(ready + r"http://[\d.]+:(\d+)(?:  \(scheduler (\S+);)?", line):
                self.url, self.scheduler = f"http://127.0.0.1:{found.group(1)}", found.group(2)
                break
        else:
            raise RuntimeError(f"{' '.join(words)} did not start")
        for _ in range(1200):
            try:
                self.model = json.load(urllib.request.urlopen(self.url + "/v1/models"))["data"][0]["id"]
                urllib.request.urlopen(self.url + "/ready").close()
                break
            except OSError:
                time.sleep(0.1)
        self.drain = subprocess.Popen(["cat"], stdin=self.process.stdout, stdout=subprocess.DEVNULL)

    def ttft(self, prompt):
        """Of token ids, in seconds."""
        body = json.dumps({"model": self.model, "prompt": prompt, "max_tokens": 1, "temperature": 0}).encode()
        request = urllib.request.Request(self.url + "/v1/completions", body, {"Content-Type": "application/json"})
        begin = time.monotonic()
        try:
            json.load(urllib.request.urlopen(request, timeout=900))
        except urllib.error.HTTPError as error:
            raise RuntimeError(error.read().decode()) from error
        return time.monotonic() - begin

    def metric(self, name, label=""):
        text = urllib.request.urlopen(self.url + "/metrics").read().decode()
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines()
                   if line.startswith("dovetail:" + name) and label in line)

    def wait_for_worker(self, name, limit=120):
        """Of `up`: until it serves."""
        end = time.monotonic() + limit
        while True:
            status = subprocess.run([self.dovetail, "status", "--scheduler", self.scheduler], capture_output=True,
                                    text=True, check=True).stdout
            if re.search(rf"^ +\d+ +{name} .* serving ", status, re.MULTILINE):
                return
            assert time.monotonic() < end, status
            time.sleep(0.2)

    def groups(self):
        return int(self.metric("prefill_groups_total"))

    def stop(self):
        self.process.terminate()
        self.process.wait(60)
        self.drain.kill()
