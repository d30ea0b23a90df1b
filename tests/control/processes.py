"""Processes of a cluster for tests and benchmarks: started, read, stopped; and streams that run meanwhile."""
import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import threading
import time
import urllib.parse
import urllib.request

START_LIMIT = 60


class Process:
    """A process whose lines are read as they come; ended by `with`."""

    def __init__(self, *arguments, environment=None):
        """`environment`: variables of it besides those of this process."""
        self.lines, self.changed = [], threading.Condition()
        self.process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                        env={**os.environ, **(environment or {})})
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    @property
    def pid(self):
        return self.process.pid

    def send(self, number):
        self.process.send_signal(number)

    def stop(self, limit=30, number=signal.SIGTERM):
        """Asks it to end; returns its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
            self.process.send_signal(signal.SIGCONT)
        try:
            self.process.wait(limit)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.reader.join()
            text = "\n".join(self.lines)
            raise AssertionError(f"did not end within {limit} s of signal {number}:\n{text}") from None
        self.reader.join()
        self.process.stdout.close()
        # Another is started in place of a child that crashes, and streams go on, as after a kill.
        crash = next((i for i, line in enumerate(self.lines) if re.search(r"\*\*\* SIG[A-Z]+ received", line)), None)
        assert crash is None, "it, or a child of it, crashed:\n" + "\n".join(self.lines[max(0, crash - 20):])
        return self.process.returncode

    def _read(self):
        for line in self.process.stdout:
            with self.changed:
                self.lines.append(line.rstrip("\n"))
                self.changed.notify_all()
        with self.changed:
            self.lines.append("(end)")
            self.changed.notify_all()

    def wait_for(self, pattern, after=0, limit=START_LIMIT):
        """The match in the first line from number `after` on that has one."""
        end = time.monotonic() + limit
        with self.changed:
            while True:
                for line in self.lines[after:]:
                    if found := re.search(pattern, line):
                        return found
                if self.lines and self.lines[-1] == "(end)" or time.monotonic() > end:
                    raise AssertionError(f"no line matches {pattern}:\n" + "\n".join(self.lines))
                self.changed.wait(end - time.monotonic())


class Serve(Process):
    """`dovetail serve MODEL FLAGS` that serves: at `url`."""

    def __init__(self, binary, model, *flags):
        super().__init__(binary, "serve", model, "--port", "0", *flags)
        try:
            self.url = self.wait_for(r"(http://127\.0\.0\.1:\d+)").group(1)
            wait_until_ready(self.url)
        except AssertionError:
            self.stop()
            raise


class Up(Process):
    """`dovetail up MODEL FLAGS` that serves: at `url`, with its scheduler at `scheduler`."""

    def __init__(self, binary, model, *flags):
        super().__init__(binary, "up", model, "--port", "0", *flags)
        self.binary = binary
        try:
            ready = self.wait_for(r"^ready: (https?://\S+)  \(scheduler (\S+);")
            self.url, self.scheduler = ready.group(1), ready.group(2)
            if self.url.startswith("http:"):
                wait_until_ready(self.url)
        except AssertionError:
            self.stop()
            raise

    def status(self):
        """What `dovetail status` prints."""
        done = subprocess.run([self.binary, "status", "--scheduler", self.scheduler], capture_output=True, text=True,
                              timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def pid_of(self, name):
        return next(pid for pid, arguments in children_of(self.pid).items() if f"--name {name} " in arguments)


def children_of(pid):
    """pid -> command line."""
    listed = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(pid)], capture_output=True, text=True,
                            check=False).stdout
    found = (line.split(None, 1) for line in listed.splitlines() if "dovetail" in line)
    return {int(pid): arguments for pid, arguments in found}


def cpu_seconds(pid):
    """Of all threads, in the kernel as well."""
    with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
        fields = stat.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def shared_memory():
    return {name for name in os.listdir("/dev/shm") if "ucx" in name or "ucp" in name}


def left_in_shared_memory(before, limit=10):
    """Other programs of this machine may be in the middle of opening a segment; what a dead process left stays."""
    left, end = shared_memory() - before, time.monotonic() + limit
    while left and time.monotonic() < end:
        left &= shared_memory()
    return left


def wait_until_ready(url, limit=START_LIMIT):
    """Until a server says that it takes requests: it hears later than its scheduler's log that all workers serve."""
    end = time.monotonic() + limit
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(url + "/ready", timeout=limit):
            return
        assert time.monotonic() < end, f"{url}/ready is not 200"
        time.sleep(0.05)


def stream(url, prompt, limit=60, **fields):
    """Yields the pieces of text of a streamed completion, as they come."""
    body = {"model": "x", "prompt": prompt, "temperature": 0, "stream": True, **fields}
    address = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=limit)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise AssertionError(f"{response.status}: {response.read()[:500]}")
        for line in response:
            if line.startswith(b"data: {"):
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                if chunk["choices"]:
                    yield chunk["choices"][0]["text"]


class Load:
    """Streams that run until told to stop; each is compared with what the same request gave before."""

    def __init__(self, url, requests, streams=3, turns=None):
        """`requests`: fields of stream() besides url; the expected texts are taken at once, one after another. `turns`:
        requests of each stream; else it begins the next one until told to stop."""
        self.url, self.requests, self.turns = url, requests, turns
        self.expected = ["".join(stream(url, **request)) for request in requests]
        self.lock = threading.Condition()
        self.finished, self.problems, self.gaps, self.started = 0, [], [], 0
        self.pieces = [0] * streams  # that each thread was given
        self.ending = False
        self.threads = [threading.Thread(target=self._run, args=(i,)) for i in range(streams)]

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        with self.lock:
            self.ending = True
        for thread in self.threads:
            thread.join()

    def _run(self, number):
        turn = number
        while self.turns is None or turn < number + self.turns:
            with self.lock:
                if self.ending and self.turns is None:
                    return
                self.started += 1
            index = turn % len(self.requests)
            turn += 1
            try:
                text, last = "", time.monotonic()
                for piece in stream(self.url, **self.requests[index]):
                    now = time.monotonic()
                    text += piece
                    with self.lock:
                        self.gaps.append((last, now))
                        self.pieces[number] += 1
                        self.lock.notify_all()
                    last = now
                problem = None if text == self.expected[index] else f"{text!r} is not {self.expected[index]!r}"
            except (OSError, AssertionError, http.client.HTTPException, ValueError) as error:
                problem = f"{type(error).__name__}: {error}"
            with self.lock:
                self.finished += 1
                if problem:
                    self.problems.append(f"request {index}: {problem}")
                self.lock.notify_all()

    def wait_for(self, condition, limit=60):
        """Until condition(self), which is called with the lock held."""
        with self.lock:
            assert self.lock.wait_for(lambda: condition(self), limit), f"stuck: {self.finished} done, {self.problems}"

    def wait_for_pieces(self, count, limit=60):
        """Until every thread was given `count` more pieces."""
        with self.lock:
            before = list(self.pieces)
        self.wait_for(lambda load: all(now >= then + count for now, then in zip(load.pieces, before)), limit)

    def longest_gap(self, begin=0.0, end=float("inf")):
        """Seconds between two pieces of a stream, of gaps that touch the time given."""
        with self.lock:
            return max((now - last for last, now in self.gaps if now >= begin and last <= end), default=0.0)
