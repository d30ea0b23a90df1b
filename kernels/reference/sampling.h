#pragma once
#include <span>
#include <vector>

#include "kernels/sampling.h"

namespace dovetail::kernels::reference {

// sampling.h by full sorts and plain loops in double precision. Arguments must satisfy sampling.h's checks.
// Threads: pure.
struct Distribution {
  std::vector<double> z;      // processed logits over temperature; -inf where banned (greedy: the processed logits)
  std::vector<int32_t> kept;  // ids that can be drawn, ascending
};
Distribution Process(std::span<const float> logits, const SamplingParams& params);

int32_t Sample(std::span<const float> logits, const SamplingParams& params, int64_t position);

// Log-softmax of the logits.
std::vector<double> Logprobs(std::span<const float> logits);

}  // namespace dovetail::kernels::reference
