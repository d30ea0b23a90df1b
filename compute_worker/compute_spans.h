#pragma once
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "base/span_sink.h"
#include "proto/step_plan.h"
#include "proto/traced_sequences.h"

namespace dovetail::compute {

// What a compute worker records of sequences whose traces are sampled: "compute.prefill" for its part of a prompt in a
// step (by rank of a prefill group), "compute.decode" by second. From the plan's arrival until its result is there.
// Without a sink, or while no such sequence is known, it does nothing.
// Threads: reactor-owned.
class ComputeSpans {
 public:
  explicit ComputeSpans(SpanSink* sink) : sink_(sink) {}  // null: none; outlives this

  void Trace(std::span<const std::byte> message);  // of a kTraceSequence frame
  void Begin(const proto::StepPlan& plan, absl::Time now);
  void End(const proto::StepResult& result, absl::Time now);

 private:
  struct Entry {
    TraceContext trace;
    Position ctx_len = 0;
    int64_t tokens = 0;
  };
  struct Step {
    StepId step;
    absl::Time began;
    proto::PrefillPart part;
    std::vector<Entry> entries;
  };

  void Record(const Step& step, const Entry& entry, const proto::StepResult& result, absl::Time now);

  SpanSink* const sink_;
  proto::TracedSequences traced_;
  std::vector<Step> steps_;  // by micro-batch; without entries: of no traced sequence
};

}  // namespace dovetail::compute
