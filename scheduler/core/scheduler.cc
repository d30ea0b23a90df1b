#include "scheduler/core/scheduler.h"

#include <algorithm>
#include <string>
#include <utility>
#include <variant>

#include "base/check.h"
#include "scheduler/core/admission.h"
#include "scheduler/core/cache_directory.h"
#include "scheduler/core/cache_spill.h"
#include "scheduler/core/chunk_room.h"
#include "scheduler/core/client_events.h"
#include "scheduler/core/growth.h"
#include "scheduler/core/invariants.h"
#include "scheduler/core/relocation.h"
#include "scheduler/core/step_failures.h"
#include "scheduler/core/step_planner.h"
#include "scheduler/core/step_results.h"
#include "scheduler/core/tiering.h"
#include "scheduler/core/worker_events.h"

namespace dovetail::scheduler {

// The parts of the core, and in which order they are asked. A part knows those above it in this list, and none below:
// it returns what it cannot decide itself.
class SchedulerCore::Impl {
 public:
  Impl(const SchedulerOptions& options, uint64_t seed)
      : options_(options), placer_(options_, accounts_.budget(), seed) {
    const absl::Status status = options_.Validate();
    DT_CHECK(status.ok(), std::string(status.message()));
  }

  void Handle(const Event& event, absl::Time now, std::vector<Action>& actions) {
    turn_.Begin(now, actions);
    std::visit([this](const auto& e) { On(e); }, event);
    admission_.ExpireProbes();
    relocation_.Expire();
    admission_.ExpireStranded();
    grammar_pauses_.Renew(slots_.active(), now);
    Pump();
    requests_.ForgetFinished();
    turn_.End();
  }

  absl::Time NextDeadline() const;
  SchedulerStats stats() const;
  const PrefillForecast& last_prefill() const { return pool_.planner().last(); }
  requests::CacheEvents CacheSnapshot() const { return directory_.Snapshot(); }
  Position LongestSequence() const { return placer_.LongestSequence(); }
  bool HoldsNothing(WorkerId worker) const { return worker_events_.HoldsNothing(worker); }
  absl::Status CheckInvariants() const {
    return Invariants({.accounts = accounts_,
                       .requests = requests_,
                       .slots = slots_,
                       .batches = batches_,
                       .probes = probes_,
                       .moves = moves_,
                       .stranded = stranded_,
                       .incarnations = incarnations_,
                       .choices = choices_})
        .Check();
  }

 private:
  void On(const RequestArrived& event) { client_events_.On(event); }
  void On(const RequestCancelled& event) { client_events_.On(event); }
  void On(const ChoiceStopped& event) { client_events_.On(event); }
  void On(const RequestPaused& event) { client_events_.On(event); }
  void On(const RequestResumed& event) { client_events_.On(event); }
  void On(const PrefixProbed& event) { admission_.On(event); }
  void On(const SequenceOpened& event) { admission_.On(event); }
  void On(const SequenceMoved& event) { relocation_.On(event); }
  void On(const CacheChanged& event);
  void On(const AttentionWorkerLost& event);
  void On(const AttentionWorkerJoined& event);
  void On(const StepFinished& event) { results_.On(event); }
  void On(const StepUnreadable& event) { results_.On(event); }
  template <typename WorkerEvent>
  void On(const WorkerEvent& event) {
    worker_events_.On(event);
  }

  void LoseCacheOf(WorkerId worker);
  void Tell(std::vector<requests::CacheEvent> events);
  CacheDirectory* TellsCache() { return options_.tell_cache && options_.enable_prefix_caching ? &directory_ : nullptr; }

  // What the event made possible: sequences start, move and step.
  void Pump();

  const SchedulerOptions options_;
  Turn turn_;

  // Records and accounts.
  ComputePool pool_{options_};
  MicroBatches batches_{pool_};
  KvAccounts accounts_{options_};
  TenantQueues queues_;
  RequestTable requests_{options_, queues_};
  Slots slots_{options_.max_num_seqs};
  ReplacementWait stranded_;
  GrammarPauses grammar_pauses_;
  CacheDirectory directory_{options_.attention};

