#include "tests/cluster/rank_cluster.h"

#include "absl/strings/str_cat.h"
#include "base/check.h"

namespace dovetail::test {

RankCluster::RankCluster(NodeModel& model, const RankClusterOptions& options) : model_(model) {
  for (int i = 0; i < 2 + options.compute_workers; ++i) {
    ports_.push_back(fabric_.CreatePort(nullptr));
    if (options.seed == 0) {
      mortal_.push_back(std::make_unique<MortalPort>(*ports_.back()));
      continue;
    }
    faulty_.push_back(std::make_unique<transport::FaultyPort>(*ports_.back(), clock_, options.seed * 100 + i));
    faulty_.back()->Set({.duplicate = 0.1, .echo = 0.2, .delay = 0.05, .delay_max = absl::Milliseconds(2)});
    mortal_.push_back(std::make_unique<MortalPort>(*faulty_.back()));
  }
  scheduler::SchedulerOptions scheduling;
  scheduling.max_num_seqs = 8;
  scheduling.max_num_batched_tokens = options.step_tokens;
  scheduling.max_model_len = 512;
  scheduling.prefill_rank_tokens = 64;
  scheduling.prefill_ranks = proto::kMaxPrefillRanks;  // whatever is predicted
  scheduling.prefill_exchange = options.exchange;
  scheduling.linear_exchange = options.linear;
  scheduling.attention = model.table;
  scheduling.model_digest = 7;
  scheduler_ = std::make_unique<scheduler::SchedulerNode>(
      scheduling, 0, *mortal_[0], clock_,
      [this](requests::GenerationUpdate update) { streams_[update.request.value() - 1].Take(std::move(update)); },
      [](const proto::StepResult&, int, int) {});
  attention::AttentionWorkerOptions attention{WorkerId(0), Epoch(1), kBlocks, kMicroBatches};
  attention.model_digest = 7;
  attention_ = *attention::AttentionWorkerNode::Create(model.table, attention, *model.device, *mortal_[1], clock_);
  for (int r = 0; r < options.compute_workers; ++r) {
    mortal_[2 + r]->offers = r < options.offering;
    AddCompute(r, options);
  }
  for (int r = 0; r < options.compute_workers; ++r)
    for (int other = 0; other < options.compute_workers; ++other)
      if (other != r) compute_[r]->AddComputeWorker({IdOf(other), Epoch(1), NodeOf(other)});
  scheduler_->AddAttentionWorker(WorkerId(0), Epoch(1), NodeId(1), kBlocks);
}

void RankCluster::AddCompute(int rank, const RankClusterOptions& options) {
  compute::ComputeWorkerOptions worker;
  worker.micro_batches = kMicroBatches;
  worker.max_step_tokens = options.step_tokens;
  worker.vocab_size = static_cast<int32_t>(model_.loaded->config().vocab_size);
  RankClusterOptions::On on{model_.device.get(), nullptr};
  if (!options.on.empty()) on = options.on[static_cast<size_t>(rank) % options.on.size()];
  compute::ComputeWorkerTuning tuning;
  if (on.dense != nullptr) {
    tuning.dense = on.dense;
    tuning.rank_rows_on_device = options.rows_on_device;
    tuning.prompt_scratch_bytes = options.scratch_bytes;
  }
  auto node = compute::ComputeWorkerNode::Create(*model_.loaded, model_.table, worker, NodeId(0), *on.device,
                                                 *mortal_[2 + rank], clock_, tuning);
  DT_CHECK(node.ok(), std::string(node.status().message()));
  compute_.push_back(*std::move(node));
  compute_.back()->AddAttentionWorker({WorkerId(0), Epoch(1), NodeId(1)});
  if (rank < options.known_workers) Join(rank);
}

void RankCluster::Lose(int rank) {
  lost_.insert(rank);
  scheduler_->LoseComputeWorker(IdOf(rank));
  for (int other = 0; other < static_cast<int>(compute_.size()); ++other)
    if (other != rank) compute_[other]->LoseComputeWorker(IdOf(rank), Epoch(1));
}

uint64_t RankCluster::Submit(requests::GenerationRequest request) {
  request.id = RequestId(streams_.size() + 1);
  streams_.emplace_back();
  scheduler_->Handle(scheduler::RequestArrived{std::make_shared<requests::GenerationRequest>(std::move(request))});
  return streams_.size();
}

bool RankCluster::Until(const std::function<bool()>& condition) {
  for (int turn = 0; turn < 100'000; ++turn) {
    if (condition()) return true;
    clock_.now += absl::Microseconds(20);
    scheduler_->Poll();
    attention_->Poll();
    for (int r = 0; r < static_cast<int>(compute_.size()); ++r)
      if (!lost_.contains(r)) compute_[r]->Poll();
  }
  return false;
}

uint64_t RankCluster::Held() const {
  uint64_t held = attention_->core().status().blocks_in_use;
  for (int r = 0; r < static_cast<int>(compute_.size()); ++r)
    if (!lost_.contains(r)) held += compute_[r]->core().rank_bytes() + compute_[r]->rank_links().held();
  return held;
}

std::string RankCluster::WhatIsHeld() const {
  std::string what = absl::StrCat(attention_->core().status().blocks_in_use, " blocks");
  for (int r = 0; r < static_cast<int>(compute_.size()); ++r)
    if (!lost_.contains(r))
      absl::StrAppend(&what, "; worker ", r, ": ", compute_[r]->core().rank_bytes(), " bytes of ranks, ",
                      compute_[r]->rank_links().held(), " frames for them");
  return what;
}

}  // namespace dovetail::test
