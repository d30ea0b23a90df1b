#!/usr/bin/env python3
"""Random weights of a Llama shape as a folder that dovetail loads: what they compute is nonsense, how long it takes is
not.

  bench/split/shape.py OUT LAYERS HIDDEN HEADS KV_HEADS INTERMEDIATE TOKENIZER

TOKENIZER is a folder with tokenizer.json, tokenizer_config.json and a config.json that says how large the
vocabulary is, such as models/tales-hybrid. Needs numpy. The same weights every time.
"""
import json
import pathlib
import shutil
import sys

import numpy as np


def bf16(random, shape, scale):
    values = random.standard_normal(shape, dtype=np.float32) * np.float32(scale)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def tensors(layers, hidden, heads, kv_heads, intermediate, vocabulary):
    random = np.random.default_rng(1)
    head_dim = hidden // heads
    ones = np.full(hidden, 0x3F80, np.uint16)

    def matrix(rows, columns):
        return bf16(random, (rows, columns), columns**-0.5)

    yield "model.embed_tokens.weight", bf16(random, (vocabulary, hidden), 1)
    yield "lm_head.weight", matrix(vocabulary, hidden)
    yield "model.norm.weight", ones
    for layer in range(layers):
        at = f"model.layers.{layer}."
        yield at + "self_attn.q_proj.weight", matrix(heads * head_dim, hidden)
        yield at + "self_attn.k_proj.weight", matrix(kv_heads * head_dim, hidden)
        yield at + "self_attn.v_proj.weight", matrix(kv_heads * head_dim, hidden)
        yield at + "self_attn.o_proj.weight", matrix(hidden, heads * head_dim)
        yield at + "mlp.gate_proj.weight", matrix(intermediate, hidden)
        yield at + "mlp.up_proj.weight", matrix(intermediate, hidden)
        yield at + "mlp.down_proj.weight", matrix(hidden, intermediate)
        yield at + "input_layernorm.weight", ones
        yield at + "post_attention_layernorm.weight", ones


def write_safetensors(path, named):
    header, at = {}, 0
    for name, values in named.items():
        header[name] = {"dtype": "BF16", "shape": list(values.shape), "data_offsets": [at, at + values.nbytes]}
        at += values.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for values in named.values():
            file.write(values.tobytes())
    return at


def main():
    if len(sys.argv) != 8:
        raise SystemExit(__doc__)
    out, tokenizer = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[7])
    layers, hidden, heads, kv_heads, intermediate = map(int, sys.argv[2:7])
    vocabulary = json.loads((tokenizer / "config.json").read_text())["vocab_size"]
    out.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, out / name)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
              "intermediate_size": intermediate, "num_hidden_layers": layers, "num_attention_heads": heads,
              "num_key_value_heads": kv_heads, "head_dim": hidden // heads, "vocab_size": vocabulary,
              "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 8192,
              "tie_word_embeddings": False, "hidden_act": "silu",
              "bos_token_id": 0, "eos_token_id": 0, "torch_dtype": "bfloat16"}
    (out / "config.json").write_text(json.dumps(config, indent=1))
    size = write_safetensors(out / "model.safetensors",
                             dict(tensors(layers, hidden, heads, kv_heads, intermediate, vocabulary)))
    print(f"{out}: {size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
