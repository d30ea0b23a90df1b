#include "scheduler/core/compute_pool.h"

#include <algorithm>

#include "proto/prefill_part.h"
#include "scheduler/core/limits.h"

namespace dovetail::scheduler {

PrefillPlannerOptions ComputePool::PlannerOptionsOf(const SchedulerOptions& options) {
  return {.exchange = options.prefill_exchange,
          .linear = options.linear_exchange,
          .choose_ranks = options.prefill_ranks == 0,
          .max_step_tokens = options.max_num_batched_tokens,
          .rank_tokens = options.prefill_rank_tokens};
}

bool ComputePool::Join(WorkerId worker, bool leaves_states, int kind) {
  if (std::find(workers_.begin(), workers_.end(), worker) != workers_.end()) return false;
  workers_.push_back(worker);
  if (leaves_states) leaving_states_.push_back(worker);
  kinds_[worker] = kind;
  most_alike_ = static_cast<int>(MostAlike(workers_).size());
  return true;
}

bool ComputePool::Leave(WorkerId worker) {
  patience_.Forget(worker);
  pace_.Forget(worker);
  planner_.ForgetComputeWorker(worker);
  std::erase(leaving_states_, worker);
  kinds_.erase(worker);
  if (std::erase(workers_, worker) == 0) return false;
  most_alike_ = static_cast<int>(MostAlike(workers_).size());
  return true;
}

int ComputePool::micro_batches_in_use() const {
  const int workers = std::max(1, static_cast<int>(workers_.size()));
  const int asked = options_.adapt_micro_batches ? rotation_.micro_batches() : options_.micro_batches;
  const int of_each = std::max(asked, tiers_apart_ ? 2 : 1);
  const int ranks = most_prefill_ranks();
  return std::min(of_each * workers, kMaxMicroBatches - (ranks > 1 ? ranks : 0));
}

int ComputePool::most_prefill_ranks() const {
  if (!options_.enable_chunked_prefill) return 1;
  const int most = options_.prefill_ranks == 0 ? proto::kMaxPrefillRanks : options_.prefill_ranks;
  return std::min({most, most_alike_, kMaxMicroBatches - static_cast<int>(workers_.size())});
}

std::vector<WorkerId> ComputePool::MostAlike(const std::vector<WorkerId>& workers) const {
  std::vector<WorkerId> most;
  for (const WorkerId first : workers) {
    std::vector<WorkerId> alike = workers;
    std::erase_if(alike, [&](WorkerId worker) { return kinds_.at(worker) != kinds_.at(first); });
    if (alike.size() > most.size()) most = std::move(alike);
  }
  return most;
}

WorkerId ComputePool::WorkerOf(int micro_batch, int failed_attempts) const {
  return workers_[static_cast<size_t>(micro_batch + failed_attempts) % workers_.size()];
}

bool ComputePool::MayStepIn(const Sequence& sequence, int micro_batch) const {
  const std::optional<WorkerId>& asked = sequence.params().only_compute_worker;
  const std::optional<WorkerId>& only = asked ? asked : sequence.pair;
  if (!only || workers_.empty()) return true;
  if (std::find(workers_.begin(), workers_.end(), *only) == workers_.end()) return true;
  return WorkerOf(micro_batch) == *only;
}

void ComputePool::NoteTimes(const proto::StepTimings& timings, size_t sequences, bool decodes) {
  if (timings.total_us <= 0) return;
  const double ops = options_.attention.op_count();
  const auto wire = static_cast<double>(timings.attention_wait_us - timings.attention_us);
  Rotation::Step step;
  step.layer = {.dense_us = static_cast<double>(timings.dense_us + timings.prompt_us) / ops,
                .attention_us = static_cast<double>(timings.attention_us) / ops,
                .hop_us = std::max(0.0, wire) / ops / 2};
  if (!options_.adapt_micro_batches) return rotation_.Smooth(step.layer);
  step.total_us = static_cast<double>(timings.total_us);
  step.sequences = static_cast<double>(sequences) / static_cast<double>(std::max<size_t>(1, workers_.size()));
  step.decodes = decodes;
  rotation_.Note(step);
}

}  // namespace dovetail::scheduler
