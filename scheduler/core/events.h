#pragma once
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/time/time.h"
#include "base/ids.h"
#include "proto/attention_spec.h"
#include "proto/block_hash.h"
#include "proto/cache_frames.h"
#include "proto/placement.h"
#include "proto/sequence_frames.h"
#include "proto/step_plan.h"
#include "requests/cache_events.h"
#include "requests/generation.h"

// Everything that can happen to the scheduler, and everything it can ask for.
// Threads: plain values.

namespace dovetail::scheduler {

using requests::FinishReason;
using requests::GenerationRequest;
using requests::GenerationUpdate;
using requests::kMaxChoices;

// ---- events ----

struct RequestArrived {
  std::shared_ptr<const GenerationRequest> request;
};
struct RequestCancelled {  // the client has left: ends all its choices as kCancelled, frees their KV within a step
  RequestId request;
};
struct ChoiceStopped {  // the server found a stop string: ends the choice as kStop; later tokens of it are dropped
  RequestId request;
  int choice = 0;
};
struct RequestPaused {  // the reader is slow: keep its KV, plan no steps for it
  RequestId request;
};
struct RequestResumed {
  RequestId request;
};
struct AttentionWorkerJoined {
  WorkerId worker;
  Epoch epoch;
  uint64_t kv_blocks = 0;  // capacity in KvBlocks: 64 tokens x one KV head x one attention op
  double rate = 1;         // how fast it reads KV, in any unit that is the same for all
  // The compute worker on its GPU, in one process with it: a pair. A step of sequences that lie whole on the one is
  // fastest on the other.
  std::optional<WorkerId> pair = std::nullopt;
};
struct AttentionWorkerLost {  // what lay on it is lost: its sequences begin again elsewhere, from the token log
  WorkerId worker;
  Epoch epoch;
};
struct AttentionWorkerDraining {  // gets nothing new, and what it has moves to others; SchedulerCore::HoldsNothing says
                                  // when it may go
  WorkerId worker;
  Epoch epoch;
};
struct ComputeWorkerJoined {
  WorkerId worker;
  bool leaves_states = false;  // linear layers of prompts run there, and of their states it leaves proto::StatesLeft
  int kind = 0;                // workers of a kind compute the same bits; only these prefill a prompt together
};
struct ComputeWorkerLost {  // its steps are repeated by another
  WorkerId worker;
};
struct ComputeWorkersLinked {  // two of them that have joined reach each other, or do no longer
  WorkerId one, other;
  bool linked = true;
};
struct SequenceOpened {  // answer to OpenSequence and ForkSequence
  WorkerId worker;
  Epoch epoch;
  proto::SequenceOpened opened;
};
struct PrefixProbed {
  WorkerId worker;
  Epoch epoch;
  proto::PrefixProbed probed;
};
struct SequenceMoved {  // answer to MoveSequence
  WorkerId worker;
  Epoch epoch;
  proto::SequenceMoved moved;
};
struct CacheChanged {  // what the worker's prefix cache gained and lost
  WorkerId worker;
  Epoch epoch;
  proto::CacheChanged changed;
};
struct StepFinished {
  WorkerId compute_worker;
  proto::StepResult result;
};
struct StepUnreadable {  // its result came, but cannot be read: it is repeated, by another worker where there is one
  WorkerId compute_worker;
  StepId step;
  MicroBatchId micro_batch;
  std::string error;
};
struct Tick {};

using Event = std::variant<RequestArrived, RequestCancelled, ChoiceStopped, RequestPaused, RequestResumed,
                           AttentionWorkerJoined, AttentionWorkerLost, AttentionWorkerDraining, ComputeWorkerJoined,
                           ComputeWorkerLost, ComputeWorkersLinked, SequenceOpened, PrefixProbed, SequenceMoved,
                           CacheChanged, StepFinished, StepUnreadable, Tick>;

// ---- actions ----

struct OpenSequence {
  WorkerId worker;
  Epoch epoch;
  proto::OpenSequence message;
  TraceContext trace;  // of the request
};
struct ForkSequence {
  WorkerId worker;
  Epoch epoch;
  proto::ForkSequence message;
  TraceContext trace;
};
struct ReleaseSequence {
  WorkerId worker;
  Epoch epoch;
  proto::ReleaseSequence message;
};
struct ProbePrefix {
  WorkerId worker;
  Epoch epoch;
  proto::PrefixProbe message;
};
struct Unpin {
  WorkerId worker;
  Epoch epoch;
  proto::Unpin message;
};
struct MoveSequence {  // to the giver; the shell fills in the taker's node
  WorkerId worker;
  Epoch epoch;
  WorkerId to;
  proto::MoveSequence message;
};
struct RunStep {
  WorkerId compute_worker;
  proto::StepPlan plan;
};
struct WithdrawStep {  // its result is not wanted any more; it comes all the same
  WorkerId compute_worker;
  StepId step;
  MicroBatchId micro_batch;
};
struct DismissComputeWorker {  // it gave no result in time, and is lost as far as the core is concerned
  WorkerId worker;
  std::string why;
};
struct EmitUpdate {  // already in the token log: may be shown
  GenerationUpdate update;
};
struct EmitCacheEvents {  // what all attention workers together can find has changed
  requests::CacheEvents events;
};

using Action = std::variant<OpenSequence, ForkSequence, ReleaseSequence, ProbePrefix, Unpin, MoveSequence, RunStep,
                            WithdrawStep, DismissComputeWorker, EmitUpdate, EmitCacheEvents>;

}  // namespace dovetail::scheduler
