#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "absl/time/time.h"
#include "base/exact_sums.h"
#include "scheduler/core/scheduler.h"
#include "tests/scheduler/fake_workers.h"

// A cluster in virtual time around one SchedulerCore. Attention workers remember which token lies at which position of
// which shard, the compute worker's next token is a hash of what it reads from them, so whatever goes missing, stale or
// astray changes a stream. After every event the rules of the step protocol are checked; `violations()` says which were
// broken.

namespace dovetail::scheduler {

struct ClusterOptions {
  SchedulerOptions scheduler;
  std::vector<uint64_t> kv_blocks = {100000};  // of each attention worker
  std::vector<double> rates;  // of the first attention workers, as AttentionWorkerJoined says; of the others 1
  int compute_workers = 1;
  int pairs = 0;  // the first attention workers each have the compute worker of their number (AttentionWorkerJoined)
  absl::Duration step_base = absl::Milliseconds(1);
  absl::Duration step_per_token = absl::Microseconds(10);
  absl::Duration answer_delay_most = absl::ZeroDuration();
  double out_of_memory = 0;  // probability of a step
  double damage = 0;         // probability of a step: some of its sequences are damaged on one of their workers
  double evict = 0;          // probability at an open or probe that the cache lost something
  double moves_fail = 0;     // probability of a move
  double unanswered = 0;  // probability of a step, but not of several in a row; its worker is dismissed, another joins
  uint64_t seed = 1;
  int vocabulary = 50;
  bool reports_work =
      false;  // results say what was done and how long it took, as if nothing but dense layers took time
  bool attends_in_pairs = false;  // with that: compute workers say that they attended to nothing
  // How often a sequence's whole context is read back from the attention workers: in every n-th of its steps. Between,
  // what is new is read and the rest is remembered. The core's invariants are checked after every n-th event. That
  // makes long simulations cheap.
  int reread_every = 1;
};

// What a client saw of one choice.
struct Stream {
  std::vector<TokenId> tokens;
  std::vector<proto::PositionLogprobs> prompt_logprobs;
  std::vector<float> prompt_logits;
  std::vector<int> prompt_done;  // as it was told
  std::vector<float> pooled;
  std::vector<std::vector<float>> logits;
  bool finished = false;
  FinishReason reason = FinishReason::kStop;
  TokenId stop_token = -1;
  std::string error;
  absl::StatusCode error_code = absl::StatusCode::kOk;
  int cached_tokens = 0;
  int64_t queued_us = 0;
  absl::Time first_token, end;
  std::vector<WorkerId> attention_workers;  // on which it ran
};

// Of the token at a position: what pooling averages.
inline std::vector<float> HiddenState(Position position, TokenId token) {
  return {static_cast<float>(position), static_cast<float>(token), static_cast<float>(position % 7) * 0.1f};
}

class FakeCluster {
 public:
  explicit FakeCluster(ClusterOptions options);

  absl::Time now() const { return now_; }
  absl::Time at(absl::Duration after_start) const { return absl::UnixEpoch() + after_start; }

  // Takes an id if the request has none (0).
  RequestId Submit(GenerationRequest request) { return SubmitAt(now_, std::move(request)); }
  RequestId SubmitAt(absl::Time when, GenerationRequest request);
  void Post(absl::Time when, Event event);

  bool RunOne();  // the next event; false: nothing left to happen
  void RunUntilIdle(int most_events = 2'000'000);
  void RunUntil(absl::Time when);  // all events up to then
  void FailNextStep(proto::StepStatus status) { next_status_ = status; }
  // Plans with an entry that this is true of are answered with kGrammarPending.
  std::function<bool(const proto::StepEntry&)> compiles_grammar;
  void LoseNextResults(int results) { results_to_lose_ = results; }
  // Of the next group no rank ends, for each waits for all others; and this one does not end when it is withdrawn.
  void HangRank(int rank) { rank_to_hang_ = rank; }
  void Slow(WorkerId compute_worker, double times) { slowness_[compute_worker] = times; }  // from the next step on
  void SpoilNextEntry() { spoil_next_entry_ = true; }  // kBadLogits in the next step's first entry
  // Compute workers no longer reach it as it is now; the scheduler knows nothing of that.
  void Reconnect(WorkerId id) { disconnected_.erase({id, worker(id).epoch()}); }
  void Disconnect(WorkerId id) { disconnected_.insert({id, worker(id).epoch()}); }
  // Steps there fail for lack of memory while it holds more sequences than that, whatever it says of its blocks.
  void LimitRoom(WorkerId id, size_t sequences) { room_limits_[id] = sequences; }
  void Damage(int steps) { steps_to_damage_ = steps; }  // so many of the next: all their sequences
  std::function<void(const Action&)> on_action;         // sees every action before it is carried out

  const Stream& stream(RequestId id, int choice = 0) { return clients_.at(id).streams[choice]; }
  bool finished(RequestId id) const { return clients_.at(id).finished; }
  const GenerationRequest& request(RequestId id) const { return *clients_.at(id).request; }
  std::vector<RequestId> requests() const;
  SchedulerCore& core() { return core_; }
  FakeAttentionWorker& worker(WorkerId id) { return workers_.at(id.value()); }

