#!/usr/bin/env python3
"""Pages of two origins ask a `dovetail serve` process from a real browser; it lets only the allowed one read answers.
Arguments: the dovetail binary, a model. Skipped (77) where there is no Chromium.
"""
import http.server
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import threading

BROWSER = shutil.which("chromium")
PATIENCE = 90
PAGE = """<script>
const told = location.origin + "/told";
const ask = (path, init) => fetch("%(api)s" + path, init)
    .then(async r => [r.status, r.headers.get("x-request-id") != null, await r.text()])
    .catch(e => ["no", false, String(e)]);
const body = JSON.stringify({model: "x", prompt: "Once", max_tokens: 4, stream: true});
const json = {"Authorization": "Bearer a-key", "Content-Type": "application/json"};
(async () => {
  const answers = [await ask("/v1/models", {headers: {"Authorization": "Bearer a-key"}}),
                   await ask("/v1/models", {}), await ask("/v1/completions", {method: "POST", headers: json, body})];
  await fetch(told, {method: "POST", body: JSON.stringify(answers)});
})();
</script>"""


class Pages(http.server.ThreadingHTTPServer):
    """One origin: a page, and where it tells what it saw."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answers)
        self.api, self.told = "", queue.Queue()
        self.origin = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        page = (PAGE % {"api": self.server.api}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def do_POST(self):
        self.server.told.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_):
        pass


def ask_from(pages):
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = subprocess.Popen(
            [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
             f"--user-data-dir={profile}", "--remote-debugging-port=0", pages.origin],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            return pages.told.get(timeout=PATIENCE)
        finally:
            browser.terminate()
            browser.wait(30)


def main(binary, model):
    allowed, other = Pages(), Pages()
    server = subprocess.Popen(
        [binary, "serve", model, "--port", "0", "--ignore-model-name", "--allowed-origins",
         json.dumps([allowed.origin])],
        stdout=subprocess.PIPE, text=True, env=os.environ | {"DOVETAIL_API_KEY": "a-key"})
    try:
        api = re.search(r"http://\S+", server.stdout.readline()).group(0)
        allowed.api = other.api = api
        seen, unseen = ask_from(allowed), ask_from(other)
    finally:
        server.terminate()
        server.wait(60)
    assert [answer[0] for answer in seen] == [200, 401, 200], seen
    assert all(answer[1] for answer in seen), "a page may read X-Request-Id: " + str(seen)
    assert "data: [DONE]" in seen[2][2], seen
    assert [answer[0] for answer in unseen] == ["no"] * 3, unseen


if __name__ == "__main__":
    MODEL = os.path.join(os.environ.get("DOVETAIL_TEST_DATA", ""), sys.argv[2])
    if BROWSER is None or not os.path.exists(MODEL):
        print("skipped: no chromium, or no", sys.argv[2])
        sys.exit(77)
    main(sys.argv[1], MODEL)
