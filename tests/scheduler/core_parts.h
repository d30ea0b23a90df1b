#pragma once
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "scheduler/core/block_names.h"
#include "scheduler/core/chunk_room.h"
#include "scheduler/core/compute_pool.h"
#include "scheduler/core/kv_accounts.h"
#include "scheduler/core/micro_batches.h"
#include "scheduler/core/step_writer.h"
#include "scheduler/core/tenant_queues.h"
#include "scheduler/core/turn.h"
#include "tests/scheduler/small_cluster.h"

// The lower parts of the scheduler's core, put together by hand, with requests that no core has admitted.

namespace dovetail::scheduler {

inline SchedulerOptions SmallOptions() {
  SchedulerOptions options;
  options.attention = SmallTable(/*ops=*/1, /*kv_heads=*/1);  // a KvBlock per 64 tokens
  options.max_num_seqs = 8;
  options.max_num_batched_tokens = 256;
  return options;
}

class CoreParts {
 public:
  explicit CoreParts(SchedulerOptions with = SmallOptions())
      : options(std::move(with)), pool(options), batches(pool), accounts(options), names(options), writer(names) {
    turn.Begin(absl::UnixEpoch(), actions);
  }

  void At(absl::Duration after_start) { turn.Begin(absl::UnixEpoch() + after_start, actions); }

  void AddAttentionWorker(uint32_t worker, uint64_t kv_blocks) {
    accounts.budget().Join(WorkerId(worker), Epoch(1), kv_blocks);
  }

  // The first choice of a new request, with the siblings that `params` ask for. Each request is younger than the last.
  Sequence& AddRequest(GenerationRequest params) {
    params.id = RequestId(requests.size() + 1);
    auto request = std::make_unique<RequestState>();
    request->ordinal = requests.size();
    request->tenant = &queues.Enter(params.tenant);
    request->open_choices = params.choices;
    for (int i = 0; i < params.choices; ++i) {
      request->choices.push_back(std::make_unique<Sequence>());
      request->choices.back()->request = request.get();
      request->choices.back()->choice = i;
    }
    request->request = std::make_shared<const GenerationRequest>(std::move(params));
    requests.push_back(std::move(request));
    return *requests.back()->choices[0];
  }

  // Places it whole on one attention worker, charges it for its tokens, and makes it ready in a micro-batch.
  void MakeReady(Sequence& sequence, uint32_t worker = 0) {
    sequence.id = SequenceId(++sequences);
    sequence.placement = proto::WholePlacement(options.attention, WorkerId(worker), Epoch(1));
    sequence.reserved = BlocksOf(sequence.size()) * kSegmentTokens;
    accounts.Charge(sequence, accounts.CostOf(sequence, sequence.reserved));
    sequence.phase = Phase::kReady;
    batches.Enlist(sequence);
  }

  Sequence& AddReady(int prompt, int max_tokens = 10, const std::string& tenant = "a") {
    Sequence& sequence = AddRequest(Ask(prompt, max_tokens, tenant, /*seed=*/requests.size() + 1));
    MakeReady(sequence);
    return sequence;
  }

  // The actions of one kind so far, in order; all actions are forgotten.
  template <typename A>
  std::vector<A> Take() {
    std::vector<A> taken;
    for (Action& action : actions)
      if (A* const a = std::get_if<A>(&action)) taken.push_back(std::move(*a));
    actions.clear();
    return taken;
  }

  const SchedulerOptions options;
  std::vector<Action> actions;
  Turn turn;
  ComputePool pool;
  MicroBatches batches;
  KvAccounts accounts;
  ChunkRoom room{options, pool, batches, turn};
  BlockNames names;
  StepWriter writer;
  TenantQueues queues;
  std::vector<std::unique_ptr<RequestState>> requests;
  uint64_t sequences = 0;
};

}  // namespace dovetail::scheduler
