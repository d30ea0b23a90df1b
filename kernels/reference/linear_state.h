#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/linear_state.h"

namespace dovetail::kernels::reference {

// The plain recurrence of kernels/linear_state.h in double precision, one token after the other.
// Threads: pure.
struct LinearStateTokens {
  int rows = 0;
  const float* q = nullptr;  // dense [rows][key_dim]
  const float* k = nullptr;
  const float* v = nullptr;          // [rows][value_dim]
  const float* log_decay = nullptr;  // [rows] or [rows][key_dim]
  const float* beta = nullptr;       // [rows]
  const float* b = nullptr;          // [rows][key_dim]
  const float* c = nullptr;
};

// state [key_dim][value_dim] is updated; returns o [rows][value_dim].
std::vector<double> LinearState(const LinearStateShape& shape, const LinearStateTokens& tokens,
                                std::vector<double>& state);

}  // namespace dovetail::kernels::reference
