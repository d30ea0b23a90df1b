#pragma once
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/ids.h"
#include "base/status.h"
#include "scheduler/core/scheduler.h"
#include "scheduler/replay.h"
#include "scheduler/request_spans.h"
#include "transport/fabric.h"

namespace dovetail::scheduler {

// The scheduler's shell: turns frames into events and actions into frames.
// Threads: reactor-owned.
class SchedulerNode final : public transport::FrameHandler {
 public:
  // Called on the event loop, in order; must return at once.
  using EmitFn = std::function<void(GenerationUpdate)>;  // an update that is in the token log
  // A step came back; called before the core is told. new_tokens: of all its sequences; 0 if the plan is forgotten.
  using StepFn = std::function<void(const proto::StepResult&, int sequences, int new_tokens)>;

  // `port` and `clock` outlive the node.
  SchedulerNode(const SchedulerOptions& options, uint64_t seed, transport::Port& port, Clock& clock, EmitFn emit,
                StepFn on_step);

  // From now on what is done for requests of sampled traces goes there, and workers hear of them; outlives the node.
  void SetSpans(SpanSink* sink) { spans_.SetSink(sink); }

  // From now on what the prefix cache gains and loses is told there; as EmitFn. Only with SchedulerOptions::tell_cache.
  void SetCacheListener(std::function<void(requests::CacheEvents)> tell) { tell_cache_ = std::move(tell); }
  requests::CacheEvents CacheSnapshot() const { return core_.CacheSnapshot(); }

  // Peers, at any time. kv_blocks: capacity in KvBlocks; rate, pair: as AttentionWorkerJoined.
  void AddAttentionWorker(WorkerId worker, Epoch epoch, NodeId node, uint64_t kv_blocks, double rate = 1,
                          std::optional<WorkerId> pair = std::nullopt);
  // leaves_states, kind: as ComputeWorkerJoined.
  void AddComputeWorker(WorkerId worker, NodeId node, bool leaves_states = false, int kind = 0);

  // Gone workers: what they still send is dropped, what they had is done elsewhere. Not from inside Poll().
  void LoseAttentionWorker(WorkerId worker, Epoch epoch);
  void LoseComputeWorker(WorkerId worker);
  // The two reach each other, or do no longer: only then do groups of them exchange directly, unless that is forced.
  void LinkComputeWorkers(WorkerId one, WorkerId other, bool linked) {
    Handle(ComputeWorkersLinked{one, other, linked});
  }
  // Nothing new is placed on it; HoldsNothing() says when it may be lost without harm.
  void DrainAttentionWorker(WorkerId worker, Epoch epoch);
  bool HoldsNothing(WorkerId worker) const { return core_.HoldsNothing(worker); }

  // Workers that must go: what they had is done elsewhere. Compute workers that gave no result in time, and workers
  // that left kMaxUnsent orders unread.
  struct Dismissal {
    WorkerId worker;
    std::string why;
  };
  std::vector<Dismissal> TakeDismissals() { return std::exchange(dismissals_, {}); }

  // Steps that this attention worker refused since it joined, because KV there was not what was written.
  uint64_t DamagedSteps(WorkerId worker) const;

  // An event from outside the fabric: a request, a cancellation. What cannot be sent is logged; nothing blocks.
  void Handle(const Event& event);

  // Sends what found no room before, handles what has arrived and deadlines that have passed; returns how many frames.
  int Poll();

  absl::Time NextDeadline() const;
  SchedulerStats stats() const;

  void OnFrame(const transport::Delivery& delivery) override;

 private:
  struct Peer {
    WorkerId worker;
    Epoch epoch;
    NodeId node;
    uint64_t orders = 0;         // sent to an attention worker
    uint64_t damaged_steps = 0;  // of an attention worker
    std::deque<Action> unsent;   // in order, since it had no room for the first
    bool dismissed = false;      // it had no room for too many, or one of the two did not understand the other
  };

  void Apply(const Event& event);
  void ApplyFailures();
  // Attention workers came or went: how long sequences may be now. Said where --max-model-len does not fit.
  void NoteWhatFits();
  // KV on an attention worker was damaged again: said after kRepeatedDamage steps, and whenever they have doubled.
  void NoteDamage(const proto::StepResult& result);
  // Long prompts are taken in another way than before: said, but not more often than every kPrefillSaid.
  void NotePrefill();
  // Begins or ends a replay: it runs while no client's request waits.
  void TendReplay();
  // kResourceExhausted: the peer reads slower than we write; the action is as before.
  absl::Status Perform(Action& action);
  absl::Status SendStep(const RunStep& step);
  bool Done(const Action& action, const absl::Status& status);  // false: to be tried again
  void SendOrKeep(Action action);
  void Keep(Peer& peer, Action action);
  void Dismiss(Peer& peer, std::string why);
  int SendUnsent();
  int SendUnsentTo(std::vector<Peer>& peers);
  Peer* PeerOf(const Action& action);  // null: no worker's, or one that has left
  template <typename Message>
  absl::Status SendTo(WorkerId worker, Epoch epoch, proto::FrameType type, const Message& message);
  Peer* AttentionPeer(NodeId node);
  template <typename Message, typename Answer>
  void TakeAnswer(Peer& peer, const transport::Delivery& delivery);

  // That these sequences belong to sampled traces: before what is ordered of them, and lost where there is no room.
  void TellTrace(NodeId node, Epoch epoch, SequenceId sequence, const TraceContext& trace);
  void NoteEvent(const Event& event);  // for spans

  SchedulerCore core_;
  RequestSpans spans_;
  const int max_model_len_;
  Position longest_ = 0;       // LongestSequence(), now
  Position said_longest_ = 0;  // of the warning
  PrefillForecast said_prefill_;
  absl::Time say_prefill_after_ = absl::InfinitePast();
  const bool replays_;
  Replay replay_;
  absl::Time replay_not_before_ = absl::InfinitePast();
  transport::Port& port_;
  Clock& clock_;
  const EmitFn emit_;
  const StepFn on_step_;
  std::function<void(requests::CacheEvents)> tell_cache_;  // empty: nothing listens
  int TokensOf(const proto::StepResult& result) const;

  struct StepTokens {
    StepId step;
    int new_tokens = 0;
  };
  std::vector<Peer> attention_, compute_;
  std::vector<StepTokens> step_tokens_;  // of each micro-batch's last plan
  std::vector<Action> actions_;
  std::vector<Dismissal> dismissals_;
  std::deque<Event> failures_;  // of sending, for the core to hear when the event at hand is done
};

}  // namespace dovetail::scheduler
