#include "attention_worker/attention_spans.h"

#include <utility>

#include "proto/link_frames.h"
#include "proto/sequence_frames.h"
#include "proto/trace_frame.h"

namespace dovetail::attention {

using proto::FrameType;

namespace {
constexpr size_t kMostMicroBatches = 64;  // of those that move sequences, too
}  // namespace

void AttentionSpans::OnFrame(const proto::FrameHeader& header, std::span<const std::byte> payload, Clock& clock) {
  if (sink_ == nullptr) return;
  if (header.type == proto::kTraceSequence) {
    if (const auto traced = proto::Decode<proto::TraceSequence>(payload); traced.ok() && traced->trace.sampled)
      traced_.Set(traced->sequence, traced->trace);
    return;
  }
  if (traced_.empty()) return;
  if (header.type == FrameType::kReleaseSequence) {
    if (const auto released = proto::Decode<proto::ReleaseSequence>(payload); released.ok())
      traced_.Forget(released->sequence);
  } else if (header.type == FrameType::kStepBegin || header.type == proto::kStepBeginOnDevice) {
    Begin(header, payload, clock.Now());
  }
}

void AttentionSpans::Begin(const proto::FrameHeader& header, std::span<const std::byte> payload, absl::Time now) {
  if (header.micro_batch >= kMostMicroBatches) return;
  if (steps_.size() <= header.micro_batch) steps_.resize(header.micro_batch + 1u);
  Step& step = steps_[header.micro_batch];
  End(step);  // its last op was not of this worker
  const auto begin = proto::Decode<proto::StepBegin>(payload);
  if (!begin.ok()) return;
  step.began = step.worked = now;
  step.part = begin->part;
  for (const proto::StepBeginEntry& entry : begin->entries)
    if (const TraceContext* const trace = traced_.Find(entry.sequence); trace != nullptr)
      step.entries.push_back({*trace, entry.ctx_len, entry.q_len, entry.fill_end > 0});
}

void AttentionSpans::Worked(MicroBatchId micro_batch, int op, int op_count, absl::Time now) {
  if (micro_batch.value() >= steps_.size() || steps_[micro_batch.value()].entries.empty()) return;
  Step& step = steps_[micro_batch.value()];
  step.worked = now;
  if (op == op_count - 1) End(step);
}

void AttentionSpans::End(Step& step) {
  for (const Entry& entry : std::exchange(step.entries, {})) {
    if (!entry.moves && entry.tokens == 1 && !step.part.in_group()) {
      sink_->AddStep(
          {.parent = entry.trace, .name = "attention.decode", .begin = step.began, .end = step.worked, .tokens = 1});
      continue;
    }
    Span span{.parent = entry.trace,
              .name = entry.moves ? "attention.receive" : "attention.prefill",
              .begin = step.began,
              .end = step.worked};
    span.attributes = {{"dovetail.tokens", entry.tokens}, {"dovetail.context_tokens", int64_t{entry.ctx_len}}};
    if (step.part.in_group()) {
      span.attributes.push_back({"dovetail.rank", int64_t{step.part.rank}});
      span.attributes.push_back({"dovetail.ranks", int64_t{step.part.ranks}});
    }
    sink_->Add(std::move(span));
  }
}

}  // namespace dovetail::attention
