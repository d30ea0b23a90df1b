#pragma once
#include <cstdint>

#include "kernels/cuda/wire_type.h"

namespace dovetail::kernels::cuda {

// Parameters of the kernels that join partial attention: device pointers, plain structs.
// Threads: plain values.

// Joins what token shards returned (merge_partials.h): row r of head h takes partials [first[r], first[r + 1]) of
// `order`.
struct MergeLaunch {
  const float* partial_o = nullptr;   // [nodes][heads][value_dim]
  const float* partial_ml = nullptr;  // [nodes][heads][2]
  const int32_t* first = nullptr;     // [rows + 1]
  const int32_t* order = nullptr;     // node numbers, row by row, from left to right
  const float* sinks = nullptr;       // [heads] or null
  void* o = nullptr;                  // [rows][heads][value_dim]
  int64_t o_row_step = 0;
  WireType o_type = WireType::kBF16;
  int32_t rows = 0, heads = 0, value_dim = 0;
};

}  // namespace dovetail::kernels::cuda
