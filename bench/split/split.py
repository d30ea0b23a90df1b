#!/usr/bin/env python3
"""Splits a model over processes of this machine and measures what that costs, and what each idea of the split is worth.

  bench/split/split.py MODEL                       everything below, one table
  bench/split/split.py MODEL embedded              one process on the same cores
  bench/split/split.py MODEL split                 scheduler, compute worker and attention workers over shm
  bench/split/split.py MODEL q-first               q sent before k and v are computed: on, off
  bench/split/split.py MODEL micro-batches         1, 2, 3 steps in flight, and as many as measured times ask for
  bench/split/split.py MODEL placement             sequences whole on a worker, by heads, by tokens
  bench/split/split.py MODEL hand-over             K and V of prompts layer by layer, or at the end of a step
  bench/split/split.py MODEL prompts               prompts attended by the compute worker, or on attention workers
  bench/split/split.py MODEL prefill-beside-decode decoding while prompts are read one after the other, both ways

Each process is pinned: --compute-cores for the compute worker, --attention-cores for each attention worker, and one
more for the scheduler and the client. `embedded` gets all of the workers' cores. Times mean something only where every
process has cores of its own; on fewer cores the script says so and goes on.
"""
import argparse
import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


class Cluster:
    """The roles of a cluster as pinned processes; ends them when left."""

    def __init__(self, options, scheduler=(), compute=(), trace=""):
        self.options, self.scheduler_flags, self.compute_flags, self.trace = options, scheduler, compute, trace
        self.processes = []

    def start(self, role, cores, *flags):
        command = [self.options.binary, role, *flags]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                   preexec_fn=lambda: os.sched_setaffinity(0, cores))
        self.processes.append(process)
        return process

    def __enter__(self):
        o = self.options
        compute, attention, rest = o.sets
        scheduler = self.start("scheduler", rest, "--listen", "127.0.0.1:0", "--lanes", o.lanes,
                               "--max-num-batched-tokens", str(o.step_tokens),
                               *(self.scheduler_flags or ("--micro-batches", str(o.micro_batches))))
        self.lines = []
        self.address = self.wait(scheduler, "listening on ")

        def traced(name):
            return ["--trace-file", f"{self.trace}.{name}"] if self.trace else []

        self.start("compute-worker", compute, o.model, "--name", "compute", "--scheduler", self.address, "--lanes",
                   o.lanes, "--threads", str(len(compute)), *traced("compute"), *self.compute_flags)
        for i, cores in enumerate(attention):
            self.start("attention-worker", cores, "--name", f"attention-{i + 1}", "--scheduler", self.address,
                       "--lanes", o.lanes, "--kv-capacity", o.kv_capacity, "--threads", str(len(cores)),
                       *traced(f"attention-{i + 1}"))
        serving = 0
        for line in scheduler.stdout:
            if " is out: " in line:
                self.__exit__()
                raise SystemExit("the cluster does not start: " + line.strip())
            serving += " serves as " in line
            if serving == 1 + len(attention):
                return self
        raise SystemExit("the cluster does not start; run the roles by hand to see why")

    def wait(self, process, marker):
        for line in process.stdout:
            if line.startswith(marker):
                return line[len(marker):].strip()
        raise SystemExit("the scheduler does not start: " + " ".join(process.args))

    def __exit__(self, *_):
        for process in reversed(self.processes):
            process.terminate()
        for process in self.processes:
            try:
                process.communicate(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
        if self.trace:
            join_traces(self.trace)


def join_traces(path):
    """Chrome reads an array that is not closed, so files are joined by leaving out all but the first bracket."""
    parts = sorted(pathlib.Path(path).parent.glob(pathlib.Path(path).name + ".*"))
    text = "[\n" + "".join(part.read_text().removeprefix("[\n") for part in parts)
    pathlib.Path(path).write_text(text)
    for part in parts:
        part.unlink()


def bench_command(o, *flags, prompt=None, batch=None, repeat=None):
    return [o.binary, "bench", o.model, "--json", "--repeat", str(repeat or o.repeat), "--prompt-tokens",
            str(o.prompt if prompt is None else prompt), "--output-tokens", "0" if batch is not None else str(o.output),
            "--batch", str(o.batch if batch is None else batch), "--batch-prompt-tokens", str(o.context),
            "--batch-output-tokens", str(o.output), "--max-num-batched-tokens", str(o.step_tokens), *flags]


def run(o, command, cores):
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, preexec_fn=lambda: os.sched_setaffinity(0, cores))
    if done.returncode != 0:
        raise SystemExit("failed: " + " ".join(command))
    return json.loads(done.stdout)["measurements"]


def measure(o, name, scheduler=(), compute=()):
    trace = str(pathlib.Path(o.trace) / (name.replace(" ", "-") + ".json")) if o.trace else ""
    with Cluster(o, scheduler, compute, trace) as cluster:
        rows = run(o, bench_command(o, "--scheduler", cluster.address), o.sets[2])
    show(name, rows)
    return rows


