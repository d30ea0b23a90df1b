#!/usr/bin/env python3
"""How many greedy streams have the tokens that they have alone, among others, in parts, and after other requests.

  bench/server/same_tokens.py BINARY MODEL [--streams 24] [--tokens 64] [--seed 1]
                              --setting 'FLAGS OF serve' [--setting 'FLAGS' ...]

Prompts are 20 to 3,000 random token ids. Each setting is three servers, one after the other: each prompt alone, without
and then with what the prefix cache has of it; all prompts at once, twice; all at once with steps of at most 300 tokens
(--max-num-batched-tokens), between twice as many other streams. Prints for each how many streams have the tokens of the
first.
"""
import argparse
import random
import shlex
import threading

from serving import Server


def all_at_once(server, prompts, tokens):
    answers = [None] * len(prompts)

    def ask(i):
        answers[i] = server.tokens(prompts[i], tokens, [])

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('binary')
    parser.add_argument('model')
    parser.add_argument('--streams', type=int, default=24)
    parser.add_argument('--tokens', type=int, default=64)
    parser.add_argument('--seed', type=int, default=1)
    parser.add_argument('--vocabulary', type=int, default=30000)
    parser.add_argument('--setting', action='append', required=True, type=shlex.split)
    options = parser.parse_args()
    rng = random.Random(options.seed)

    def prompts(count):
        lengths = [int(20 * 150 ** rng.random()) for _ in range(count)]
        return [[rng.randrange(5, options.vocabulary) for _ in range(length)] for length in lengths]

    ours, others = prompts(options.streams), prompts(2 * options.streams)
    print(f'| flags | alone again | at once | at once again | in parts among others |\n|{"---|" * 5}')
    for flags in options.setting:
        alone = again = None
        same = []
        server = Server(options.binary, options.model, flags)
        try:
            alone = [server.tokens(prompt, options.tokens, []) for prompt in ours]
            again = [server.tokens(prompt, options.tokens, []) for prompt in ours]
        finally:
            server.stop()
        server = Server(options.binary, options.model, flags)
        try:
            rounds = [all_at_once(server, ours, options.tokens) for _ in range(2)]
        finally:
            server.stop()
        server = Server(options.binary, options.model, [*flags, '--max-num-batched-tokens', '300'])
        try:
            mixed = [prompt for triple in zip(ours, others[::2], others[1::2]) for prompt in triple]
            parts = all_at_once(server, mixed, options.tokens)[::3]
        finally:
            server.stop()
        for answers in (again, *rounds, parts):
            same.append(sum(a == b for a, b in zip(alone, answers)))
        print(f'| {shlex.join(flags)} | {" | ".join(f"{n} of {len(ours)}" for n in same)} |', flush=True)


if __name__ == '__main__':
    main()
