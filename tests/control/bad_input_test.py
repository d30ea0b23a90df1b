#!/usr/bin/env python3
"""What an operator can get wrong, tried on a cluster that serves: each is named in one line with the remedy, and the
cluster goes on. Certificates and tokens are in roles_test.py; what other releases would say is in members_test.cc.

Arguments: the dovetail binary.
"""
import contextlib
import os
import socket
import subprocess
import sys
import threading
import unittest

import processes

BINARY = sys.argv.pop(1)
DATA = os.environ.get("DOVETAIL_TEST_DATA")
MODEL = os.path.join(DATA, "models/stories260K/stories260K-f32.gguf") if DATA else None
HYBRID = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../models/tales-hybrid")
PROMPT = "Once upon a time"


@contextlib.contextmanager
def listener(answer=b""):
    """A port that another program holds; it answers everybody with `answer`, or never."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        held = []

        def accept():
            with contextlib.suppress(OSError):
                while True:
                    held.append(server.accept()[0])
                    if answer:
                        held[-1].sendall(answer)
                        held[-1].shutdown(socket.SHUT_WR)

        threading.Thread(target=accept, daemon=True).start()
        yield "127.0.0.1:%d" % server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
    for connection in held:
        connection.close()


class BadInputTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.scheduler = cls.enterClassContext(processes.Process(
            BINARY, "scheduler", "--listen", "127.0.0.1:0", "--lanes", "shm", "--max-workers", "3",
            "--lease-ms", "10000"))
        cls.address = cls.scheduler.wait_for(r"^listening on (\S+)").group(1)
        cls.at = ("--scheduler", cls.address, "--join-timeout", "0")
        attention = ("attention-worker", "--kv-capacity", "8MiB", "--threads", "1", "--lanes", "shm")
        for name in ("one", "two"):
            cls.enterClassContext(processes.Process(BINARY, *attention, "--name", name, "--scheduler", cls.address))
        cls.enterClassContext(processes.Process(BINARY, "compute-worker", MODEL, "--name", "compute", "--threads", "1",
                                                "--lanes", "shm", "--scheduler", cls.address))
        server = cls.enterClassContext(processes.Process(
            BINARY, "server", "--port", "0", "--ignore-model-name", "--shutdown-timeout", "1", "--scheduler",
            cls.address))
        cls.url = server.wait_for(r"^listening on (http://\S+)").group(1)
        for name in ("one", "two", "compute"):
            cls.scheduler.wait_for(rf"{name} serves as ")
        processes.wait_until_ready(cls.url)
        cls.expected = cls.say()

    @classmethod
    def say(cls):
        return "".join(processes.stream(cls.url, PROMPT, max_tokens=30))

    def tearDown(self):
        self.assertEqual(self.say(), self.expected, "the cluster serves on")
        self.assertEqual([line for line in self.scheduler.lines if "is out" in line and "joins" not in line
                          and any(name in line for name in ("one", "two", "compute"))], [])

    def refused(self, *arguments, saying):
        """It ends with one line that says all of `saying`; what else it says is information."""
        done = subprocess.run([BINARY, *arguments], capture_output=True, text=True, timeout=60, check=False)
        self.assertNotEqual(done.returncode, 0, done.stdout)
        lines = [line for line in done.stderr.splitlines() if not line.startswith("I ")]
        self.assertEqual(len(lines), 1, done.stderr)
        self.assertTrue(lines[0].startswith("dovetail: "), lines[0])
        for text in saying if isinstance(saying, tuple) else (saying,):
            self.assertIn(text, lines[0])

    def attention(self, *flags, lanes="shm", name="other", capacity="1MiB", at=None):
        return ("attention-worker", "--kv-capacity", capacity, "--name", name, "--lanes", lanes, "--threads", "1",
                *(at or self.at), *flags)

    def compute(self, model=None, *flags):
        return ("compute-worker", model or MODEL, "--name", "other", "--lanes", "shm", "--threads", "1", *self.at,
                *flags)

    def test_ports_that_are_taken_or_not_ours(self):
        taken = "cannot listen there; the port is taken by another process"
        self.refused("scheduler", "--listen", self.address, "--lanes", "shm",
                     saying=(f"--listen {self.address}: {taken}", "stop that one, or choose another port"))
        self.refused("scheduler", "--listen", "192.0.2.1:7100", "--lanes", "shm",
                     saying=("192.0.2.1 is no address of this host", "0.0.0.0 for all"))
        self.refused("scheduler", "--listen", "no-such-host.invalid:7100", "--lanes", "shm",
                     saying="the host name is not known; check its spelling")
        with listener() as other:
            self.refused("scheduler", "--listen", other, "--lanes", "shm", saying=f"--listen {other}: {taken}")
            port = other.rsplit(":", 1)[1]
            self.refused("server", "--scheduler", self.address, "--port", port,
                         saying=("Address already in use", "choose another --port"))
            self.refused("server", "--scheduler", self.address, "--port", "0", "--grpc-listen", other,
                         saying=f"--grpc-listen {other}: {taken}")
            self.refused(*self.attention("--data-devices", "lo", "--data-ports", f"{port}-{port}", lanes="tcp"),
                         saying=(f"--data-ports {port}-{port}: all of these are taken", "give a wider range"))

    def test_addresses_that_lead_nowhere_or_to_somebody_else(self):
        with socket.socket() as held:  # bound, not listening
            held.bind(("127.0.0.1", 0))
            silent = "127.0.0.1:%d" % held.getsockname()[1]
            for command in (self.attention(at=("--scheduler", silent, "--join-timeout", "0")),
                            ("status", "--scheduler", silent), ("drain", "one", "--scheduler", silent)):
                self.refused(*command, saying=(f"scheduler {silent}: cannot be reached", "is it running"))
        for address, text in (("127.0.0.1", "is no address; write HOST:PORT"),
                              ("no-such-host.invalid:7100", "the host name is not known; check its spelling")):
            self.refused(*self.attention(at=("--scheduler", address, "--join-timeout", "0")), saying=text)
        for answer in (b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n", b""):
            with listener(answer) as other:
                self.refused("status", "--scheduler", other, saying=(f"scheduler {other}: cannot be reached",
                                                                     "something answers there that is none"))
        http = self.url.removeprefix("http://")
        self.refused("status", "--scheduler", http, saying="something answers there that is none; check the port")

    def test_workers_that_join_twice_or_are_too_many(self):
        self.refused(*self.attention(name="one"),
                     saying="one: a worker of this name is a member; stop it, or give another --name")
        self.refused(*self.attention(), saying=("the cluster has its 3 members", "raise --max-workers"))
        self.refused("drain", "unknown", "--scheduler", self.address,
                     saying="no worker is named unknown; `dovetail status` lists them")

    def test_flags_of_a_scheduler_that_contradict_each_other(self):
        self.refused("scheduler", "--listen", "127.0.0.1:0", "--lanes", "shm", "--max-num-batched-tokens", "128",
                     saying=("--max-num-batched-tokens: 128 is less than --max-num-seqs 256",
                             "raise the one or lower the other"))

    def test_lanes_that_are_not_there(self):
        self.refused(*self.attention(lanes="rc"), saying=("--lanes rc: this host has no usable RDMA device",
                                                          "install or enable RDMA, or start every node with"))
        self.refused(*self.attention(lanes="foo"), saying="'foo' is none of any, shm, tcp, rc, cuda_ipc")
        self.refused(*self.attention("--data-devices", "eth77", lanes="tcp"), saying="on device eth77: No such device")

    def test_capacities_that_cannot_be(self):
        self.refused(*self.attention(capacity="100TiB"), saying=("--kv-capacity: 109951162777600 bytes are more than",
                                                                 "bytes of memory of this machine"))
        self.refused(*self.attention(capacity="0"), saying="a worker of no bytes holds no token")
        self.refused(*self.attention(capacity="lots"), saying="--kv-capacity: 'lots' is no size")

    def test_models_that_this_cluster_does_not_serve(self):
        text = ("brings the model stories260K-f32.gguf, but this cluster serves", "give it the same model and flags")
        self.refused(*self.compute(None, "--kv-cache-dtype", "float32"), saying=text)
        self.refused(*self.compute(None, "--dtype", "float32"), saying=text)
        self.refused(*self.compute(None, "--kv-cache-dtype", "int8"),
                     saying=("attends K and V int8, but this cluster's compute workers as sent",
                             "give it the same --kv-cache-dtype"))


class CapacityTest(unittest.TestCase):
    def test_a_worker_that_has_no_room_for_one_block_says_how_much_one_takes(self):
        with processes.Process(BINARY, "scheduler", "--listen", "127.0.0.1:0", "--lanes", "shm") as scheduler:
            address = scheduler.wait_for(r"^listening on (\S+)").group(1)
            with processes.Process(BINARY, "compute-worker", MODEL, "--name", "c", "--lanes", "shm", "--scheduler",
                                   address) as compute:
                compute.wait_for("c is compute worker")
                done = subprocess.run([BINARY, "attention-worker", "--kv-capacity", "1KiB", "--lanes", "shm",
                                       "--scheduler", address], capture_output=True, text=True, timeout=60, check=False)
                self.assertEqual(done.returncode, 1)
                self.assertIn("--kv-capacity: 1024 bytes hold no KV block; this model's have 3072 bytes",
                              done.stderr.splitlines()[-1])

    def test_a_worker_that_stores_k_and_v_otherwise_than_prompts_are_attended_is_refused(self):
        with processes.Process(BINARY, "scheduler", "--listen", "127.0.0.1:0", "--lanes", "shm") as scheduler:
            address = scheduler.wait_for(r"^listening on (\S+)").group(1)
            with processes.Process(BINARY, "compute-worker", MODEL, "--name", "c", "--lanes", "shm", "--scheduler",
                                   address, "--kv-cache-dtype", "int8_per_token_head") as compute:
                compute.wait_for("c is compute worker")
                done = subprocess.run([BINARY, "status", "--scheduler", address], capture_output=True, text=True,
                                      timeout=60, check=False)
                self.assertIn(", K and V in int8, ", done.stdout.splitlines()[0])
                done = subprocess.run([BINARY, "attention-worker", "--kv-capacity", "1MiB", "--lanes", "shm",
                                       "--scheduler", address, "--kv-cache-dtype", "fp8"],
                                      capture_output=True, text=True, timeout=60, check=False)
                self.assertEqual(done.returncode, 1)
                self.assertIn("--kv-cache-dtype fp8_e4m3: this cluster's compute workers attend K and V int8; start "
                              "them with --kv-cache-dtype fp8_e4m3, or this worker without the flag",
                              done.stderr.splitlines()[-1])
                done = subprocess.run([BINARY, "attention-worker", "--kv-capacity", "1KiB", "--lanes", "shm",
                                       "--scheduler", address], capture_output=True, text=True, timeout=60, check=False)
                self.assertIn("this model's have ", done.stderr.splitlines()[-1])
                self.assertNotIn("this model's have 3072 bytes", done.stderr.splitlines()[-1], "blocks of bfloat16")

    def test_8_bits_where_they_cannot_be_are_refused_before_anything_is_loaded(self):
        for flags, text in (
                (("up", HYBRID, "--kv-cache-dtype", "int8"),
                 "--kv-cache-dtype int8: not for models with linear states, which share the blocks; take bfloat16"),
                (("serve", HYBRID, "--device", "cpu", "--kv-cache-dtype", "fp8"),
                 "--kv-cache-dtype fp8_e4m3: not for models with linear states"),
                (("compute-worker", HYBRID, "--device", "cpu", "--lanes", "shm", "--scheduler", "127.0.0.1:9",
                  "--kv-cache-dtype", "int8"), "--kv-cache-dtype int8: not for models with linear states"),
                (("up", MODEL, "--kv-cache-dtype", "int8", "--attention-devices", "cpu,cuda:1"),
                 "--kv-cache-dtype int8: K and V in int8 lie on CPUs, and cuda:1 is a GPU; take fp8_e4m3 or bfloat16, "
                 "or attend on CPUs")):
            with self.subTest(flags=flags):
                done = subprocess.run([BINARY, *flags], capture_output=True, text=True, timeout=60, check=False)
                self.assertEqual(done.returncode, 1)
                self.assertIn(text, done.stderr.splitlines()[-1])
                self.assertNotIn("loaded ", done.stderr)

    def test_places_of_attention_in_one_process_that_cannot_be_are_refused(self):
        for flags, text in (
                (("cpu=1GiB,cpu=2GiB",), "--attention-device cpu=1GiB,cpu=2GiB: cpu is there twice"),
                (("cuda:0=1GiB,cpu=1GiB",), "cuda:0 is not where the layers run (cpu)"),
                (("cpu=",), "--attention-device: '' is no size"),
                (("gpu=1GiB",), "--attention-device: 'gpu' is neither cpu nor cuda:N"),
                (("cpu=8MiB", "--kv-cache-memory-bytes", "1GiB"), "leave --kv-cache-memory-bytes out"),
                (("cpu=8MiB", "--attention-workers", "2"), "leave --attention-workers out"),
                (("cpu=8MiB", "--placement", "heads"), "--placement heads would divide each sequence"),
                (("cpu=8MiB", "--compute-workers", "2"), "or for one on each GPU, and there are 2"),
                (("cpu=1KiB",), "--attention-device")):
            with self.subTest(flags=flags):
                done = subprocess.run([BINARY, "run", MODEL, "Once", "--device", "cpu", "--attention-device", *flags],
                                      capture_output=True, text=True, timeout=60, check=False)
                self.assertEqual(done.returncode, 1, done.stderr)
                self.assertIn(text, done.stderr.splitlines()[-1])
        texts = {flags: subprocess.run([BINARY, "run", MODEL, "Once", "--device", "cpu", "--temperature", "0",
                                        "--max-tokens", "20", *flags],
                                       capture_output=True, text=True, timeout=60, check=True).stdout
                 for flags in ((), ("--attention-device", "cpu=8MiB"))}
        self.assertEqual(len(set(texts.values())), 1, texts)

    def test_a_worker_that_holds_no_whole_sequence_is_named_when_it_joins_and_the_others_serve(self):
        with contextlib.ExitStack() as stack:
            def start(role, *flags):
                return stack.enter_context(processes.Process(BINARY, role, *flags))

            scheduler = start("scheduler", "--listen", "127.0.0.1:0", "--lanes", "shm")
            at = ("--lanes", "shm", "--threads", "1",
                  "--scheduler", scheduler.wait_for(r"^listening on (\S+)").group(1))
            start("compute-worker", HYBRID, "--name", "compute", *at)
            small = start("attention-worker", "--name", "small", "--kv-capacity", "64KiB", *at)
            said = (r"--kv-capacity: (\d+) KV blocks hold less than 128 tokens of a sequence of this model, which take "
                    r"(\d+), (\d+) of them for linear states \(at any length\); only parts of sequences may lie there: "
                    r"give it (\d+)KiB or more")
            small.wait_for(said)
            found = scheduler.wait_for("small: " + said)
            blocks, needed, states, kib = map(int, found.groups())
            self.assertLess(blocks, needed)
            self.assertLess(states, needed)
            start("attention-worker", "--name", "enough", "--kv-capacity", f"{kib}KiB", *at)
            scheduler.wait_for("enough serves as ")
            server = start("server", "--port", "0", "--ignore-model-name", "--shutdown-timeout", "1", *at[-2:])
            url = server.wait_for(r"^listening on (http://\S+)").group(1)
            processes.wait_until_ready(url)
            self.assertNotEqual("".join(processes.stream(url, "One day", max_tokens=20)), "")
            self.assertEqual([line for line in scheduler.lines if "enough: --kv-capacity" in line], [])


if __name__ == "__main__":
    if MODEL is None or not os.path.exists(MODEL):
        print("missing test data: models/stories260K/stories260K-f32.gguf")
        sys.exit(77)
    unittest.main(verbosity=2)
