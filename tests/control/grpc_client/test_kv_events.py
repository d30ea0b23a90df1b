"""A router's mirror of the prefix cache, kept from SubscribeKvEvents alone: it knows before every request how many of
its tokens are cached, while blocks are evicted, the cache is flushed and attention workers are killed."""
import os
import random
import re
import signal
import subprocess
import threading
import time

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as service

BLOCK = 64
POSITIONS = 512


class Mirror:
    """What a subscriber knows, as a thread reads it."""

    def __init__(self, stub, start=0):
        self.changed = threading.Condition()
        self.tokens, self.parents = {}, {}  # by hash
        self.last = self.removed = self.cleared = 0
        self.ended = False
        self.stream = stub.SubscribeKvEvents(common.SubscribeKvEventsRequest(start_sequence_number=start), timeout=300)
        self.stream.initial_metadata()  # it hears from here on
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        try:
            for batch in self.stream:
                with self.changed:
                    self._apply(batch)
                    self.changed.notify_all()
        except grpc.RpcError:
            pass
        with self.changed:
            self.ended = True
            self.changed.notify_all()

    def _apply(self, batch):
        if self.last and not batch.HasField("snapshot"):
            assert batch.sequence_number == self.last + 1, "a batch is missing"
        self.last = batch.sequence_number
        for event in batch.events:
            kind = event.WhichOneof("data")
            if kind == "cleared":
                self.tokens.clear()
                self.parents.clear()
                self.cleared += 1
            if kind == "removed":
                for name in event.removed.block_hashes:
                    del self.tokens[name], self.parents[name]
                    self.removed += 1
            if kind == "stored":
                self._store(event.stored)

    def _store(self, stored):
        parent = stored.parent_block_hash if stored.HasField("parent_block_hash") else None
        for block in stored.blocks:
            assert block.block_size == BLOCK == len(block.token_ids) and block.block_hash not in self.tokens
            self.tokens[block.block_hash] = tuple(block.token_ids)
            self.parents[block.block_hash] = parent
            parent = block.block_hash

    def cached(self, prompt):
        """How many tokens of the prompt the cache holds: one is always computed."""
        by_place = {(self.parents[name], tokens): name for name, tokens in self.tokens.items()}
        at, count = None, 0
        while (count + 1) * BLOCK < len(prompt):
            at = by_place.get((at, tuple(prompt[count * BLOCK:(count + 1) * BLOCK])), "none")
            if at == "none":
                break
            count += 1
        return count * BLOCK

    def wait(self, condition, seconds=60):
        with self.changed:
            assert self.changed.wait_for(lambda: condition() or self.ended, seconds) and condition(), "it never came"

    def wait_for_blocks(self, prompt):
        whole = len(prompt) // BLOCK * BLOCK
        self.wait(lambda: self.cached(prompt[:whole] + [0]) == whole)


class Requests:
    """Prompts that begin alike in families and end in a block that no other has."""

    def __init__(self, stub, mirror, seed):
        print("seed", seed)
        self.stub, self.mirror, self.random = stub, mirror, random.Random(seed)
        self.families = [self._tokens(4 * BLOCK) for _ in range(6)]

    def _tokens(self, count):
        return [self.random.randrange(3, POSITIONS) for _ in range(count)]

    def prompt(self, family):
        kept = self.random.randrange(1, 4 * BLOCK)
        return self.families[family][:kept] + self._tokens(2 * BLOCK)

    def ask(self, prompt):
        made = pb.GenerateRequest(stream=False, tokenized=pb.TokenizedInput(input_ids=prompt),
                                  sampling_params=pb.SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
        return list(self.stub.Generate(made, timeout=60))[-1].complete.cached_tokens

    def check(self, rounds):
        """Asks, and compares with what the mirror says; returns how many tokens were found."""
        found = 0
        for _ in range(rounds):
            prompt = self.prompt(self.random.randrange(len(self.families)))
            with self.mirror.changed:
                expected = self.mirror.cached(prompt)
            cached = self.ask(prompt)
            assert cached == expected
            found += cached
            self.mirror.wait_for_blocks(prompt)  # what is told of the request is told in order
        return found


class Server:
    def __init__(self, command, *flags):
        self.process = subprocess.Popen(
            [os.environ["DOVETAIL_BINARY"], command, os.environ["DOVETAIL_MODEL"], *flags, "--port", "0",
             "--grpc-listen", "127.0.0.1:0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.lines, self.said = [], threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()
        self.address = self.wait_for(r"listening on grpc://(\S+)").group(1)

    def _read(self):
        for line in self.process.stdout:
            with self.said:
                self.lines.append(line)
                self.said.notify_all()

    def wait_for(self, pattern, times=1, seconds=60):
        found = []

        def look():
            found[:] = filter(None, (re.search(pattern, line) for line in self.lines))
            return len(found) >= times
        with self.said:
            assert self.said.wait_for(look, seconds), pattern
        return found[0]

    def attention_workers(self):
        """Their process ids."""
        listed = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(self.process.pid)], capture_output=True,
                                text=True, check=True).stdout.splitlines()
        return [int(line.split()[0]) for line in listed if " attention-worker " in line]

    def __enter__(self):
        self.channel = grpc.insecure_channel(self.address)
        self.stub = service.VllmEngineStub(self.channel)
        return self

    def __exit__(self, *error):
        self.channel.close()
        self.process.send_signal(signal.SIGINT)
        self.process.wait(30)


def snapshot_equals(server, mirror):
    other = Mirror(server.stub)
    other.wait(lambda: other.last == mirror.last)
    return other.tokens == mirror.tokens and other.parents == mirror.parents


def test_a_mirror_knows_what_is_cached_while_blocks_are_evicted():
    with Server("serve", "--kv-cache-memory-bytes", "1536000") as server:  # about 37 blocks of 64 tokens
        mirror = Mirror(server.stub)
        requests = Requests(server.stub, mirror, seed=1)
        assert requests.check(60) > 0
        assert mirror.removed > 20, "nothing was evicted"
        assert snapshot_equals(server, mirror)
        again = Mirror(server.stub, start=mirror.last + 1)
        before = mirror.last
        assert server.stub.FlushCache(common.FlushCacheRequest(), timeout=20).success
        for one in (mirror, again):
            one.wait(lambda one=one: one.cleared == 1 and not one.tokens)
            assert one.last == before + 1
        assert requests.check(30) > 0
        assert snapshot_equals(server, mirror)


def test_a_mirror_knows_what_a_killed_attention_worker_took_with_it():
    with Server("up", "--attention-workers", "2") as server:
        server.wait_for("^ready: ")
        mirror = Mirror(server.stub)
        requests = Requests(server.stub, mirror, seed=2)
        assert requests.check(24) > 0
        before = set(mirror.tokens)
        for killed, worker in enumerate(server.attention_workers(), start=1):
            os.kill(worker, signal.SIGKILL)
            server.wait_for(r"worker \d+ is out: ", killed)
            prompt = requests.prompt(0)
            requests.ask(prompt)  # on another worker, or on the one that takes the place
            mirror.wait_for_blocks(prompt)
            requests.check(12)
            server.wait_for("serves as attention worker", 2 + killed)  # in its place
        assert mirror.removed >= len(before), "what lay on the two was told of as if it were there"
        assert requests.check(24) > 0
        assert snapshot_equals(server, mirror)
