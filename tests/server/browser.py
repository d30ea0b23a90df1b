"""A headless Chromium that is told what to do through its DevTools, over pipes (--remote-debugging-pipe)."""
import base64
import json
import os
import shutil
import subprocess
import tempfile
import time

BROWSER = shutil.which("chromium")
PATIENCE = 90


class Browser:
    """One page; ended by `with`."""

    def __init__(self, width=1200, height=900):
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        (ours, theirs_out), (theirs_in, to) = os.pipe(), os.pipe()
        # Its end of the pipes are the descriptors 3 and 4.
        self.process = subprocess.Popen(
            ["sh", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "sh", BROWSER, "--headless", "--no-sandbox",
             "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", f"--user-data-dir={self.profile.name}",
             "--remote-debugging-pipe"],
            pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(theirs_in)
        os.close(theirs_out)
        self.reader, self.writer = os.fdopen(ours, "rb", buffering=0), os.fdopen(to, "wb", buffering=0)
        self.rest, self.number, self.session, self.told = b"", 0, None, []
        target = self.do("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.do("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.do(domain + ".enable")
        self.resize(width, height)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(30)
        self.reader.close()
        self.writer.close()
        self.profile.cleanup()

    def _read(self):
        while b"\0" not in self.rest:
            more = self.reader.read(65536)
            assert more, "the browser has ended"
            self.rest += more
        message, self.rest = self.rest.split(b"\0", 1)
        return json.loads(message)

    def do(self, method, **params):
        """The result of a DevTools method; what the browser says in between is kept in `told`."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        self.writer.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self.number:
                assert "error" not in answer, (method, answer)
                return answer["result"]
            self.told.append(answer)

    def run(self, script):
        """The value of a JavaScript expression."""
        result = self.do("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, (script, result["exceptionDetails"])
        return result["result"].get("value")

    def open(self, url):
        self.do("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def wait_for(self, condition, limit=PATIENCE):
        """Until the expression is true; returns its value."""
        end = time.monotonic() + limit
        while not (value := self.run(condition)):
            shown = self.run("document.body.innerText")
            assert time.monotonic() < end, f"never true: {condition}\n{shown[:2000]}\n{self.problems()}"
            time.sleep(0.05)
        return value

    def resize(self, width, height, mobile=False):
        self.do("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)

    def write(self, text):
        self.do("Input.insertText", text=text)

    def press(self, key, code, text=""):
        """One key: its name, its number, and what it writes."""
        for kind in ("keyDown", "keyUp"):
            self.do("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code,
                    text=text if kind == "keyDown" else "")

    def problems(self):
        """What the page's script threw, and what the browser refused it."""
        return [one["params"] for one in self.told if one.get("method") == "Runtime.exceptionThrown"
                or one.get("method") == "Log.entryAdded" and one["params"]["entry"]["level"] == "error"]

    def picture(self, path):
        data = self.do("Page.captureScreenshot", format="png")["data"]
        with open(path, "wb") as file:
            file.write(base64.b64decode(data))
