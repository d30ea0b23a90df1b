#include "engine/measurements/prefill_rates.h"

#include <algorithm>
#include <cmath>

#include "scheduler/core/prefill_cost.h"

namespace dovetail::engine {
namespace {

constexpr int kPrompts = 2;  // the first one finds caches and pages cold

struct Line {
  double a = 0, b = 0;
};

// y = a x + b z by least squares, a and b at least 0.
Line FitLine(std::span<const PromptSample> samples) {
  double xx = 0, xz = 0, zz = 0, xy = 0, zy = 0;
  for (const PromptSample& s : samples) {
    xx += s.tokens * s.tokens;
    xz += s.tokens * s.here_flops;
    zz += s.here_flops * s.here_flops;
    xy += s.tokens * s.prompt_s;
    zy += s.here_flops * s.prompt_s;
  }
  const double determinant = xx * zz - xz * xz;
  Line line;
  if (determinant > 1e-9 * xx * zz) line = {(xy * zz - zy * xz) / determinant, (zy * xx - xy * xz) / determinant};
  if (line.a <= 0 || line.b <= 0) {  // one of them explains it better than both
    const bool by_flops = zz > 0 && line.a <= 0;
    line = by_flops ? Line{0, zy / zz} : Line{xx > 0 ? xy / xx : 0, 0};
  }
  return line;
}

}  // namespace

absl::StatusOr<PrefillRates> FitRates(std::span<const PromptSample> samples) {
  double tokens = 0, dense_s = 0, asked = 0, attention_s = 0;
  for (const PromptSample& sample : samples) {
    tokens += sample.tokens;
    dense_s += sample.dense_s;
    asked += sample.asked_flops;
    if (sample.asked_flops > 0) attention_s += sample.attention_s;
  }
  const Line line = FitLine(samples);
  const double token_s = tokens > 0 ? dense_s / tokens + line.a : 0;
  if (!(token_s > 0)) return FailedPrecondition("prompts took no time, so there are no rates");
  PrefillRates rates;
  rates.dense_tokens_per_s = 1 / token_s;
  if (line.b > 0) rates.attention_flops_per_s = 1 / line.b;
  if (asked > 0 && attention_s > 0) rates.attention_worker_flops_per_s = asked / attention_s;
  return rates;
}

absl::StatusOr<std::vector<PromptSample>> MeasurePromptSteps(Engine& engine, PromptSource& prompts,
                                                             const proto::AttentionTable& attention, int step_tokens,
                                                             uint32_t scratch_blocks) {
  std::vector<PromptSample> samples;
  for (int prompt = 0; prompt < kPrompts; ++prompt) {
    engine.TakeStepSamples();
    DT_RETURN_IF_ERROR(MeasurePrefill(engine, prompts, kPromptSteps * step_tokens).status());
    const std::vector<StepSample> steps = engine.TakeStepSamples();
    if (prompt + 1 < kPrompts) continue;
    scheduler::HeldTokens held;
    Position ctx_len = 0;
    for (const StepSample& step : steps) {
      if (ctx_len >= Position{kPromptSteps} * step_tokens) break;
      const scheduler::StepWork work =
          scheduler::WorkOf(attention, {.ctx_len = ctx_len,
                                        .tokens = step.new_tokens,
                                        .held = held,
                                        .scratch_blocks = scratch_blocks,
                                        .last = ctx_len + step.new_tokens >= Position{kPromptSteps} * step_tokens,
                                        .holds_state = ctx_len > 0});
      held = work.held;
      samples.push_back({.tokens = static_cast<double>(step.new_tokens),
                         .here_flops = work.here_flops,
                         .asked_flops = work.asked_flops,
                         .dense_s = static_cast<double>(step.dense_us) * 1e-6,
                         .prompt_s = static_cast<double>(step.prompt_us) * 1e-6,
                         .attention_s = static_cast<double>(step.attention_us) * 1e-6});
      ctx_len += step.new_tokens;
    }
  }
  return samples;
}

}  // namespace dovetail::engine
