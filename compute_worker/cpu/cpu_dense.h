#pragma once
#include <variant>
#include <vector>

#include "base/check.h"
#include "compute_worker/cpu/dense_executor.h"
#include "compute_worker/cpu/token_sampler.h"
#include "compute_worker/dense_backend.h"

namespace dovetail::compute {

// The dense pieces on the CPU. `model`, `table` and `device` outlive it.
// Threads: reactor-owned, as DenseBackend.
class CpuDense final : public DenseBackend {
 public:
  CpuDense(const model::LoadedModel& model, const proto::AttentionTable& table, kernels::Device& device,
           int micro_batches, KvStorage storage)
      : dense_(model, table, device, micro_batches, storage), sampler_(model, device, dense_.stream()) {}

  std::vector<SequenceId> PendingGrammars(const proto::StepPlan& plan) override {
    return sampler_.PendingGrammars(plan);
  }
  absl::Status PrepareStep(const ComputeWorkerCore& core, MicroBatchId id, const exchange::Seam& seam) override {
    DT_CHECK(std::holds_alternative<exchange::ThroughHosts>(seam), "a CPU's payloads cross through the hosts");
    return dense_.PrepareStep(core, id);
  }
  absl::Status Run(const ComputeWorkerCore& core, MicroBatchId id, int index) override {
    return dense_.Run(core, id, index);
  }
  absl::Status AttendPrompts(const ComputeWorkerCore& core, MicroBatchId id, int op) override {
    return dense_.AttendPrompts(core, id, op);
  }
  absl::Status AttendRankShard(const ComputeWorkerCore& core, const AttendShard& shard) override {
    return dense_.AttendRankShard(core, shard);
  }
  absl::Status KeepRankRows(const ComputeWorkerCore& core, const compute::KeepRankRows& keep,
                            const PromptScratch::Part& part) override {
    return dense_.KeepRankRows(core, keep, part);
  }
  absl::Status KeepEarlierRows(const ComputeWorkerCore& core, const compute::KeepEarlierRows& keep) override {
    return dense_.KeepEarlierRows(core, keep);
  }
  absl::StatusOr<transport::LentBytes> PackQuery(const ComputeWorkerCore& core, MicroBatchId id, int p,
                                                 int op) override {
    return dense_.wire(id).PackQuery(core.PartsOf(id), p, core.table().op_group[op]);
  }
  absl::StatusOr<transport::LentBytes> PackKeyValue(const ComputeWorkerCore& core, MicroBatchId id, int p,
                                                    int op) override {
    return dense_.wire(id).PackKeyValue(core.PartsOf(id), p, op);
  }
  std::vector<std::byte> TakeRankState(MicroBatchId id, int) override { return dense_.TakeRankState(id); }
  absl::StatusOr<transport::LentBytes> RankRows(MicroBatchId id, int op, int64_t first_row) override {
    const auto rows = std::make_shared<const std::vector<std::byte>>(dense_.wire(id).RankRows(op, first_row));
    return transport::Lend(rows, rows->size());
  }
  absl::StatusOr<transport::LentBytes> RankHeads(const ComputeWorkerCore& core, MicroBatchId id, int op,
                                                 const proto::HeadRange& heads) override {
    const auto rows = std::make_shared<const std::vector<std::byte>>(dense_.RankHeads(core, id, op, heads));
    return transport::Lend(rows, rows->size());
  }
  absl::Status AttendRankHeads(const ComputeWorkerCore& core, const AttendHeads& attend) override {
    return dense_.AttendRankHeads(core, attend);
  }
  absl::StatusOr<transport::LentBytes> RankQueries(MicroBatchId id, int op, int64_t rows) override {
    const auto queries = std::make_shared<const std::vector<std::byte>>(dense_.RankQueries(id, op, rows));
    return transport::Lend(queries, queries->size());
  }
  absl::Status AttendRankQueries(const ComputeWorkerCore& core, const AttendQueries& attend) override {
    return dense_.AttendRankQueries(core, attend);
  }
  absl::StatusOr<transport::LentBytes> TakeRankOutputs(const ComputeWorkerCore& core, MicroBatchId id) override {
    const auto outputs = std::make_shared<const std::vector<std::byte>>(dense_.TakeRankOutputs(core, id));
    return transport::Lend(outputs, outputs->size());
  }
  absl::Status PlaceOutputs(const ComputeWorkerCore& core, const PlaceRankOutputs& place) override {
    dense_.PlaceOutputs(core, place);
    return absl::OkStatus();
  }
  absl::Status Sample(const proto::StepPlan& plan, MicroBatchId id, proto::StepResult& result) override {
    return sampler_.Run(plan, dense_.residual(id), result);
  }

 private:
  DenseExecutor dense_;
  TokenSampler sampler_;
};

}  // namespace dovetail::compute
