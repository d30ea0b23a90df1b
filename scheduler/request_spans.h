#pragma once
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "base/span_sink.h"
#include "scheduler/core/events.h"

namespace dovetail::scheduler {

// What the scheduler records of requests whose traces are sampled: the queue, each part of a prompt that a compute
// worker takes in a step ("prefill", by rank of a prefill group), decoding by second, moves between attention workers,
// and failures. All are children of the server's span of the request. Bounded by the requests and steps that live.
// Without a sink it does nothing.
// Threads: reactor-owned, as the node that tells it what happens.
class RequestSpans {
 public:
  void SetSink(SpanSink* sink) { sink_ = sink; }  // outlives this

  void Arrived(const GenerationRequest& request, absl::Time now);
  void Opened(const TraceContext& trace, SequenceId sequence, WorkerId attention_worker, absl::Time now);
  void Released(SequenceId sequence) { sequences_.erase(sequence); }
  void StepSent(const RunStep& run, absl::Time now);
  void StepEnded(StepId step, const proto::StepResult* result, const std::string& error, absl::Time now);
  void MoveBegan(const MoveSequence& move, absl::Time now);
  void MoveEnded(const proto::SequenceMoved& moved, absl::Time now);
  void AttentionWorkerLost(WorkerId worker, absl::Time now);
  void ComputeWorkerLost(WorkerId worker, absl::Time now);
  void Updated(const GenerationUpdate& update, absl::Time now);

  // What a compute worker must be told of before the step: sequences of sampled traces that it has not been told of.
  struct Told {
    SequenceId sequence;
    TraceContext trace;
  };
  std::vector<Told> ToTell(const RunStep& run);

 private:
  struct Request {
    TraceContext trace;
    absl::Time arrived;
    bool queued = true;
  };
  struct TracedSequence {
    TraceContext trace;
    std::vector<WorkerId> attention_workers, told;  // told: compute workers
  };
  struct Entry {
    TraceContext trace;
    Position ctx_len = 0;
    int64_t tokens = 0;
    bool prompt = false;
  };
  struct Step {
    WorkerId compute_worker;
    absl::Time sent;
    proto::PrefillPart part;
    std::vector<Entry> entries;
  };
  struct MoveUnderWay {
    WorkerId from, to;
    absl::Time began;
    Position tokens = 0;
  };

  void Record(const Step& step, const Entry& entry, const proto::StepResult* result, const std::string& error,
              absl::Time now);
  void Fail(const TraceContext& trace, const std::string& error, absl::Time now);

  SpanSink* sink_ = nullptr;
  std::map<RequestId, Request> requests_;
  std::map<uint64_t, RequestId> by_span_;  // of the request's span
  std::map<SequenceId, TracedSequence> sequences_;
  std::map<StepId, Step> steps_;
  std::map<SequenceId, MoveUnderWay> moves_;
};

}  // namespace dovetail::scheduler
