#!/usr/bin/env python3
"""What host memory adds to a GPU's: tokens a second of many long streams, by where their K and V may lie.

  bench/server/tiers.py BINARY MODEL [--prompt-tokens 1000] [--tokens 1500] [--rounds 2] [--windows 3] [--seconds 5]
                        [--settle 10] --setting 'STREAMS: flags of dovetail serve'
                        [--setting 'STREAMS: up FLAGS' ...]

Each setting is one server, or with `up` one cluster, with so many streams, all begun at once; the settings take
turns, so many rounds. Windows of so many seconds begin --settle seconds after the last stream's first token: tokens a
second of all streams, and of the quarter that got the fewest and the most in that window. The client is one thread.
"""
import argparse
import json
import re
import selectors
import socket
import statistics
import subprocess
import tempfile
import time

GIVE_UP_S = 240


class Server:
    def __init__(self, options, flags):
        self.log = tempfile.TemporaryFile()
        cluster = flags[:1] == ['up']
        command = [options.binary, 'up' if cluster else 'serve', options.model, '--port', '0', '--served-model-name',
                   'm', *flags[cluster:]]
        ready = r'^ready: http://(\S+):(\d+)' if cluster else r'listening on http://(\S+):(\d+)'
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.log, text=True)
        for line in self.process.stdout:
            if found := re.search(ready, line):
                self.address = found.group(1), int(found.group(2))
                return
        self.log.seek(0)
        raise SystemExit(self.log.read().decode()[-3000:])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()


def ask(address, options, seed):
    prompt = [1 + (seed * 7919 + i * 31) % 400 for i in range(options.prompt_tokens)]
    body = json.dumps({'model': 'm', 'prompt': prompt, 'max_tokens': options.tokens, 'ignore_eos': True,
                       'temperature': 0, 'stream': True}).encode()
    stream = socket.create_connection(address)
    stream.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: m\r\nContent-Type: application/json\r\n'
                   b'Content-Length: %d\r\n\r\n' % len(body) + body)
    stream.setblocking(False)
    return stream


class Streams:
    """Counts each one's events: one for each token."""

    def __init__(self, address, count, options):
        self.events = [0] * count
        self.selector = selectors.DefaultSelector()
        for i in range(count):
            self.selector.register(ask(address, options, i), selectors.EVENT_READ, i)

    def read(self, seconds):
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            for key, _ in self.selector.select(left):
                data = key.fileobj.recv(1 << 16)
                if not data:
                    raise SystemExit(f'stream {key.data} ended after {self.events[key.data]} tokens')
                self.events[key.data] += data.count(b'"text":')

    def wait_until_all_have_one(self):
        end = time.monotonic() + GIVE_UP_S
        while min(self.events) == 0:
            self.read(0.1)
            if time.monotonic() > end:
                raise SystemExit(f'{self.events.count(0)} streams have no token')


def measure(options, count, flags):
    with Server(options, flags) as server:
        begin = time.monotonic()
        streams = Streams(server.address, count, options)
        streams.wait_until_all_have_one()
        first = time.monotonic() - begin
        streams.read(options.settle)
        windows = []
        for _ in range(options.windows):
            before, at = list(streams.events), time.monotonic()
            streams.read(options.seconds)
            seconds = time.monotonic() - at
            windows.append(sorted((now - then) / seconds for then, now in zip(before, streams.events)))
    return windows, first


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('binary')
    parser.add_argument('model')
    for name, default in (('prompt-tokens', 1000), ('tokens', 1500), ('rounds', 2), ('windows', 3), ('seconds', 5),
                          ('settle', 10)):
        parser.add_argument(f'--{name}', type=int, default=default)
    parser.add_argument('--setting', action='append', required=True)
    options = parser.parse_args()
    totals = {setting: [] for setting in options.setting}
    for _ in range(options.rounds):
        for setting in options.setting:
            count, flags = setting.split(':', 1)
            windows, first = measure(options, int(count), flags.split())
            quarter = max(1, int(count) // 4)
            for window in windows:
                totals[setting].append(sum(window))
                print(f'{setting}: {sum(window):.0f} tokens/s; of a stream {statistics.mean(window[:quarter]):.1f} in '
                      f'the slowest quarter, {statistics.mean(window[-quarter:]):.1f} in the fastest; all had a token '
                      f'after {first:.1f} s', flush=True)
    for setting, windows in totals.items():
        print(f'{setting}: median {statistics.median(windows):.0f} tokens/s')


if __name__ == '__main__':
    main()
