#pragma once
#include <cstdint>

#include "kernels/cuda/wire_type.h"

namespace dovetail::kernels::cuda {

// Parameters of element-wise kernels: device pointers, plain structs.
// Threads: plain values.

struct SampleOutput;  // sampling/sampling_args.h

struct EmbedLaunch {
  const void* table = nullptr;   // [vocab][size]
  const int32_t* ids = nullptr;  // -1 - i: the token of drawn[i]
  const SampleOutput* drawn = nullptr;
  void* out = nullptr;
  WireType table_type = WireType::kBF16;
  WireType out_type = WireType::kBF16;
  float factor = 1;
  int32_t rows = 0, size = 0;
};

// out = a_factor * a + b_factor * b, element by element.
struct CombineLaunch {
  const void* a = nullptr;
  const void* b = nullptr;  // or null
  void* out = nullptr;      // may be a or b
  WireType a_type = WireType::kF32, b_type = WireType::kF32, out_type = WireType::kF32;
  float a_factor = 1, b_factor = 1;
  int64_t count = 0;
};

// Random weights for measuring: evenly spread over -range .. range, the same for the same seed.
struct RandomLaunch {
  void* out = nullptr;
  WireType type = WireType::kBF16;
  float range = 1;
  uint64_t seed = 0;
  int64_t count = 0;
};

}  // namespace dovetail::kernels::cuda
