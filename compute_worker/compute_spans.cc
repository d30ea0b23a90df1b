#include "compute_worker/compute_spans.h"

#include <utility>

#include "proto/trace_frame.h"

namespace dovetail::compute {

namespace {
constexpr size_t kMostMicroBatches = 64;
}  // namespace

void ComputeSpans::Trace(std::span<const std::byte> message) {
  if (sink_ == nullptr) return;
  if (const auto traced = proto::Decode<proto::TraceSequence>(message); traced.ok() && traced->trace.sampled)
    traced_.Set(traced->sequence, traced->trace);
}

void ComputeSpans::Begin(const proto::StepPlan& plan, absl::Time now) {
  const size_t id = plan.micro_batch.value();
  if (traced_.empty() || id >= kMostMicroBatches) return;
  if (steps_.size() <= id) steps_.resize(id + 1);
  steps_[id] = {plan.step, now, plan.part, {}};
  for (const proto::StepEntry& entry : plan.entries)
    if (const TraceContext* const trace = traced_.Find(entry.sequence); trace != nullptr)
      steps_[id].entries.push_back({*trace, entry.ctx_len, static_cast<int64_t>(entry.tokens.size())});
}

void ComputeSpans::End(const proto::StepResult& result, absl::Time now) {
  const size_t id = result.micro_batch.value();
  if (id >= steps_.size() || steps_[id].step != result.step) return;
  for (const Entry& entry : std::exchange(steps_[id].entries, {})) Record(steps_[id], entry, result, now);
}

void ComputeSpans::Record(const Step& step, const Entry& entry, const proto::StepResult& result, absl::Time now) {
  const bool failed = result.status != proto::StepStatus::kOk;
  if (entry.tokens == 1 && !step.part.in_group() && !failed) {
    sink_->AddStep({.parent = entry.trace,
                    .name = "compute.decode",
                    .begin = step.began,
                    .end = now,
                    .tokens = 1,
                    .dense_us = result.timings.dense_us,
                    .attention_us = result.timings.attention_us});
    return;
  }
  Span span{.parent = entry.trace,
            .name = entry.tokens == 1 && !step.part.in_group() ? "compute.decode" : "compute.prefill",
            .begin = step.began,
            .end = now};
  span.attributes = {{"dovetail.tokens", entry.tokens},
                     {"dovetail.context_tokens", int64_t{entry.ctx_len}},
                     {"dovetail.dense_us", result.timings.dense_us},
                     {"dovetail.prompt_us", result.timings.prompt_us},
                     {"dovetail.attention_wait_us", result.timings.attention_wait_us}};
  if (step.part.in_group()) {
    span.attributes.push_back({"dovetail.rank", int64_t{step.part.rank}});
    span.attributes.push_back({"dovetail.ranks", int64_t{step.part.ranks}});
  }
  if (failed) span.error = result.error.empty() ? "the step was not done" : result.error;
  sink_->Add(std::move(span));
}

}  // namespace dovetail::compute
