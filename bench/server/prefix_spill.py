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
import random
import statistics
import time

from serving import Server, Streams, percentile


def measure(options, flags, seed):
    server = Server(options.binary, options.model, flags)
    rng = random.Random(seed)

    def some(count):
        return [rng.randrange(5, options.vocabulary) for _ in range(count)]
    try:
        streams = Streams(server, [some(50) for _ in range(options.streams)], options.stream_tokens)
        begun = time.monotonic()
        conversations = [some(options.prompt_tokens) for _ in range(options.conversations)]
        ttft = []
        for _ in range(options.turns):
            ttft.append([])
            for i, said in enumerate(conversations):
                begin, seen = time.monotonic(), []
                answer = server.tokens(said, options.answer_tokens, seen)
                ttft[-1].append(seen[0] - begin)
                conversations[i] = said + answer + some(options.more_tokens)
        gaps = streams.gaps(begun, time.monotonic()) or [0]
        streams.end()
        later = [seconds for turn in ttft[1:] for seconds in turn]
        time.sleep(1.5)  # counters come once a second
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
