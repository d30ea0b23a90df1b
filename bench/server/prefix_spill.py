#!/usr/bin/env python3
"""What a prefix cache that spills to host memory is worth to conversations that do not fit on a GPU together.

  bench/server/prefix_spill.py BINARY MODEL [--conversations 24] [--prompt-tokens 4000] [--answer-tokens 64]
                               [--more-tokens 200] [--turns 3] [--streams 8] [--rounds 2] [flags of dovetail serve]

Conversations take turns: all have their first turn, one after the other, then all their second, and so on. Each turn's
prompt is what was said before, and --more-tokens new ones. Meanwhile --streams others decode. Each round starts
`dovetail serve` with --prefix-spill, and then without. It prints the time to the first token of first turns and of
later ones, the gaps between tokens of the streams (median, 99th percentile), and the tokens that were spilled and
fetched. Prompts are token ids. Flags are, for example:
  --device cuda:0 --attention-device cuda:0=8GiB,cpu=40GiB --placement tiers
"""
import argparse
import http.client
import json
import random
import re
import statistics
import subprocess
import threading
import time


class Server:
    def __init__(self, options, flags):
        command = [options.binary, 'serve', options.model, '--port', '0', '--served-model-name', 'm', *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for line in self.process.stdout:
            if found := re.search(r'listening on http://\S+:(\d+)\s*$', line):
                self.port = int(found.group(1))
                break
        else:
            raise SystemExit(self.process.stderr.read()[-3000:])
        for pipe in (self.process.stdout, self.process.stderr):
            threading.Thread(target=pipe.read, daemon=True).start()

    def stop(self):
        self.process.terminate()
        self.process.wait()

    def generate(self, prompt, count, seen=None, ended=None):
        """The tokens' ids; appends to `seen` when each came. Ends early once `ended` is set."""
        connection = http.client.HTTPConnection('127.0.0.1', self.port, timeout=600)
        body = {'model': 'm', 'prompt': prompt, 'max_tokens': count, 'stream': True, 'ignore_eos': True,
                'temperature': 0, 'return_token_ids': True}
        connection.request('POST', '/v1/completions', json.dumps(body), {'Content-Type': 'application/json'})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f'{response.status}: {response.read()[:300]}')
        tokens = []
        for line in response:
            if not line.startswith(b'data: {'):
                continue
            if seen is not None:
                seen.append(time.monotonic())
            for choice in json.loads(line[6:])['choices']:
                tokens += choice.get('token_ids') or []
            if ended is not None and ended.is_set():
                break
        connection.close()
        return tokens

    def metric(self, name):
        connection = http.client.HTTPConnection('127.0.0.1', self.port, timeout=60)
        connection.request('GET', '/metrics')
        found = re.search(rf'^dovetail:{name}{{[^}}]*}} (\S+)$', connection.getresponse().read().decode(), re.M)
        return float(found.group(1)) if found else float('nan')


def percentile(values, share):
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def measure(options, flags, seed):
    server = Server(options, flags)
    rng = random.Random(seed)

    def some(count):
        return [rng.randrange(5, options.vocabulary) for _ in range(count)]
    try:
        ended = threading.Event()
        streams = [[] for _ in range(options.streams)]
        threads = [threading.Thread(target=server.generate, args=(some(50), options.stream_tokens, seen, ended))
                   for seen in streams]
        for thread in threads:
            thread.start()
        while streams and min(len(seen) for seen in streams) < 5:
            if not all(thread.is_alive() for thread in threads):
                raise SystemExit('a stream ended: --stream-tokens must fit into the longest sequence')
            time.sleep(0.01)
        conversations = [some(options.prompt_tokens) for _ in range(options.conversations)]
        ttft = []
        for _ in range(options.turns):
            ttft.append([])
            for i, said in enumerate(conversations):
                begin, seen = time.monotonic(), []
                answer = server.generate(said, options.answer_tokens, seen)
                ttft[-1].append(seen[0] - begin)
                conversations[i] = said + answer + some(options.more_tokens)
        ended.set()
        for thread in threads:
            thread.join()
        gaps = [b - a for seen in streams for a, b in zip(seen[5:], seen[6:])] or [0]
        later = [seconds for turn in ttft[1:] for seconds in turn]
        time.sleep(1.5)  # the server hears of counters once a second
        return {'ttft first ms': 1e3 * statistics.median(ttft[0]), 'ttft later ms': 1e3 * statistics.median(later),
                'ttft later p90 ms': 1e3 * percentile(later, 0.9), 'itl p50 ms': 1e3 * percentile(gaps, 0.5),
                'itl p99 ms': 1e3 * percentile(gaps, 0.99), 'spilled': server.metric('prefix_spilled_tokens_total'),
                'fetched': server.metric('prefix_fetched_tokens_total')}
    finally:
        server.stop()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('binary')
    parser.add_argument('model')
    for name, default in (('conversations', 24), ('prompt-tokens', 4000), ('answer-tokens', 64), ('more-tokens', 200),
                          ('turns', 3), ('streams', 8), ('stream-tokens', 20000), ('rounds', 2), ('vocabulary', 400)):
        parser.add_argument(f'--{name}', type=int, default=default)
    options, flags = parser.parse_known_args()
    results = {'--prefix-spill': [], '--no-prefix-spill': []}
    for seed in range(options.rounds):
        for flag, measured in results.items():
            measured.append(measure(options, [*flags, flag], seed))
            print(flag, {name: round(value, 2) for name, value in measured[-1].items()}, flush=True)
    for flag, measured in results.items():
        print(f'median of {len(measured)}, {flag}:',
              {name: round(statistics.median(m[name] for m in measured), 2) for name in measured[0]})


if __name__ == '__main__':
    main()
