#pragma once
#include <span>
#include <vector>

#include "base/clock.h"
#include "base/span_sink.h"
#include "proto/frame.h"
#include "proto/prefill_part.h"
#include "proto/traced_sequences.h"

namespace dovetail::attention {

// What an attention worker records of sequences whose traces are sampled: "attention.prefill" for its part of a step
// with tokens of a prompt, "attention.receive" for what a move brings, "attention.decode" by second. From the step's
// begin here until its last op is answered. Reads the frames that the node gives it; without a sink, or while no such
// sequence is known, it does nothing.
// Threads: reactor-owned.
class AttentionSpans {
 public:
  void SetSink(SpanSink* sink) { sink_ = sink; }  // outlives this

  void OnFrame(const proto::FrameHeader& header, std::span<const std::byte> payload, Clock& clock);

  // The op of that micro-batch's step is answered.
  void Worked(MicroBatchId micro_batch, int op, int op_count, absl::Time now);

 private:
  struct Entry {
    TraceContext trace;
    Position ctx_len = 0;
    int64_t tokens = 0;
    bool moves = false;
  };
  struct Step {
    absl::Time began, worked;
    proto::PrefillPart part;
    std::vector<Entry> entries;
  };

  void Begin(const proto::FrameHeader& header, std::span<const std::byte> payload, absl::Time now);
  void End(Step& step);

  SpanSink* sink_ = nullptr;
  proto::TracedSequences traced_;
  std::vector<Step> steps_;  // by micro-batch; without entries: of no traced sequence
};

}  // namespace dovetail::attention