  // What is under way.
  Placer placer_;
  BlockNames names_{options_, TellsCache()};
  StepWriter writer_{names_};
  ChunkRoom room_{options_, pool_, batches_, turn_};
  PrefillGroups groups_{options_, pool_, batches_, accounts_, room_, writer_, turn_};
  Probes probes_{options_, accounts_.budget(), names_, turn_};
  Moves moves_{accounts_, names_, batches_, turn_};
  Incarnations incarnations_{accounts_, names_, batches_, moves_, slots_, turn_};
  EndedPrefixes ended_{options_, accounts_.budget()};
  Choices choices_{{.accounts = accounts_,
                    .queues = queues_,
                    .requests = requests_,
                    .slots = slots_,
                    .probes = probes_,
                    .groups = groups_,
                    .stranded = stranded_,
                    .incarnations = incarnations_,
                    .ended = ended_},
                   turn_};

  // Decisions.
  ClientEvents client_events_{options_, queues_, requests_, choices_, turn_};
  PrefixFetch fetch_{options_, accounts_, pool_, moves_};
  Admission admission_{options_, accounts_, pool_,         placer_,   slots_,   queues_, probes_,
                       moves_,   fetch_,    incarnations_, stranded_, choices_, turn_};
  Relocation relocation_{options_, accounts_, placer_, slots_, moves_, choices_};
  Tiering tiering_{options_, accounts_, placer_, slots_, moves_, choices_};
  CacheSpill spill_{accounts_, ended_, requests_, slots_, moves_, incarnations_, choices_, turn_};
  Growth growth_{accounts_, placer_, slots_, stranded_, tiering_, choices_, turn_};
  StepPlanner planner_{options_, pool_, batches_, accounts_, room_, writer_, groups_, growth_, turn_};
  StepFailures failures_{batches_, accounts_, slots_, placer_, stranded_, grammar_pauses_, choices_, admission_, turn_};
  StepResults results_{options_, pool_, batches_, accounts_, groups_, choices_, admission_, failures_, turn_};
  WorkerEvents worker_events_{pool_,    batches_,   accounts_,   placer_,  slots_,  moves_, stranded_,
                              choices_, admission_, relocation_, results_, groups_, turn_};
};

void SchedulerCore::Impl::On(const CacheChanged& event) {
  if (!accounts_.budget().IsCurrent(event.worker, event.epoch)) return turn_.CountLate();
  if (TellsCache() == nullptr) return;
  std::vector<requests::CacheEvent> events;
  for (uint64_t unknown = directory_.Take(event.worker, event.epoch, event.changed, events); unknown > 0; --unknown)
    turn_.CountLate();
  Tell(std::move(events));
}

void SchedulerCore::Impl::On(const AttentionWorkerLost& event) {
  if (accounts_.budget().IsCurrent(event.worker, event.epoch)) LoseCacheOf(event.worker);
  worker_events_.On(event);
}

// Under the same id it comes with an empty cache.
void SchedulerCore::Impl::On(const AttentionWorkerJoined& event) {
  LoseCacheOf(event.worker);
  worker_events_.On(event);
}

void SchedulerCore::Impl::LoseCacheOf(WorkerId worker) {
  const std::optional<int> index = accounts_.budget().IndexOf(worker);
  if (!index || TellsCache() == nullptr) return;
  std::vector<requests::CacheEvent> events;
  directory_.Lose(worker, accounts_.budget().workers()[*index].epoch, events);
  Tell(std::move(events));
}

void SchedulerCore::Impl::Tell(std::vector<requests::CacheEvent> events) {
  if (!events.empty()) turn_.Act(EmitCacheEvents{{.reset = false, .events = std::move(events)}});
}

void SchedulerCore::Impl::Pump() {
  for (;;) {
    admission_.Admit();
    const uint64_t released = incarnations_.released();
    relocation_.Start();
    tiering_.ComeBack();
    spill_.Run();
    planner_.Plan(/*requests_wait=*/choices_.waiting() > 0);
    // While a step is in flight its end brings us back. Without one, whatever a drain or planning gave up must find its
    // next owner now.
    if (batches_.any_in_flight() || (!admission_.held() && released == incarnations_.released())) return;
    admission_.EndHold();
  }
}

absl::Time SchedulerCore::Impl::NextDeadline() const {
  return std::min({probes_.NextDeadline(), moves_.NextDeadline(), stranded_.NextDeadline(),
                   grammar_pauses_.NextDeadline(), batches_.NextDeadline(turn_.now())});
}

SchedulerStats SchedulerCore::Impl::stats() const {
  SchedulerStats stats;
  const int spilling = spill_.running();  // holds a slot, and is paused
  stats.running_sequences = static_cast<int>(slots_.active().size()) - spilling;
  stats.waiting_requests = choices_.waiting();
  stats.paused_requests = choices_.paused() - spilling;
  stats.kv_usage = accounts_.budget().fullest_usage();
  stats.preemptions = choices_.preemptions();
  stats.prompt_tokens = incarnations_.prompt_tokens();
  stats.prefix_queries = incarnations_.prefix_queries();
  stats.prefix_hits = incarnations_.prefix_hits();
  const StepResults::Counts& steps = results_.counts();
  stats.generation_tokens = steps.generation_tokens;
  stats.steps = steps.steps;
  stats.prefix_asked_bytes = steps.prefix_asked_bytes;
  stats.prefix_gathered_bytes = steps.prefix_gathered_bytes;
  stats.prefix_state_bytes = steps.prefix_state_bytes;
  stats.prefix_chain_bytes = steps.prefix_chain_bytes;
  stats.prefix_direct_bytes = steps.prefix_direct_bytes;
  stats.prefix_ring_bytes = steps.prefix_ring_bytes;
  stats.prefix_switch_bytes = steps.prefix_switch_bytes;
  stats.prefix_pass_q_bytes = steps.prefix_pass_q_bytes;
  stats.prefill_groups = groups_.groups();
  stats.prefill_group_tokens = groups_.tokens();
  stats.shortened_chunks = planner_.shortened_chunks() + groups_.shortened();
  stats.last_prefill = pool_.planner().last();
  stats.prefill_times = pool_.planner().times();
  stats.moves = moves_.finished();
  stats.spilled_tokens = spill_.tokens();
  stats.fetched_tokens = fetch_.tokens();
  stats.damaged = failures_.damaged();
  stats.late_events = turn_.late();
  stats.micro_batches = pool_.micro_batches_in_use();
  stats.stage_times = pool_.stage_times();
  return stats;
}

SchedulerCore::SchedulerCore(const SchedulerOptions& options, uint64_t seed)
    : impl_(std::make_unique<Impl>(options, seed)) {}
SchedulerCore::~SchedulerCore() = default;

void SchedulerCore::Handle(const Event& event, absl::Time now, std::vector<Action>& actions) {
  impl_->Handle(event, now, actions);
}
absl::Time SchedulerCore::NextDeadline() const { return impl_->NextDeadline(); }
SchedulerStats SchedulerCore::stats() const { return impl_->stats(); }
const PrefillForecast& SchedulerCore::last_prefill() const { return impl_->last_prefill(); }
requests::CacheEvents SchedulerCore::CacheSnapshot() const { return impl_->CacheSnapshot(); }
Position SchedulerCore::LongestSequence() const { return impl_->LongestSequence(); }
bool SchedulerCore::HoldsNothing(WorkerId worker) const { return impl_->HoldsNothing(worker); }
absl::Status SchedulerCore::CheckInvariants() const { return impl_->CheckInvariants(); }

}  // namespace dovetail::scheduler
