#!/usr/bin/env python3
"""Makes the references in tests/data/goldens: tiny random checkpoints of what published goldens leave out, and what
transformers computes with them (float32, full passes, no cache).

    python3 tests/golden/make_goldens.py [NAME ..]

Needs torch, transformers 5.17 and safetensors. Each folder holds config.json and model.safetensors as save_pretrained
writes them (bf16, or MXFP4 blocks), golden.json (prompt_ids, greedy_ids, short_len) and golden.safetensors
(logits_last4, short_logits_last4, step_logits, hidden.<layer>).
"""
import hashlib, json, math, os, sys

V, PROMPT, SHORT, STEPS = 96, 77, 24, 32  # 77 crosses the 64 tokens of a block and windows of 16
BASE = dict(vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0,
            tie_word_embeddings=False)


def rope(kind="default", theta=10000.0, **more):
    return dict(rope_type=kind, rope_theta=theta, **more)


# transformers clamps Nemotron-H's step sizes to time_step_min, the original to time_step_limit; so small a minimum
# agrees with both.
NEMOTRON = {k: v for k, v in dict(
    BASE, head_dim=8, mamba_num_heads=4, mamba_head_dim=16, ssm_state_size=16, n_groups=2, conv_kernel=4, expand=2,
    chunk_size=16, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, moe_intermediate_size=32,
    moe_shared_expert_intermediate_size=48, use_mamba_kernels=False, time_step_min=1e-9).items()
    if k != "num_hidden_layers"}
FALCON = dict(BASE, head_dim=8, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=2, mamba_d_state=16,
              mamba_d_conv=4, mamba_chunk_size=16, rope_parameters=rope(theta=1e5))
FALCON_MULTIPLIERS = dict(
    embedding_multiplier=5.5, lm_head_multiplier=0.4, attention_in_multiplier=0.8, attention_out_multiplier=1.3,
    key_multiplier=0.6, ssm_in_multiplier=1.25, ssm_out_multiplier=0.7, ssm_multipliers=[0.9, 0.7, 1.4, 1.2, 0.8],
    mlp_multipliers=[1.5, 0.6])
MODELS = {
    "nemotron_h": ("NemotronH", dict(NEMOTRON, layers_block_type=["linear_attention", "mlp", "full_attention", "moe"])),
    # Experts behind a narrow projection; biases; two states in a row; a scaled router.
    "nemotron_h_latent": ("NemotronH", dict(
        NEMOTRON, layers_block_type=["moe", "linear_attention", "linear_attention", "full_attention"],
        moe_latent_size=16, use_bias=True, routed_scaling_factor=2.5, tie_word_embeddings=False)),
    # Two of four groups of four experts are looked at.
    "nemotron_h_groups": ("NemotronH", dict(
        NEMOTRON, layers_block_type=["moe", "linear_attention", "full_attention", "moe"], n_routed_experts=16,
        n_group=4, topk_group=2, num_experts_per_tok=3, routed_scaling_factor=1.5)),
    # Two value heads for each key head, and experts: some routed, one shared and gated.
    "qwen3_5_moe": ("Qwen3_5Moe", dict(
        {k: v for k, v in BASE.items() if k != "intermediate_size"}, head_dim=16, num_hidden_layers=4,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=8,
        linear_conv_kernel_dim=4, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24,
        shared_expert_intermediate_size=48, rope_parameters=rope(theta=1e4, partial_rotary_factor=0.25,
                                                                 mrope_section=[1, 1, 0]))),
    "falcon_h1_multipliers": ("FalconH1", dict(FALCON, **FALCON_MULTIPLIERS)),
    "falcon_h1_norm": ("FalconH1", dict(FALCON, mamba_rms_norm=True, mamba_norm_before_gate=False,
                                        mamba_conv_bias=False)),
    # No position embedding, and two value heads for each key head.
    "olmo_hybrid_nope": ("OlmoHybrid", dict(
        BASE, layer_types=["linear_attention"] * 3 + ["full_attention"], linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=12, linear_value_head_dim=8,
        rope_parameters=dict(rope_type="default", rope_theta=None))),
    "lfm2_bias": ("Lfm2", dict(BASE, layer_types=["conv", "full_attention", "conv", "conv"], conv_L_cache=4,
                               conv_bias=True, block_multiple_of=8, block_ffn_dim_multiplier=1.1,
                               tie_word_embeddings=True)),
    "gpt_oss_mxfp4": ("GptOss", dict(
        BASE, head_dim=16, intermediate_size=32, num_local_experts=4, num_experts_per_tok=2, sliding_window=16,
        layer_types=["sliding_attention", "full_attention"] * 2,
        rope_parameters=rope("yarn", 150000.0, factor=4.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
                             original_max_position_embeddings=64))),
}
FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def seed(*parts):
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:7], "little")


def prompt_of(name, attempt):
    x, ids = seed("prompt", name, attempt) & 0xFFFFFFFF, []
    while len(ids) < PROMPT:
        x = (1664525 * x + 1013904223) & 0xFFFFFFFF
        ids.append(3 + (x >> 8) % (V - 3))
    return ids


