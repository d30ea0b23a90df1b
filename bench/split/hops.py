#!/usr/bin/env python3
"""What crossing between processes costs a decode step: the same streams on one process and on a cluster, in turn.

  bench/split/hops.py BINARY MODEL [--before BINARY] [--attention-workers N] [--streams N ...] [--rounds N] [--tokens N]

`serve` runs with one thread; `up` has a scheduler, a server, a compute worker and N attention workers of one thread
each. With --before another build's `up` is asked as well, in the same rounds. Prints medians of the milliseconds from
token to token of a stream, each over the `serve` of its round, and what the processes of the cluster use of a core
while no request runs.
"""
import argparse
import json
import os
import pathlib
import statistics
import sys
import threading
import time
import urllib.request

PROJECT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT / "tests" / "control"))
import processes  # noqa: E402

FLAGS = ("--device", "cpu", "--threads", "1", "--served-model-name", "m")
IDLE_S = 3


def complete(url, tokens, salt):
    body = {"model": "m", "prompt": f"Once upon a time {salt}", "max_tokens": tokens, "temperature": 0,
            "ignore_eos": True}
    request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as reply:
        assert json.load(reply)["usage"]["completion_tokens"] == tokens


def token_ms(url, streams, tokens):
    """From token to token of each stream: what long answers take more than short ones."""
    def seconds(length):
        threads = [threading.Thread(target=complete, args=(url, length, salt)) for salt in range(streams)]
        begun = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.monotonic() - begun
    return 1e3 * (seconds(tokens + 8) - seconds(8)) / tokens


def idle_cores(pid):
    children = processes.children_of(pid)
    before = sum(map(processes.cpu_seconds, children))
    time.sleep(IDLE_S)
    return (sum(map(processes.cpu_seconds, children)) - before) / IDLE_S


def measure(layout, binary, arguments, times, idle):
    split = ("--attention-workers", str(arguments.attention_workers))
    with processes.Serve(binary, arguments.model, *FLAGS) if layout == "serve" else processes.Up(
            binary, arguments.model, *FLAGS, *split) as cluster:
        complete(cluster.url, 16, 99)
        for streams in arguments.streams:
            times.setdefault((layout, streams), []).append(token_ms(cluster.url, streams, arguments.tokens))
        if layout != "serve":
            idle.setdefault(layout, []).append(idle_cores(cluster.pid))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("model")
    parser.add_argument("--before", help="another build of the binary")
    parser.add_argument("--attention-workers", type=int, default=1)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=100)
    arguments = parser.parse_args()
    layouts = {"serve": arguments.binary, "up": arguments.binary}
    if arguments.before:
        layouts["up, before"] = arguments.before
    times, idle = {}, {}
    print(f"load of the machine: {os.getloadavg()[0]:.1f} before; {os.cpu_count()} cores")
    for _ in range(arguments.rounds):
        for layout, binary in layouts.items():
            measure(layout, binary, arguments, times, idle)
    print("| | streams | ms a token | over `serve` | cores used without requests |\n|---|---:|---:|---:|---:|")
    for (layout, streams), own in times.items():
        over = statistics.median(mine / theirs for mine, theirs in zip(own, times["serve", streams]))
        rest = f"{statistics.median(idle[layout]):.3f}" if layout in idle else ""
        print(f"| {layout} | {streams} | {statistics.median(own):.2f} | {over:.2f} | {rest} |")


if __name__ == "__main__":
    main()
