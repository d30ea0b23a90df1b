#pragma once
#include <cstdint>
#include <span>

#include "base/status.h"
#include "kernels/op_context.h"

namespace dovetail::kernels {

inline constexpr int kMaxExperts = 1024;

// How a router's logits become scores.
enum class RouterScore : uint8_t {
  kSoftmax,          // over all experts
  kSigmoid,          // each for itself
  kSoftmaxOfChosen,  // the logits choose; softmax over the chosen ones
};

// Which experts serve a row, and with what weight.
struct RouteArgs {
  const float* logits = nullptr;          // [rows][experts]
  const float* selection_bias = nullptr;  // [experts], added to the scores for choosing only; or null
  RouterScore score = RouterScore::kSoftmax;
  bool renormalise = true;  // the chosen weights sum to 1 ..
  float scale = 1;          // .. and are multiplied by this
  int64_t rows = 0;
  int experts = 0;  // 1..kMaxExperts
  int chosen = 0;   // 1..experts
  // Experts lie in groups of equal size, of at least 2 where there are several. A row chooses from the chosen_groups
  // whose two best scores (with the bias) sum highest, of equals the lower; they must have enough. Source: DeepSeek-V3.
  int groups = 1, chosen_groups = 1;
  int32_t* expert = nullptr;  // [rows][chosen], best first; of equals the lower number
  float* weight = nullptr;    // [rows][chosen]
};

// Numbers: a row depends on its own logits only. NaN logits are chosen last and weigh NaN.
// Errors:  kInvalidArgument for null pointers and sizes outside the above.
// Threads: runs on the caller and the pool, returns when done; reentrant.
// Memory:  allocates nothing.
absl::Status Route(const OpContext& context, const RouteArgs& args);

// out[row] (+)= sum over s of weight[row][s] * parts[slot[row][s]].
// Numbers: s ascends, so the sum does not depend on which part was computed first.
// Errors:  kInvalidArgument for null pointers and sizes below 0.
// Threads: as Route.
struct CombineArgs {
  const float* parts = nullptr;   // [..][size]
  const int32_t* slot = nullptr;  // [rows][chosen]: row of parts
  const float* weight = nullptr;  // [rows][chosen]
  int64_t rows = 0;
  int chosen = 0;
  int64_t size = 0;
  float scale = 1;       // of the whole sum
  float* out = nullptr;  // [rows][size], added to
};
absl::Status CombineExperts(const OpContext& context, const CombineArgs& args);

}  // namespace dovetail::kernels
