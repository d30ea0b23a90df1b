#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/time/time.h"
#include "base/status.h"
#include "proto/attention_spec.h"
#include "proto/prefill_exchange.h"
#include "scheduler/core/chunk_budget.h"
#include "scheduler/core/events.h"
#include "scheduler/core/prefill_forecast.h"
#include "scheduler/core/rotation_plan.h"

namespace dovetail::scheduler {

// How sequences are laid over attention workers. kMixed alternates between the three before it, sequence by sequence.
// kTiers: whole on the fastest worker that has room, from token to token on several where none holds it; a sequence
// that has to give way moves to a worker that has room, and comes back (tiering.h).
enum class PlacementPolicy : uint8_t { kRequest = 0, kHeads = 1, kTokens = 2, kMixed = 3, kTiers = 4 };

struct SchedulerOptions {
  int max_num_seqs = 256;             // running sequences
  int max_num_batched_tokens = 2048;  // new tokens of a step; 0: ChooseStepTokens must be called
  int max_model_len = 2048;           // prompt + output tokens of a sequence
  int max_queued_requests =
      4096;  // waiting; one more is refused (kResourceExhausted), or kAborted: the last of the tenant with most
  int micro_batches = 1;             // steps in flight of each compute worker
  bool adapt_micro_batches = false;  // as many of them as measured stage times ask for (rotation_plan.h)
  // Plans a step of decodes before the tokens of the one before are known (proto/drawn_token.h), so that a worker never
  // waits for the scheduler. With one micro-batch, and for sequences of pairs (AttentionWorkerJoined) whose device
  // draws; otherwise as if it were off.
  bool run_ahead = false;
  // How long a compute worker may take for a step besides what its tokens need (step_patience.h); then it is dismissed.
  absl::Duration step_timeout = absl::InfiniteDuration();
  bool enable_prefix_caching = true;
  // With PlacementPolicy::kTiers: what ended is cached by a slower tier, too (cache_spill.h).
  bool spill_prefixes = true;
  bool enable_chunked_prefill = true;
  // How long running streams may wait for a token because of prompts (chunk_budget.h); only with chunked prefill.
  ItlBudget prefill_itl_budget;
  // How many compute workers may prefill one prompt together; 0: as many as there are, or fewer where that is predicted
  // to be faster, and one while requests wait for a place (prefill_planner.h). Only with chunked prefill. None
  // of them gets fewer than prefill_rank_tokens of the prompt; shorter prompts go to one alone.
  int prefill_ranks = 0;
  int prefill_rank_tokens = 1024;  // 0: ChooseStepTokens must be called
  // How prompts' steps see earlier tokens that their compute worker does not have: kAsk, kGather or kGatherDirect.
  // Nothing: as is predicted to be fastest.
  std::optional<proto::PrefixExchange> prefill_exchange = proto::PrefixExchange::kAsk;
  // How the states of linear layers get from rank to rank of a prefill group: kStates or kChain. Nothing: likewise.
  std::optional<proto::LinearExchange> linear_exchange = proto::LinearExchange::kStates;
  PlacementPolicy placement = PlacementPolicy::kRequest;
  int token_shard_tokens = 256;  // kTokens: tokens per shard, a multiple of 64; later shards go round the workers
  bool tell_cache = false;       // EmitCacheEvents, if prefix caching is enabled and attention workers report
  int replay_one_in = 0;         // SchedulerNode computes one finished request in so many again; 0: none
  uint64_t model_digest = 0;     // part of every block hash: model, KV dtype, attention table
  proto::AttentionTable attention;

  // Sets max_num_batched_tokens and prefill_rank_tokens by the device of the compute workers, where they are 0: as few
  // as keep the gaps of running streams short on a CPU, as many as a GPU needs for its full speed (kStepTokensOfCpu and
  // what follows it in limits.h). Where prefill_ranks is given, its ranks get as few tokens as on a CPU. max_model_len
  // must be set.
  void ChooseStepTokens(bool on_gpu);

  absl::Status Validate() const;  // kInvalidArgument names the flag and what it may be
};

struct SchedulerStats {
  int running_sequences = 0;
  int waiting_requests = 0;
  int paused_requests = 0;
  double kv_usage = 0;  // used over capacity of the fullest attention worker, 0..1
  uint64_t preemptions = 0;
  uint64_t prompt_tokens = 0;
  uint64_t generation_tokens = 0;
  uint64_t prefix_queries = 0;  // tokens asked for
  uint64_t prefix_hits = 0;     // tokens found
  uint64_t steps = 0;
  uint64_t prefill_groups = 0;        // that began
  uint64_t prefill_group_tokens = 0;  // in them
  uint64_t shortened_chunks = 0;      // steps and groups with less of a prompt than without prefill_itl_budget
  uint64_t prefix_asked_bytes = 0;    // proto::PrefixTraffic of all steps
  uint64_t prefix_gathered_bytes = 0;
  uint64_t prefix_state_bytes = 0;
  uint64_t prefix_chain_bytes = 0;
  uint64_t prefix_direct_bytes = 0;
  uint64_t prefix_ring_bytes = 0;
  uint64_t prefix_switch_bytes = 0;
  uint64_t prefix_pass_q_bytes = 0;
  PrefillForecast last_prefill;  // the part of a prompt that ended last, of those that had a step or group alone
  PrefillTimesByWay prefill_times{};
  uint64_t moves = 0;             // of sequences between attention workers
  uint64_t spilled_tokens = 0;    // of ended sequences, cached by a slower tier, too (cache_spill.h)
  uint64_t fetched_tokens = 0;    // that a slower tier had cached, for a sequence on a faster one (prefix_fetch.h)
  uint64_t damaged = 0;           // sequences that began again because their KV was not what was written
  uint64_t late_events = 0;       // unknown or late, dropped
  Position longest_sequence = 0;  // SchedulerNode's: SchedulerCore::LongestSequence()
  uint64_t replays_same = 0;      // SchedulerNode's, as ReplayStats
  uint64_t replays_different = 0;
  uint64_t replays_unclear = 0;
  int micro_batches = 1;   // in use
  StageTimes stage_times;  // of a layer, lately
};

// Decides everything the cluster does, and does nothing itself. No clock, thread, socket or log. At most
// `SchedulerOptions` of anything.
// Threads: thread-compatible; deterministic: the same events at the same times give the same actions, in every process
// and in the simulator.
class SchedulerCore {
 public:
  SchedulerCore(const SchedulerOptions& options, uint64_t seed);
  ~SchedulerCore();

  // Applies one event that happened at `now` and appends what must be done about it. Unknown or late events are dropped
  // and counted.
  void Handle(const Event& event, absl::Time now, std::vector<Action>& actions);

  // The next time at which Handle(Tick{}) must be called even if nothing happens. absl::InfiniteFuture() if none.
  absl::Time NextDeadline() const;

  SchedulerStats stats() const;

  // SchedulerStats::last_prefill.
  const PrefillForecast& last_prefill() const;

  // What the prefix cache holds, as a reset; empty without tell_cache. Events that follow continue it.
  requests::CacheEvents CacheSnapshot() const;

  // Tokens of the longest sequence that the attention workers can hold, if it were alone: at most max_model_len; 0
  // where there are none.
  Position LongestSequence() const;

  // No sequence lies on this attention worker: one that drains may go.
  bool HoldsNothing(WorkerId worker) const;

  // Whether everything that must be true between two events is (invariants.h). For tests, which ask after every event.
  // Errors: kInternal says what is not so: a bug.
  absl::Status CheckInvariants() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace dovetail::scheduler
