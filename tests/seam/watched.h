#pragma once
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "attention_worker/attention_backend.h"
#include "compute_worker/dense_backend.h"
#include "model/loaded_model.h"
#include "proto/frame.h"
#include "proto/link_frames.h"
#include "proto/step_plan.h"
#include "tests/seam/seam_monitor.h"
#include "transport/fabric.h"

// What nodes, ports and backends of a step are asked for goes through these to a SeamMonitor.

namespace dovetail::test {

// The port of a worker, whose steps' frames are told to the monitor. `compute`: of the compute worker.
class WatchedPort final : public transport::Port, private transport::FrameHandler {
 public:
  WatchedPort(std::unique_ptr<transport::Port> port, SeamMonitor& monitor, bool compute)
      : port_(std::move(port)), monitor_(monitor), compute_(compute) {}
  NodeId id() const override { return port_->id(); }

  absl::Status SendMessage(NodeId to, const proto::FrameHeader& header, std::vector<std::byte> payload) override {
    const bool on_device = header.type == proto::kStepBeginOnDevice;
    if (compute_ && (on_device || header.type == proto::FrameType::kStepBegin))
      monitor_.SendsBegin(KeyOf(header), to, !on_device);
    if (compute_ && header.type == proto::FrameType::kStepResult) {
      const auto result = proto::DecodeStepResult(payload);
      monitor_.Ends(KeyOf(header), result.ok() && result->status == proto::StepStatus::kOk);
    }
    return port_->SendMessage(to, header, std::move(payload));
  }
  absl::Status SendTensor(NodeId to, const proto::FrameHeader& header, transport::LentBytes payload) override {
    const SeamMonitor::Payload bytes = payload;
    if (header.type == proto::FrameType::kQuery) monitor_.SendsQuery(KeyOf(header), header.op, to, bytes);
    if (header.type == proto::FrameType::kKeyValue) monitor_.SendsKeyValue(KeyOf(header), header.op, to, bytes);
    if (header.type == proto::FrameType::kPartial) monitor_.SendsAnswer(KeyOf(header), port_->id(), header.op);
    return port_->SendTensor(to, header, std::move(payload));
  }
  int Poll(transport::FrameHandler& handler, int max_frames) override {
    handler_ = &handler;
    return port_->Poll(*this, max_frames);
  }

 private:
  static SeamMonitor::StepKey KeyOf(const proto::FrameHeader& header) {
    return {MicroBatchId(header.micro_batch), StepId(header.step)};
  }
  void OnFrame(const transport::Delivery& delivery) override {
    if (compute_ && delivery.header.type == proto::FrameType::kPartial)
      monitor_.TakesAnswer(KeyOf(delivery.header), delivery.from, delivery.header.op);
    handler_->OnFrame(delivery);
  }

  const std::unique_ptr<transport::Port> port_;
  SeamMonitor& monitor_;
  const bool compute_;
  transport::FrameHandler* handler_ = nullptr;
};

class WatchedDense final : public compute::DenseBackend {
 public:
  // `late`: payloads are ready when they have been asked for four times.
  WatchedDense(std::unique_ptr<DenseBackend> dense, const model::LoadedModel& model, SeamMonitor& monitor, bool late)
      : dense_(std::move(dense)), model_(model), monitor_(monitor), late_(late) {}
  std::vector<SequenceId> PendingGrammars(const proto::StepPlan& plan) override {
    return dense_->PendingGrammars(plan);
  }
  absl::Status PrepareStep(const compute::ComputeWorkerCore& core, MicroBatchId id,
                           const exchange::Seam& seam) override {
    monitor_.PreparesDense(KeyOf(core, id), seam);
    return dense_->PrepareStep(core, id, seam);
  }
  absl::Status Run(const compute::ComputeWorkerCore& core, MicroBatchId id, int index) override {
    if (const auto* output = std::get_if<model::OutputProjection>(&model_.steps[index]))
      monitor_.RunsOutput(KeyOf(core, id), output->op);
    return dense_->Run(core, id, index);
  }
  absl::Status AttendPrompts(const compute::ComputeWorkerCore& core, MicroBatchId id, int op) override {
    return dense_->AttendPrompts(core, id, op);
  }
  absl::StatusOr<bool> PayloadsReady(MicroBatchId id, int op) override {
    if (late_ && ++asked_[{id, op}] % 4 != 0) return false;
    return dense_->PayloadsReady(id, op);
  }
  absl::StatusOr<transport::LentBytes> PackQuery(const compute::ComputeWorkerCore& core, MicroBatchId id, int p,
                                                 int op) override {
    monitor_.Packs(KeyOf(core, id), op);
    return dense_->PackQuery(core, id, p, op);
  }
  absl::StatusOr<transport::LentBytes> PackKeyValue(const compute::ComputeWorkerCore& core, MicroBatchId id, int p,
                                                    int op) override {
    monitor_.Packs(KeyOf(core, id), op);
    return dense_->PackKeyValue(core, id, p, op);
  }
  absl::StatusOr<bool> BeginSample(const proto::StepPlan& plan, MicroBatchId id) override {
    monitor_.Draws({id, plan.step});
    return dense_->BeginSample(plan, id);
  }
  std::optional<GpuTimes> TimesOf(MicroBatchId id) const override { return dense_->TimesOf(id); }
  bool only_enqueues() const override { return dense_->only_enqueues(); }
  bool Drawn(MicroBatchId id) override { return dense_->Drawn(id); }
  absl::Status Sample(const proto::StepPlan& plan, MicroBatchId id, proto::StepResult& result) override {
    return dense_->Sample(plan, id, result);
  }

