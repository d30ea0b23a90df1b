#!/usr/bin/env python3
"""What a long prompt does to running streams, with and without --prefill-itl-budget.

  bench/server/prefill_itl.py BINARY MODEL [--budgets auto,0] [--rounds 3] [--streams 4] [--prompt-words 3000]
                           [--vocabulary N] [flags of `dovetail serve`]

Each round takes the budgets in turn. For each it starts `dovetail serve`, begins the streams, lets them run alone for
--alone seconds, then sends the prompt and reads its first token. It prints the streams' gaps between tokens, median and
99th percentile, alone and until that token; the prompt's time to it; and the counter of shortened steps. With
--vocabulary, prompts are token ids below N in place of words, for a model without a tokenizer.
"""
import argparse
import statistics
import time

from serving import Server, Streams, percentile

WORDS = ('the old sailor told his crew about a storm that had once carried their ship far beyond every known '
         'shore').split()


def text(words, seed, vocabulary):
    """So many words, or tokens, that no other prompt begins with."""
    if vocabulary:
        return [(seed * 7919 + i * i + 1) % vocabulary for i in range(words)]
    return ' '.join([f'Story {seed}:'] + [WORDS[(seed * 7 + i * i) % len(WORDS)] for i in range(words)])


def measure(options, budget, flags, seed):
    server = Server(options.binary, options.model, [*flags, '--prefill-itl-budget', budget])
    try:
        def prompt(words, number):
            return text(words, number + seed, options.vocabulary)
        # A prompt of which the scheduler learns rates, as any server that has run for a while has done.
        server.tokens(prompt(600, 7000), 1, [])
        streams = Streams(server, [prompt(20, 1000 * i) for i in range(options.streams)], 4000)
        alone = time.monotonic()
        time.sleep(options.alone)
        before = server.metric('prefill_shortened_steps_total')
        begin, first = time.monotonic(), []
        server.tokens(prompt(options.prompt_words, 9000), 1, first)
        ttft = first[0] - begin
        shortened = server.metric('prefill_shortened_steps_total') - before
        streams.end()
        quiet, busy = streams.gaps(alone, begin), streams.gaps(begin, first[0])
        return {'itl p50 alone': percentile(quiet, 0.5), 'itl p99 alone': percentile(quiet, 0.99),
                'itl p50': percentile(busy, 0.5), 'itl p99': percentile(busy, 0.99), 'itl max': max(busy),
                'ttft': ttft, 'shortened': shortened}
    finally:
        server.stop()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('binary')
    parser.add_argument('model')
    parser.add_argument('--budgets', default='auto,0')
    parser.add_argument('--rounds', type=int, default=3)
    parser.add_argument('--streams', type=int, default=4)
    parser.add_argument('--prompt-words', type=int, default=3000)
    parser.add_argument('--vocabulary', type=int, default=0)
    parser.add_argument('--alone', type=float, default=5)
    options, flags = parser.parse_known_args()
    results = {budget: [] for budget in options.budgets.split(',')}
    for seed in range(options.rounds):
        for budget, measured in results.items():
            measured.append(measure(options, budget, flags, seed))
            print(budget, {name: round(value, 4) for name, value in measured[-1].items()}, flush=True)
    for budget, measured in results.items():
        medians = {name: statistics.median(m[name] for m in measured) for name in measured[0]}
        ratio = statistics.median(m['itl p99'] / m['itl p99 alone'] for m in measured)
        print(f'median of {len(measured)}, budget {budget}:', {n: round(v, 4) for n, v in medians.items()},
              f'p99 over alone {ratio:.2f}')


if __name__ == '__main__':
    main()
