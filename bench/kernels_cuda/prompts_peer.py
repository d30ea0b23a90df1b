"""The peer of prompts_cuda_bench: PyTorch's attention by cuDNN on dense, causal prompts, as microseconds a call."""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

for batch, tokens in [(1, 2048), (2, 1024), (1, 8192), (1, 1000), (1, 1984), (4, 4096), (1, 100), (1, 512), (8, 100)]:
    q = torch.randn(batch, tokens, 32, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    k, v = (torch.randn(batch, tokens, 8, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(2))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        times = []
        for _ in range(15):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(4):
                torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1000 / 4)
    us = sorted(times[3:])[6]
    flops = 4 * batch * 32 * 128 * tokens * (tokens + 1) / 2
    print(f"{batch:3d} x {tokens:5d} torch          {us:9.1f} us {flops / us * 1e-6:7.1f} TFLOP/s")
