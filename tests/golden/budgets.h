#pragma once
#include <ostream>

#include "base/dtype.h"
#include "model/loaded_model.h"

// How far our logits and hidden states may be from the references': relative RMS errors. About twice what was measured.

namespace dovetail::test {

// kF32: weights dequantised once to f32, K, V and the wire in f32. kBF16: weights, K, V and the wire in bf16.
enum class Path { kF32, kBF16 };

inline const char* Name(Path path) { return path == Path::kF32 ? "f32" : "bf16"; }

struct DenseBudget {
  const char* model;
  Path path;
  double logits, hidden;

  friend std::ostream& operator<<(std::ostream& out, const DenseBudget& budget) {
    return out << budget.model << " " << Name(budget.path);
  }
};

// The checkpoints' weights are bf16. Worst over both instruction sets, all prompts and all decode steps, times two;
// never above 1e-4 (f32) and 2e-2 (bf16).
inline constexpr DenseBudget kDenseBudgets[] = {
    {"gemma3", Path::kF32, 4.0e-7, 3.0e-7},          {"gemma3", Path::kBF16, 3.9e-3, 2.5e-3},
    {"llama3_gqa", Path::kF32, 1.7e-6, 1.7e-6},      {"llama3_gqa", Path::kBF16, 2e-2, 2e-2},
    {"llama_bias", Path::kF32, 1.5e-6, 1.4e-6},      {"llama_bias", Path::kBF16, 1.7e-2, 1.4e-2},
    {"llama_dynamic", Path::kF32, 2.3e-6, 1.3e-6},   {"llama_dynamic", Path::kBF16, 2.0e-2, 1.7e-2},
    {"llama_linear", Path::kF32, 1.9e-6, 1.8e-6},    {"llama_linear", Path::kBF16, 2e-2, 2.0e-2},
    {"llama_mha", Path::kF32, 1.5e-6, 1.4e-6},       {"llama_mha", Path::kBF16, 1.9e-2, 1.5e-2},
    {"llama_yarn", Path::kF32, 2.2e-6, 1.8e-6},      {"llama_yarn", Path::kBF16, 2e-2, 1.8e-2},
    {"mistral_swa", Path::kF32, 1.7e-6, 1.4e-6},     {"mistral_swa", Path::kBF16, 2e-2, 1.6e-2},
    {"phi3_longrope", Path::kF32, 1.1e-6, 1.1e-6},   {"phi3_longrope", Path::kBF16, 1.3e-2, 1.2e-2},
    {"phi4_partial", Path::kF32, 9.8e-7, 6.8e-7},    {"phi4_partial", Path::kBF16, 8.4e-3, 7.0e-3},
    {"qwen2_bias", Path::kF32, 1.5e-6, 1.2e-6},      {"qwen2_bias", Path::kBF16, 1.8e-2, 1.5e-2},
    {"qwen3_mixed_swa", Path::kF32, 1.1e-6, 8.7e-7}, {"qwen3_mixed_swa", Path::kBF16, 9.7e-3, 9.0e-3},
    {"qwen3_qknorm", Path::kF32, 1.2e-6, 9.6e-7},    {"qwen3_qknorm", Path::kBF16, 9.7e-3, 9.1e-3},
    {"smollm3", Path::kF32, 1.6e-6, 1.6e-6},         {"smollm3", Path::kBF16, 2e-2, 2e-2},
};

struct StoriesBudget {
  const char* name;
  const char* file;  // in models/stories260K
  Path path;
  double logits;

  friend std::ostream& operator<<(std::ostream& out, const StoriesBudget& budget) { return out << budget.file; }
};

inline constexpr StoriesBudget kStoriesBudgets[] = {
    {"hf", "hf", Path::kF32, 6.4e-7},
    {"hf", "hf", Path::kBF16, 7.3e-3},
    {"gguf_f32", "stories260K-f32.gguf", Path::kF32, 6.4e-7},
    {"gguf_f16", "stories260K-f16.gguf", Path::kBF16, 7.4e-3},
};

struct SmolLm2Budget {
  model::WeightFormat weights;
  DType kv;
  double logits;
  int least_certain;  // tokens that the reference is certain about and ours reach, over the cases
};

// Over the four chats and the long text. The file holds Q4_1 and Q8_0, so rounding weights to bf16 is an error of its
// own.
inline constexpr SmolLm2Budget kSmolLm2F32 = {model::WeightFormat::kF32, DType::kF32, 1.2e-5, 64};
inline constexpr SmolLm2Budget kSmolLm2KvBF16 = {model::WeightFormat::kF32, DType::kBF16, 2e-2, 60};
inline constexpr SmolLm2Budget kSmolLm2BF16 = {model::WeightFormat::kBF16, DType::kBF16, 2e-2, 60};
// kAuto computes directly on the blocks: the first as served by default, the second without the error of bf16 K, V
// and wire.
inline constexpr SmolLm2Budget kSmolLm2Direct = {model::WeightFormat::kAuto, DType::kBF16, 5e-2, 60};
inline constexpr SmolLm2Budget kSmolLm2DirectF32 = {model::WeightFormat::kAuto, DType::kF32, 5e-2, 60};

// Directly on random blocks of each type against dequantised ones: what quantising activations costs.
inline constexpr double kDirectOnRandomBlocks = 5e-2;

}  // namespace dovetail::test
