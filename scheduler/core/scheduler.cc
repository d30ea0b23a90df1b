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
      pool_(options_),
      batches_(pool_),
      accounts_(options_),
      budget_(accounts_.budget()),
      names_(options_),
      writer_(names_),
      groups_(options_, pool_, batches_, accounts_, writer_, turn_),
      placer_(options_, accounts_.budget(), seed),
      slots_(options_.max_num_seqs),
      probes_(options_, accounts_.budget(), names_, turn_),
      moves_(accounts_, names_, batches_, turn_) {
  const absl::Status status = options_.Validate();
  DT_CHECK(status.ok(), std::string(status.message()));
}

void SchedulerCore::Impl::Handle(const Event& event, absl::Time now, std::vector<Action>& actions) {
  turn_.Begin(now, actions);
  std::visit([this](const auto& e) { On(e); }, event);
  ExpireProbes();
  ExpireMoves();
  ExpireStranded();
  grammar_pauses_.Renew(slots_.active(), turn_.now());
  Pump();
  ForgetFinished();
  turn_.End();
}

void SchedulerCore::Impl::Pump() {
  for (;;) {
    Admit();
    StartMoves();
    const uint64_t releases = releases_;
    Plan();
    // While a step is in flight its end brings us back. Without one, whatever planning gave up must find its next owner
    // now.
    if (batches_.any_in_flight() || (!admission_held_ && releases == releases_)) return;
    admission_held_ = false;
  }
}

absl::Time SchedulerCore::Impl::NextDeadline() const {
  absl::Time deadline = grammar_pauses_.NextDeadline();
  if (!probes_.probing().empty()) deadline = probes_.NextDeadline();
  deadline = std::min(deadline, moves_.NextDeadline());
  deadline = std::min(deadline, stranded_.NextDeadline());
  return std::min(deadline, batches_.NextDeadline(turn_.now()));
}

SchedulerStats SchedulerCore::Impl::stats() const {
  SchedulerStats stats = stats_;
  stats.running_sequences = static_cast<int>(slots_.active().size());
  stats.waiting_requests = waiting_;
  stats.paused_requests = paused_;
  stats.kv_usage = budget_.fullest_usage();
  stats.moves = moves_.finished();
  stats.late_events = turn_.late();
  stats.prefill_groups = groups_.groups();
  stats.prefill_group_tokens = groups_.tokens();
  stats.micro_batches = pool_.micro_batches_in_use();
  stats.stage_times = pool_.stage_times();
  return stats;
}

}  // namespace dovetail::scheduler
