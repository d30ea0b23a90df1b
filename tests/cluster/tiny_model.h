#pragma once
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "model/formats/ggml_types.h"

// Random models small enough to be run by the hundred, written as GGUF. The same spec gives the same file.

namespace dovetail::test {

struct TinyModelSpec {
  std::string architecture =
      "llama";  // or "gemma3": every other layer sees a window only, norms on q and k and after each block
  int layers = 2;
  int heads = 4, kv_heads = 2, head_dim = 16;
  int hidden = 64, mlp = 96;
  int vocab = 97;
  int window = 0;  // gemma3
  int positions = 1024;
  // Of q, k, v, o, gate, up, down and head, by turns; everything else is f32. Quantised types need sizes in whole
  // blocks.
  std::vector<model::GgmlType> types = {model::GgmlType::kF32};
  uint64_t seed = 1;
};

// Weights of a variance that keeps activations near 1, norms around 1. Quantised blocks hold random codes and fitting
// scales.
std::filesystem::path WriteTinyModel(const TinyModelSpec& spec, const std::filesystem::path& folder);

}  // namespace dovetail::test
