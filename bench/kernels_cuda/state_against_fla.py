"""Times Dovetail's linear-state kernels and flash-linear-attention's (PyPI fla-core) in one run, in turn: 32 heads of
128 x 128, bf16 inputs, f32 state. For each shape: ours, theirs, ours, theirs, ..; medians of medians. Decode in a CUDA
graph; prefill of theirs both eager, as it is called, and in a graph.
   python3 bench/kernels_cuda/state_against_fla.py build/bench/kernels_cuda/state_cuda_bench [ROUNDS [WHAT]]
Their tuner compiles some hundred kernels one after the other. Several processes side by side can do that before, each
with every N-th of a family's; the run above then finds them in Triton's cache, and only times them:
   python3 bench/kernels_cuda/state_against_fla.py --compile FAMILY I N"""
import statistics
import subprocess
import sys

import torch
from triton.runtime.autotuner import Autotuner
from triton.testing import do_bench


def tune(first=0, step=1):
    """Of their choices every `step`-th; unless that is all, they are compiled only. Else each is timed for 20 ms."""
    whole = Autotuner.__init__

    def begin(self, fn, arg_names, configs, *more, **named):
        whole(self, fn, arg_names, configs[first::step] or configs[:1], *more, **named)
        self.cache_results = False
        if step > 1:
            self.do_bench = lambda call, quantiles: (call(), [1.0] * 3)[1]
        else:
            self.do_bench = lambda call, quantiles: do_bench(call, warmup=5, rep=20, quantiles=quantiles)
    Autotuner.__init__ = begin


tune(*map(int, sys.argv[3:5] if sys.argv[1] == "--compile" else ()))

from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from fla.ops.kda import chunk_kda, fused_recurrent_kda
from fla.ops.lightning_attn import chunk_lightning_attn, fused_recurrent_lightning_attn
from fla.ops.simple_gla import chunk_simple_gla, fused_recurrent_simple_gla

HEADS, DIM, DEVICE = 32, 128, "cuda"


def median_us(call, runs=21, warm_up_ms=20):
    begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
    times, warm = [], 0
    while len(times) < runs:
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        milliseconds = begin.elapsed_time(end)
        if warm >= warm_up_ms:
            times.append(1e3 * milliseconds)
        warm += milliseconds
    return statistics.median(times)


def graphed(call):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def inputs(batch, tokens):
    def random(*shape):
        return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)
    q, k, v = (random(batch, tokens, HEADS, DIM) for _ in range(3))
    k = torch.nn.functional.normalize(k.float(), dim=-1).bfloat16()
    decay = -torch.rand(batch, tokens, HEADS, device=DEVICE)
    rate = torch.rand(batch, tokens, HEADS, device=DEVICE).bfloat16()
    return q, k, v, decay, rate, -torch.rand(batch, tokens, HEADS, DIM, device=DEVICE)


def calls(x, state, decodes):
    q, k, v, decay, rate, decays = x
    more = dict(initial_state=state, output_final_state=True)
    of_layer = dict(layer_idx=3, num_layers=32)
    if decodes:
        return {"lightning": lambda: fused_recurrent_lightning_attn(q, k, v, **of_layer, **more),
                "simple": lambda: fused_recurrent_simple_gla(q, k, v, g=decay, **more),
                "gdn": lambda: fused_recurrent_gated_delta_rule(q, k, v, decay, beta=rate, **more),
                "kda": lambda: fused_recurrent_kda(q, k, v, decays, rate, **more)}
    return {"lightning": lambda: chunk_lightning_attn(q, k, v, **of_layer, output_final_state=True),
            "simple": lambda: chunk_simple_gla(q, k, v, g=decay, output_final_state=True),
            "gdn": lambda: chunk_gated_delta_rule(q, k, v, decay, rate, output_final_state=True),
            "kda": lambda: chunk_kda(q, k, v, decays, rate, output_final_state=True)}


def compile_family(family):
    with torch.no_grad():
        state = torch.randn(2, HEADS, DIM, DIM, device=DEVICE)
        calls(inputs(1, 4096), None, False)[family]()
        calls(inputs(2, 1), state, True)[family]()
    torch.cuda.synchronize()


def main():
    if sys.argv[1] == "--compile":
        return compile_family(sys.argv[2])
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    wanted = sys.argv[3] if len(sys.argv) > 3 else ""
    ours = subprocess.Popen([sys.argv[1], "--ask"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    print(ours.stdout.readline().strip(), torch.__version__)

    def ask(line):
        ours.stdin.write(line + "\n")
        ours.stdin.flush()
        return ours.stdout.readline().strip()

    def compare(shape, call, decodes):
        if wanted not in shape:
            return
        answers, eager, replayed = [], [], []
        try:
            replay = graphed(call)
        except RuntimeError as error:
            print(shape, "graph:", str(error)[:80])
            replay = None
        for _ in range(rounds):
            answers.append([float(x) for x in ask(shape).split()])
            if replay:
                replayed.append(median_us(replay))
            if not decodes:
                eager.append(median_us(call))
        us = [statistics.median(column) for column in zip(*answers)]
        theirs = statistics.median(replayed) if replayed else float("nan")
        line = f"{shape:24s} {us[0]:9.1f} us  theirs {theirs:9.1f} in a graph: {theirs / us[0]:5.2f}x"
        if eager:
            line += f"  eager {statistics.median(eager):9.1f}: {statistics.median(eager) / us[0]:5.2f}x"
        if len(us) > 1:
            line += "  (%.1f %.1f %.1f; %.1f)" % tuple(us[1:])
        print(line, flush=True)

    with torch.no_grad():
        print(ask("copy"))
        for batch, tokens in ((1, 4096), (1, 16384), (1, 65536), (8, 4096)):
            for name, call in calls(inputs(batch, tokens), None, False).items():
                compare(f"prefill {name} {batch} {tokens}", call, False)
        for batch in (256, 64, 16, 4, 1):
            state = torch.randn(batch, HEADS, DIM, DIM, device=DEVICE)
            for name, call in calls(inputs(batch, 1), state, True).items():
                compare(f"decode {name} {batch}", call, True)
    ours.stdin.close()
    ours.wait()


if __name__ == "__main__":
    main()
