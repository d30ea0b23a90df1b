#pragma once
#include <cstdint>
#include <string>

#include "base/dtype.h"
#include "model/checkpoint.h"

namespace dovetail::model {

// Bytes that the KV cache of one sequence of `tokens` tokens holds, in `kv` elements: layers with a window keep at most
// that many tokens. Without rounding to KV blocks.
int64_t KvBytes(const ModelConfig& config, int64_t tokens, DType kv);

// Bytes of the linear states of one sequence in f32, whatever its length.
int64_t StateBytes(const ModelConfig& config);

// Weights of the model, counted once where embedding and output share them.
int64_t Parameters(const Checkpoint& checkpoint);

// What `dovetail inspect MODEL` prints: what the files hold (architecture, parameters, layers, rope, context,
// vocabulary, tokenizer, chat template, tensors by type) and what serving them needs (weights, KV cache per token and
// for 1k and 8k tokens in bfloat16), then the checkpoint's warnings. Ends with a newline. Reads the tokenizer's
// configuration from the folder of the weights. It never fails: a file that cannot be read is reported as absent.
// Threads: thread-safe; blocks on files.
std::string Describe(const Checkpoint& checkpoint);

}  // namespace dovetail::model
