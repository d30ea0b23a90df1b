#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "engine/engine.h"
#include "engine/measurements/engine_measurements.h"
#include "proto/attention_spec.h"

// Rates of this machine's workers for prompts, from the times of steps and the work that was in them.

namespace dovetail::engine {

inline constexpr int kPromptSteps = 4;  // of a prompt that is measured

struct PrefillRates {                       // 0: nothing to measure it by
  double dense_tokens_per_s = 0;            // dense layers and linear attention of a compute worker
  double attention_flops_per_s = 0;         // softmax attention on a compute worker
  double attention_worker_flops_per_s = 0;  // and on an attention worker
};

// One step of a prompt.
struct PromptSample {
  double tokens = 0, here_flops = 0, asked_flops = 0;  // scheduler::StepWork
  double dense_s = 0, prompt_s = 0, attention_s = 0;   // proto::StepTimings
};

// Time on the compute worker is dense_s, and prompt_s = a tokens + b here_flops by least squares; a is linear
// attention, and never less than 0. Attention workers take attention_s for asked_flops. kFailedPrecondition: no step
// took any time.
// Threads: pure.
absl::StatusOr<PrefillRates> FitRates(std::span<const PromptSample> samples);

// Prompts of four steps of `step_tokens`, as an engine on CPUs takes them. `engine` is otherwise idle, has one compute
// worker with `scratch_blocks` of prompt scratch (compute_worker/prompt_scratch_size.h), and no prefix cache.
// Threads: one measurement of an engine at a time.
absl::StatusOr<std::vector<PromptSample>> MeasurePromptSteps(Engine& engine, PromptSource& prompts,
                                                             const proto::AttentionTable& attention, int step_tokens,
                                                             uint32_t scratch_blocks);

}  // namespace dovetail::engine