def embedded(o):
    cores = o.sets[0].union(*o.sets[1])
    rows = run(o, bench_command(o, "--threads", str(len(cores)), "--attention-workers", str(len(o.sets[1])),
                                "--micro-batches", str(o.micro_batches)), cores)
    show("embedded, same cores", rows)
    return rows


def show(name, rows):
    for row in rows:
        s, speed = row["steps"], row["tokens_per_s"]
        tokens = max(1, s["new_tokens"])
        parts = [s[k] / tokens for k in ("dense_us", "prompts_us", "attention_us", "wire_us", "sample_us", "bubble_us")]
        print(f"{name:<28} {row['name']:<34} {speed['median']:>9.1f} {speed['min']:>9.1f} {speed['max']:>9.1f} "
              f"{s['total_us'] / tokens:>9.1f} " + " ".join(f"{p:>9.1f}" for p in parts), flush=True)
        if "beside" in row:
            print(f"{'':<28} {'  prompts beside it':<34} {row['beside']['tokens_per_s']:>9.1f}", flush=True)


def header():
    names = ["tok/s", "min", "max", "us/token", "dense", "prompts", "attention", "wire", "sample", "bubble"]
    print(f"{'variant':<28} {'measurement':<34} " + " ".join(f"{n:>9}" for n in names))


def split(o):
    measure(o, "split")


def q_first(o):
    measure(o, "q first")
    measure(o, "q with k and v", compute=["--no-q-first"])


def micro_batches(o):
    for n in (1, 2, 3, 0):
        measure(o, f"micro-batches {n or 'measured'}", scheduler=["--micro-batches", str(n)])


def placement(o):
    for how in ("request", "heads", "tokens"):
        measure(o, f"placement by {how}",
                scheduler=["--placement", how, "--micro-batches", str(o.micro_batches)])


def hand_over(o):
    for when in ("layers", "end"):
        measure(o, f"hand-over: {when}", compute=["--hand-over", when])


def prompts(o):
    measure(o, "prompts on compute worker")
    measure(o, "prompts on attention", compute=["--prompt-scratch", "0"])


def prefill_beside_decode(o):
    for name, how in (("prompts on compute worker", []), ("prompts on attention", ["--prompt-scratch", "0"])):
        with Cluster(o, compute=how) as cluster:
            at = ("--scheduler", cluster.address)
            show(name + ", quiet", run(o, bench_command(o, *at, prompt=0, batch=o.batch), o.sets[2]))
            flags = ("--beside-prompt-tokens", str(o.prompt))
            show(name + ", beside", run(o, bench_command(o, *at, *flags, prompt=0, batch=o.batch), o.sets[2]))


COMMANDS = {"embedded": embedded, "split": split, "q-first": q_first, "micro-batches": micro_batches,
            "placement": placement, "hand-over": hand_over, "prompts": prompts,
            "prefill-beside-decode": prefill_beside_decode}


def core_sets(o):
    """Cores of the compute worker, of each attention worker, and of everything else."""
    have = sorted(os.sched_getaffinity(0))
    need = o.compute_cores + o.attention_workers * o.attention_cores + 1
    if len(have) < need:
        print(f"# {need} cores are asked for, {len(have)} are here: processes share them, times mean little",
              file=sys.stderr)
    at = iter(range(need))

    def take(n):
        return {have[next(at) % len(have)] for _ in range(n)}

    return take(o.compute_cores), [take(o.attention_cores) for _ in range(o.attention_workers)], take(1)


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("what", nargs="?", choices=[*COMMANDS, "all"], default="all")
    parser.add_argument("--binary", default=str(ROOT / "build" / "dovetail"))
    parser.add_argument("--lanes", default="shm")
    parser.add_argument("--attention-workers", type=int, default=3)
    parser.add_argument("--compute-cores", type=int, default=8)
    parser.add_argument("--attention-cores", type=int, default=2, help="of each attention worker")
    parser.add_argument("--kv-capacity", default="1GiB", help="of each attention worker")
    parser.add_argument("--batch", type=int, default=16, help="sequences decoded together")
    parser.add_argument("--context", type=int, default=512, help="prompt tokens of each of them")
    parser.add_argument("--output", type=int, default=64, help="tokens measured of each of them")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of the prefill measurement")
    parser.add_argument("--step-tokens", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--micro-batches", type=int, default=0, help="of all but the command of that name; 0: measured")
    parser.add_argument("--trace", default="", help="a folder for a Chrome trace of each variant")
    return parser.parse_args()


if __name__ == "__main__":
    options = parse()
    options.sets = core_sets(options)
    header()
    for command in COMMANDS if options.what == "all" else [options.what]:
        COMMANDS[command](options)
