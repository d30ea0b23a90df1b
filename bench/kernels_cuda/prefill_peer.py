"""The peer of prefill_cuda_bench: PyTorch's attention by cuDNN on dense, causal prompts, microseconds a call. Ragged
prompts are attended one after the other, each by the plan of its length."""

import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

RAGGED = [50 + i * 37 % 64 * 1950 // 63 for i in range(64)]
SHAPES = [("square 2048", [2048], 32, 8, 128), ("square 8192", [8192], 32, 8, 128),
          ("square 32768", [32768], 32, 8, 128), ("square 131072", [131072], 32, 8, 128),
          ("ragged 64x50..2000", RAGGED, 32, 8, 128), ("1 x 1000", [1000], 32, 8, 128),
          ("1 x 512", [512], 32, 8, 128), ("1 x 100", [100], 32, 8, 128), ("8192 d64", [8192], 32, 8, 64),
          ("8192 d80", [8192], 32, 8, 80), ("8192 d96", [8192], 32, 8, 96), ("8192 d256", [8192], 16, 4, 256),
          ("8192 mha", [8192], 16, 16, 128)]

for name, lengths, heads, kv_heads, dim in SHAPES:
    if len(sys.argv) > 1 and name not in sys.argv[1:]:
        continue
    prompts = [[torch.randn(1, tokens, count, dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
                for count in (heads, kv_heads, kv_heads)] for tokens in lengths]
    calls = 4 if max(lengths) <= 8192 else 1
    times = []
    try:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            for _ in range(11):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                for _ in range(calls):
                    for q, k, v in prompts:
                        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
                end.record()
                torch.cuda.synchronize()
                times.append(begin.elapsed_time(end) * 1000 / calls)
    except RuntimeError as error:
        print(f"{name:22s} refused: {str(error).splitlines()[0]}")
        continue
    us = sorted(times[2:])[4]
    flops = sum(4 * heads * dim * tokens * (tokens + 1) / 2 for tokens in lengths)
    print(f"{name:22s} {us:10.1f} us {flops / us * 1e-6:7.1f} TFLOP/s (torch, cuDNN)", flush=True)