 private:
  static SeamMonitor::StepKey KeyOf(const compute::ComputeWorkerCore& core, MicroBatchId id) {
    return {id, core.PlanOf(id).step};
  }
  const std::unique_ptr<DenseBackend> dense_;
  const model::LoadedModel& model_;
  SeamMonitor& monitor_;
  const bool late_;
  std::map<std::pair<MicroBatchId, int>, int> asked_;
};

class WatchedAttention final : public attention::AttentionBackend {
 public:
  // `fail_next`: the next op fails, which sets it back.
  WatchedAttention(std::unique_ptr<AttentionBackend> backend, const attention::AttentionWorkerCore& core, NodeId node,
                   SeamMonitor& monitor, bool& fail_next)
      : backend_(std::move(backend)), core_(core), node_(node), monitor_(monitor), fail_next_(fail_next) {}
  absl::Status Copy(std::span<const attention::BlockCopy> copies) override { return backend_->Copy(copies); }
  absl::StatusOr<uint64_t> DigestOf(std::span<const attention::KvBlockId> blocks) override {
    return backend_->DigestOf(blocks);
  }
  absl::Status Poison(std::span<const attention::KvBlockId> blocks) override { return backend_->Poison(blocks); }
  absl::Status PrepareStep(MicroBatchId id, const exchange::Seam& seam) override {
    monitor_.PreparesAttention(KeyOf(id), node_, seam);
    return backend_->PrepareStep(id, seam);
  }
  absl::StatusOr<transport::LentBytes> GiveStates(MicroBatchId id, int op) override {
    return backend_->GiveStates(id, op);
  }
  absl::Status TakeQuery(MicroBatchId id, int op, std::span<const std::byte> query) override {
    monitor_.Attends(KeyOf(id), node_, op);
    return backend_->TakeQuery(id, op, query);
  }
  void AttendEarlier(MicroBatchId id, int op) override { backend_->AttendEarlier(id, op); }
  absl::StatusOr<transport::LentBytes> AppendAndFinish(MicroBatchId id, int op,
                                                       std::span<const std::byte> key_value) override {
    monitor_.Appends(KeyOf(id), node_, op);
    if (fail_next_) {
      fail_next_ = false;
      return Internal("the test lets this op fail");
    }
    return backend_->AppendAndFinish(id, op, key_value);
  }
  absl::StatusOr<transport::LentBytes> GiveRows(MicroBatchId id, int op, int piece) override {
    return backend_->GiveRows(id, op, piece);
  }
  absl::Status Launch(MicroBatchId id) override {
    monitor_.Launches(KeyOf(id), node_);
    return backend_->Launch(id);
  }
  absl::StatusOr<transport::LentBytes> Gather(int slot, int op) override { return backend_->Gather(slot, op); }

 private:
  SeamMonitor::StepKey KeyOf(MicroBatchId id) const { return {id, core_.StepOf(id)}; }

  const std::unique_ptr<AttentionBackend> backend_;
  const attention::AttentionWorkerCore& core_;
  const NodeId node_;
  SeamMonitor& monitor_;
  bool& fail_next_;
};

}  // namespace dovetail::test
