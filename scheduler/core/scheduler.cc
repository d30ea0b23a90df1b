#include "scheduler/core/scheduler.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/check.h"
#include "scheduler/core/limits.h"
#include "scheduler/core/scheduler_impl.h"

namespace dovetail::scheduler {

SchedulerCore::SchedulerCore(const SchedulerOptions& options, uint64_t seed)
    : impl_(std::make_unique<Impl>(options, seed)) {}
SchedulerCore::~SchedulerCore() = default;

void SchedulerCore::Handle(const Event& event, absl::Time now, std::vector<Action>& actions) {
  impl_->Handle(event, now, actions);
}
absl::Time SchedulerCore::NextDeadline() const { return impl_->NextDeadline(); }
SchedulerStats SchedulerCore::stats() const { return impl_->stats(); }
Position SchedulerCore::LongestSequence() const { return impl_->LongestSequence(); }
bool SchedulerCore::HoldsNothing(WorkerId worker) const { return impl_->HoldsNothing(worker); }

SchedulerCore::Impl::Impl(const SchedulerOptions& options, uint64_t seed)
    : options_(options),
      budget_(options_.attention, options_.max_num_batched_tokens),
      micro_batches_(kMaxMicroBatches),
      patience_(options_.step_timeout),
      rotation_(options_.micro_batches),
      placement_turn_(seed) {
  const absl::Status status = options_.Validate();
  DT_CHECK(status.ok(), std::string(status.message()));
}

void SchedulerCore::Impl::Handle(const Event& event, absl::Time now, std::vector<Action>& actions) {
  now_ = now;
  actions_ = &actions;
  std::visit([this](const auto& e) { On(e); }, event);
  ExpireProbes();
  ExpireMoves();
  ExpireStranded();
  NoteGrammarPauses();
  Pump();
  ForgetFinished();
  actions_ = nullptr;
}

void SchedulerCore::Impl::Pump() {
  for (;;) {
    Admit();
    StartMoves();
    const uint64_t releases = releases_;
    Plan();
    // While a step is in flight its end brings us back. Without one, whatever planning gave up must find its next owner
    // now.
    const bool stepping = std::any_of(micro_batches_.begin(), micro_batches_.end(),
                                      [](const MicroBatch& batch) { return batch.in_flight; });
    if (stepping || (!admission_held_ && releases == releases_)) return;
    admission_held_ = false;
  }
}

absl::Time SchedulerCore::Impl::NextDeadline() const {
  absl::Time deadline = next_grammar_;
  if (!probing_.empty()) deadline = probing_.front()->probe_deadline;
  if (!moving_.empty()) deadline = std::min(deadline, moving_.front()->move.deadline);
  for (const Sequence* sequence : stranded_) deadline = std::min(deadline, sequence->stranded_until);
  for (const MicroBatch& batch : micro_batches_)
    if (batch.in_flight) deadline = std::min(deadline, batch.deadline);
  for (const MicroBatch& batch : micro_batches_)
    if (!batch.in_flight && !batch.members.empty() && batch.not_before > now_)
      deadline = std::min(deadline, batch.not_before);
  return deadline;
}

SchedulerStats SchedulerCore::Impl::stats() const {
  SchedulerStats stats = stats_;
  stats.running_sequences = static_cast<int>(active_.size());
  stats.waiting_requests = waiting_;
  stats.paused_requests = paused_;
  stats.kv_usage = budget_.fullest_usage();
  stats.micro_batches = micro_batches_in_use();
  stats.stage_times = rotation_.times();
  return stats;
}

}  // namespace dovetail::scheduler
