#pragma once
#include <cstdint>

#include "kernels/cuda/wire_type.h"

namespace dovetail::kernels::cuda {

// Parameters of activations: device pointers, plain structs.
// Threads: plain values.

struct ActivationLaunch {
  const void* gate = nullptr;
  const void* up = nullptr;
  void* out = nullptr;
  int64_t gate_step = 0, up_step = 0, out_step = 0;
  WireType type = WireType::kBF16;
  int32_t gelu = 0;  // else SiLU
  int32_t rows = 0, size = 0;
};

enum class MlpKind : int32_t { kSilu = 0, kGeluTanh = 1, kClampedSwiglu = 2, kRelu2 = 3 };

// out = act(gate) * up; kRelu2: relu(up)^2 (activation.h).
struct MlpActivationLaunch {
  const void* gate_up = nullptr;  // [rows][2 size]: gate, then up; kRelu2: [rows][size]
  void* out = nullptr;            // [rows][size]
  WireType type = WireType::kBF16;
  MlpKind kind = MlpKind::kSilu;
  int32_t rows = 0, size = 0;
};

}  // namespace dovetail::kernels::cuda
