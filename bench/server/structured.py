#!/usr/bin/env python3
"""What structured output and tools cost many streams.

  bench/server/structured.py BINARY MODEL [--parts rate,first,tools] [--streams 64] [--tools-streams 200]
                             [--tokens 160] [--rounds 5] [flags of `dovetail serve`]

rate:  so many streams without and with a JSON schema, in turn. The tokens a second while all of them run, and the
       median of the rounds' ratios.
first: one stream that may and one that must call a tool of usual size which the server has not seen, in turn. By how
       much later the first token comes: compiling and the first mask.
tools: so many streams of calls that are required (arguments of a schema) at a server that logs each request, in turn
       with streams of text. The gaps between a stream's tokens while all of them run.

One server for all rounds. The client is one thread, so that it takes little from the machine that it shares with the
server. Masks alone are measured by bench/grammar/grammar_bench.
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

COUNT = re.compile(rb'"completion_tokens":(\d+)')
GIVE_UP_S = 300


def schema():
    """Answers that are long: a list of people."""
    person = {'type': 'object', 'additionalProperties': False, 'required': ['name', 'age', 'likes'],
              'properties': {'name': {'type': 'string'}, 'age': {'type': 'integer'},
                             'likes': {'type': 'array', 'items': {'enum': ['sea', 'snow', 'sun']}, 'minItems': 1}}}
    return {'type': 'object', 'additionalProperties': False, 'required': ['people'],
            'properties': {'people': {'type': 'array', 'items': person, 'minItems': 40}}}


def tool():
    return {'type': 'function', 'function': {'name': 'remember', 'description': 'Keeps a list.',
                                             'parameters': schema()}}


def weather(seed):
    """A tool of usual size. Another `seed` is another tool."""
    return {'type': 'function', 'function': {
        'name': 'get_weather' + seed, 'description': 'The weather in a city.',
        'parameters': {'type': 'object', 'additionalProperties': False, 'required': ['city', 'unit'], 'properties': {
            'city': {'type': 'string', 'description': 'Its name'}, 'unit': {'enum': ['celsius', 'fahrenheit']},
            'days': {'type': 'integer', 'minimum': 1, 'maximum': 14},
            'details': {'type': 'array', 'items': {'enum': ['wind', 'rain', 'sun']}, 'maxItems': 3}}}}}


class Server:
    def __init__(self, options, flags):
        command = [options.binary, 'serve', options.model, '--port', '0', '--served-model-name', 'm', *flags]
        self.log = tempfile.TemporaryFile()
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.log, text=True)
        for line in self.process.stdout:
            if 'listening' in line:
                self.port = int(re.search(r':(\d+)\s*$', line).group(1))
                return
        raise SystemExit(f'the server ended: {" ".join(command)}')

    def stop(self):
        self.process.terminate()
        self.process.wait()
        self.log.seek(0)
        return len(self.log.read().splitlines())


class Stream:
    def __init__(self, port, index, options, fields):
        body = json.dumps({'model': 'm', 'stream': True, 'max_tokens': options.tokens, 'temperature': 0.8,
                           'seed': index, 'stream_options': {'include_usage': True, 'continuous_usage_stats': True},
                           'messages': [{'role': 'user', 'content': f'Tell me of {index + 2} people.'}], **fields})
        head = ('POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n'
                f'Connection: close\r\nContent-Length: {len(body)}\r\n\r\n')
        self.socket = socket.create_connection(('127.0.0.1', port))
        self.sent = time.monotonic()
        self.socket.sendall((head + body).encode())
        self.socket.setblocking(False)
        self.seen, self.tail, self.end = [], b'', None  # seen: (time, tokens so far)

    def read(self):
        """Whether it goes on."""
        data = self.socket.recv(1 << 16)
        now = time.monotonic()
        if not self.seen and self.tail == b'' and data and b' 200 ' not in data[:16]:
            raise SystemExit(data[-400:].decode(errors='replace'))
        self.tail = (self.tail + data)[-(1 << 16):]
        counts = COUNT.findall(self.tail)
        if counts and (not self.seen or int(counts[-1]) > self.seen[-1][1]):
            self.seen.append((now, int(counts[-1])))
        if data and b'data: [DONE]' not in self.tail:
            return True
        if not self.seen:
            raise SystemExit('a stream ended without a token: ' + self.tail[-400:].decode(errors='replace'))
        self.end = now
        self.socket.close()
        return False

    def tokens_at(self, when):
        return max((tokens for at, tokens in self.seen if at <= when), default=0)


def run(server, options, count, fields):
    streams = [Stream(server.port, i, options, fields) for i in range(count)]
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            selector.register(stream.socket, selectors.EVENT_READ, stream)
        left, deadline = count, time.monotonic() + GIVE_UP_S
        while left:
            if time.monotonic() > deadline:
                raise SystemExit(f'{left} of {count} streams had not ended after {GIVE_UP_S} s')
            for key, _ in selector.select(1):
                stream = key.data
                descriptor = stream.socket
                selector.unregister(descriptor)
                if stream.read():
                    selector.register(descriptor, selectors.EVENT_READ, stream)
                else:
                    left -= 1
    return streams


def rate_of(streams):
    """Tokens a second from when all have begun until the first has ended."""
    begin, end = max(s.seen[0][0] for s in streams), min(s.end for s in streams)
    if end <= begin:
        raise SystemExit('the streams did not all run at once: ask for more --tokens')
    return sum(s.tokens_at(end) - s.tokens_at(begin) for s in streams) / (end - begin)


def with_schema():
    return {'response_format': {'type': 'json_schema', 'json_schema': {'name': 'people', 'schema': schema()}}}


def measure_rate(server, options):
    ratios = []
    for number in range(options.rounds):
        arms = {'plain': {'ignore_eos': True}, 'schema': with_schema()}
        order = list(arms) if number % 2 == 0 else list(arms)[::-1]
        rates = {name: rate_of(run(server, options, options.streams, arms[name])) for name in order}
        ratios.append(rates['schema'] / rates['plain'])
        print(f'rate {number}: plain {rates["plain"]:.0f} tok/s, schema {rates["schema"]:.0f} tok/s, '
              f'ratio {ratios[-1]:.3f}', flush=True)
    print(f'rate: {options.streams} streams, median ratio {statistics.median(ratios):.3f} (at least 0.95)')


def measure_first(server, options):
    times = {'auto': [], 'required': []}
    short = argparse.Namespace(**{**vars(options), 'tokens': 4})
    for number in range(8 * options.rounds):
        for choice, all_times in times.items():
            fields = {'tools': [weather(f'_{choice[0]}{number}')], 'tool_choice': choice, 'return_token_ids': True}
            stream = run(server, short, 1, fields)[0]
            all_times.append(1000 * (stream.seen[0][0] - stream.sent))
    may, must = (statistics.median(all_times) for all_times in times.values())
    print(f'first: may call {may:.1f} ms, must call {must:.1f} ms, {must - may:.1f} ms later (less than 20)')


def gaps_of(streams):
    """Milliseconds, from when all have begun."""
    begin = max(s.seen[0][0] for s in streams)
    gaps = sorted(1000 * (b[0] - a[0]) for s in streams for a, b in zip(s.seen, s.seen[1:]) if a[0] >= begin)
    if not gaps:
        raise SystemExit('the streams did not all run at once: ask for more --tokens')
    return gaps


def measure_tools(server, options):
    ids = {'return_token_ids': True}  # each token is shown, also those that begin a call
    called = {'tools': [tool()], 'tool_choice': 'required', **ids}
    for number in range(options.rounds):
        for name, fields in (('text', {'ignore_eos': True, **ids}), ('calls', called)):
            gaps = gaps_of(run(server, options, options.tools_streams, fields))
            print(f'tools {number}: {options.tools_streams} streams of {name}: '
                  f'gaps median {statistics.median(gaps):.1f}, p99 {gaps[int(0.99 * (len(gaps) - 1))]:.1f}, '
                  f'longest {gaps[-1]:.1f} ms', flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('binary')
    parser.add_argument('model')
    parser.add_argument('--parts', default='rate,first,tools')
    parser.add_argument('--streams', type=int, default=64)
    parser.add_argument('--tools-streams', type=int, default=200)
    parser.add_argument('--tokens', type=int, default=160)
    parser.add_argument('--rounds', type=int, default=5)
    options, flags = parser.parse_known_args()
    parts = {'rate': measure_rate, 'first': measure_first, 'tools': measure_tools}
    chosen = options.parts.split(',')
    if unknown := set(chosen) - set(parts):
        raise SystemExit(f'--parts: {", ".join(sorted(unknown))}; there are {", ".join(parts)}')
    server = Server(options, flags)
    try:
        run(server, options, 2, with_schema())  # pages are read, pools are made
        for name in chosen:
            parts[name](server, options)
    finally:
        lines = server.stop()
    print(f'the server logged {lines} lines')


if __name__ == '__main__':
    main()