  // What choice `choice` must read if nothing ends it early.
  std::vector<TokenId> Undisturbed(const GenerationRequest& request, int choice) const;

  const std::vector<std::string>& violations() const { return violations_; }
  int sequences_held() const;
  int groups = 0;     // prefill groups that were planned
  int withdrawn = 0;  // steps of which no other result had come
  void FailRank(int rank, proto::StepStatus status) { rank_to_fail_ = {rank, status}; }  // of the next group
  int tokens_ahead = 0;  // that were to be drawn when a plan named them
  int steps_in_flight() const { return static_cast<int>(in_flight_.size()); }
  uint64_t steps = 0, out_of_memory = 0;
  std::vector<WorkerId> dismissed;  // compute workers
  uint64_t trace = 0;               // hash of all actions, by DigestOf
  int most_sequences_in_step = 0;

 private:
  struct Client {
    std::shared_ptr<const GenerationRequest> request;
    std::vector<Stream> streams;
    bool finished = false;
  };
  struct Running {
    WorkerId compute_worker;
    proto::StepPlan plan;
    bool answered = false;  // its result is on its way
  };
  struct LastRead {
    Position end = 0;
    uint64_t hash = 0;
    int steps = 0;
  };

  void Violate(const std::string& what);
  void Deliver(Event event);
  void Do(const OpenSequence& action);
  void Do(const ForkSequence& action);
  void Do(const ReleaseSequence& action);
  void Do(const ProbePrefix& action);
  void Do(const Unpin& action);
  void Do(const MoveSequence& action);
  void Do(const RunStep& action);
  void Do(const WithdrawStep& action);
  void Do(const DismissComputeWorker& action);
  void Do(const EmitUpdate& action);
  void Do(const EmitCacheEvents&) {}
  void CheckUpdate(Client& client, const GenerationUpdate& update);
  proto::EntryResult RunEntry(const proto::StepEntry& entry, WorkerId compute_worker);
  // The hash of tokens [0, end) of a sequence as its attention workers hold them, going on from `hash` of [0, begin).
  uint64_t ReadBack(const proto::StepEntry& entry, Position begin, Position end, uint64_t hash);
  uint64_t ReadContext(const proto::StepEntry& entry);
  void CheckPlan(const RunStep& action);
  void CheckRank(const RunStep& action);
  bool InFlight(SequenceId sequence, StepId but_not = StepId(), StepId group = StepId()) const;
  void FillDrawn(proto::StepPlan& plan, const proto::StepResult& before);
  absl::Duration AnswerDelay();
  bool Chance(double probability);

  ClusterOptions options_;
  SchedulerCore core_;
  std::mt19937_64 random_;
  absl::Time now_ = absl::UnixEpoch();
  uint64_t next_event_ = 0;
  int deliveries_ = 0;
  uint64_t next_request_ = 1;
  std::map<std::pair<absl::Time, uint64_t>, Event> events_;
  std::vector<FakeAttentionWorker> workers_;
  std::map<std::pair<uint32_t, SequenceId>, std::vector<TokenId>> histories_;  // of compute workers
  std::map<std::pair<uint32_t, SequenceId>, proto::SharedLists> lists_;        // of compute workers
  std::set<std::pair<WorkerId, Epoch>> disconnected_;
  std::set<std::pair<WorkerId, Epoch>> joined_;
  std::map<WorkerId, size_t> room_limits_;
  std::map<WorkerId, double> slowness_;
  std::map<SequenceId, LastRead> last_reads_;  // only with reread_every > 1
  std::map<uint16_t, Running> in_flight_;
  std::map<SequenceId, int32_t> rope_lengths_;
  std::map<RequestId, Client> clients_;
  std::optional<proto::StepStatus> next_status_;
  std::optional<std::pair<int, proto::StepStatus>> rank_to_fail_;
  bool spoil_next_entry_ = false;
  struct Group {  // the one that was planned last
    StepId id;
    int ranks = 0;       // so far
    Position next = 0;   // where the next rank begins
    bool stuck = false;  // a rank failed or was lost: those after it never end by themselves
    absl::Time last_end;
  };
  Group group_;
  std::optional<int> rank_to_hang_;
  StepId hung_;
  int results_to_lose_ = 0, steps_to_damage_ = 0;
  uint64_t last_lost_result_ = 0;  // as `steps` counts
  static constexpr uint32_t kFirstComputeWorker = 100;
  uint32_t next_compute_worker_ = kFirstComputeWorker;
  StepId last_step_;
  struct Sent {
    StepId step;
    proto::StepResult result;
  };
  std::map<WorkerId, Sent> last_sent_;  // by compute worker
  absl::Time last_end_;
  std::vector<std::string> violations_;
};

// The attention table of a model with `ops` equal full-attention ops, and then `windowed` ops that see 96 tokens.
proto::AttentionTable SmallTable(int ops = 2, int kv_heads = 2, int windowed = 0);

std::vector<TokenId> SomePrompt(int size, uint64_t seed, int vocabulary = 50);

}  // namespace dovetail::scheduler