def randomise(torch, model, name):
    """Weights for which every term matters: norms off 1, biases off 0."""
    def values(key, p):
        g = torch.Generator().manual_seed(seed(name, key))
        shape, leaf = tuple(p.shape), key.split(".")[-1]
        normal = lambda: torch.randn(shape, generator=g)
        uniform = lambda low, high: low + (high - low) * torch.rand(shape, generator=g)
        if leaf == "A_log":
            return torch.log(uniform(0.5, 8.0))
        if leaf == "dt_bias":
            return uniform(-4.0, -1.0)
        if leaf == "D":
            return 1.0 + 0.3 * normal()
        if leaf == "sinks":
            return normal()
        if leaf.endswith("bias"):
            return 0.2 * normal()
        if p.dim() == 1:
            return (1.0 if float(p.detach().float().mean()) > 0.5 else 0.0) + 0.3 * normal()
        if "embed" in key:
            return normal()
        if p.dim() == 3 and min(shape) > 1:  # stacked experts
            return normal() * (2.0 / (shape[1] + shape[2])) ** 0.5
        gain = 1.5 if "q_proj" in key or "k_proj" in key else 2.0 if "lm_head" in key or ".gate.weight" in key else 1.0
        return gain * normal() / math.sqrt(shape[-1])

    seen = set()
    for key, p in model.named_parameters():
        if id(p) not in seen:
            seen.add(id(p))
            p.data.copy_(values(key, p).to(torch.bfloat16).to(p.dtype))
    for key, b in model.named_buffers():
        if "correction_bias" in key:
            g = torch.Generator().manual_seed(seed(name, key))
            b.data.copy_((0.1 * torch.randn(tuple(b.shape), generator=g)).to(torch.bfloat16).to(b.dtype))


def to_mxfp4(torch, weight):
    """[E, in, out] -> blocks [E, out, in / 32, 16], scales [E, out, in / 32], and the values that they stand for."""
    rows = weight.transpose(1, 2).reshape(weight.shape[0], weight.shape[2], -1, 32)
    exponent = torch.floor(torch.log2(rows.abs().amax(-1).clamp(min=1e-30))) - 2
    table = torch.tensor(FP4)
    codes = (rows.unsqueeze(-1) / torch.exp2(exponent)[..., None, None] - table).abs().argmin(-1)
    blocks = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
    scales = (exponent + 127).to(torch.uint8)
    back = table[codes] * torch.exp2(exponent)[..., None]
    return blocks, scales, back.reshape(weight.shape[0], weight.shape[2], -1).transpose(1, 2).contiguous()


def make(name, out):
    import torch, transformers
    from safetensors.torch import load_file, save_file
    family, kwargs = MODELS[name]
    torch.manual_seed(0)
    config_of = getattr(transformers, family + "TextConfig", None) or getattr(transformers, family + "Config")
    config = config_of(**kwargs)
    config._attn_implementation = "eager"
    model = getattr(transformers, family + "ForCausalLM")(config).to(torch.float32).eval()
    try:
        model.set_experts_implementation("eager")
    except Exception:
        pass
    randomise(torch, model, name)
    packed = {}
    if name.endswith("mxfp4"):
        for key, p in model.named_parameters():
            if key.endswith(("experts.gate_up_proj", "experts.down_proj")):
                blocks, scales, back = to_mxfp4(torch, p.data)
                packed[key] = {key + "_blocks": blocks, key + "_scales": scales}
                p.data.copy_(back)

    def run(ids, hidden=False):
        with torch.no_grad():
            return model(input_ids=torch.tensor([ids]), use_cache=False, output_hidden_states=hidden)

    for attempt in range(12):  # a prompt with a clear path that does not repeat itself
        prompt = prompt_of(name, attempt)
        ids, steps, margins = list(prompt), [], []
        for _ in range(STEPS):
            logits = run(ids).logits[0, -1].float()
            top = torch.topk(logits, 2).values
            margins.append(float(top[0] - top[1]))
            steps.append(logits)
            ids.append(int(logits.argmax()))
        if min(margins) > 2e-3 and len(set(ids[PROMPT:])) >= 6:
            break
    tensors = dict(logits_last4=run(prompt).logits[0, -4:], short_logits_last4=run(prompt[:SHORT]).logits[0, -4:],
                   step_logits=torch.stack(steps))
    for i, hidden in enumerate(run(prompt, hidden=True).hidden_states):
        tensors[f"hidden.{i}"] = hidden[0, -4:]
    assert all(bool(torch.isfinite(t).all()) for t in tensors.values())

    folder = os.path.join(out, name)
    os.makedirs(folder, exist_ok=True)
    model.save_pretrained(folder)
    path = os.path.join(folder, "model.safetensors")
    weights = {k: v.clone() for k, v in load_file(path).items()}
    for key, parts in packed.items():
        del weights[key]
        weights.update(parts)
    for key, value in weights.items():
        if value.dtype == torch.float32 and torch.equal(value.to(torch.bfloat16).float(), value):
            weights[key] = value.to(torch.bfloat16)
    save_file(weights, path, metadata={"format": "pt"})
    if packed:
        with open(os.path.join(folder, "config.json")) as file:
            written = json.load(file)
        written["quantization_config"] = {"quant_method": "mxfp4"}
        with open(os.path.join(folder, "config.json"), "w") as file:
            json.dump(written, file, indent=2)
    save_file({k: v.float().contiguous().clone() for k, v in tensors.items()},
              os.path.join(folder, "golden.safetensors"))
    with open(os.path.join(folder, "golden.json"), "w") as file:
        json.dump(dict(prompt_ids=prompt, greedy_ids=ids[PROMPT:], short_len=SHORT, min_margin=min(margins),
                       torch=torch.__version__, transformers=transformers.__version__), file)
    size = sum(os.path.getsize(os.path.join(folder, f)) for f in os.listdir(folder))
    print(f"{name:24s} {size / 1e3:7.0f} kB, smallest margin {min(margins):.4f}, {len(set(ids[PROMPT:]))} tokens")


def main():
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    here = os.path.dirname(os.path.abspath(__file__))
    for name in sys.argv[1:] or MODELS:
        make(name, os.path.join(here, "..", "data", "goldens"))


if __name__ == "__main__":
    main()
