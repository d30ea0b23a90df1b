#pragma once
#include <optional>
#include <vector>

#include "attention_worker/cuda/cuda_attention_executor.h"

namespace dovetail::attention {

// A way across the seam as CudaAttentionExecutor uses it: where q, k and v of a step come from, where o goes, and when
// its launches run. One of these for each alternative of exchange::Seam, whose obligations hold.
//
// Order: Use and Begin for each step; for each op TakeQuery, then Run; Launch.
// Errors: what fails refuses the step.
// Threads: reactor-owned, as the executor.
class CudaAttentionExecutor::Crossing {
 public:
  explicit Crossing(CudaAttentionExecutor& executor) : executor_(executor) {}  // outlives it
  virtual ~Crossing() = default;

  // Payloads of frames are device memory, or there are none.
  virtual bool on_device() const { return true; }
  // Answers lie in memory of this worker until the op is done, and may be read again.
  virtual bool answers_are_here() const { return true; }

  // A step begins that crosses this way: its stream, and its work if launches are collected.
  virtual absl::Status Use(const exchange::Seam& seam, MicroBatchId id, MicroBatch& batch) = 0;
  // Its buffers are there.
  virtual absl::Status Begin(MicroBatchId, MicroBatch&) { return absl::OkStatus(); }
  // The payload of q is batch.payload.
  virtual absl::Status TakeQuery(MicroBatch&) { return absl::OkStatus(); }
  // Appends and attends a softmax op; the payload of its answer.
  virtual absl::StatusOr<transport::LentBytes> Run(MicroBatchId id, int op, std::span<const std::byte> key_value,
                                                   MicroBatch& batch) = 0;
  // Launches of linear states may be part of a recorded step.
  virtual bool records_states() const { return false; }
  // Appends to the states of a linear op; the payload of its answer. Through the hosts also states that cross.
  virtual absl::StatusOr<transport::LentBytes> RunState(MicroBatchId id, int op, std::span<const std::byte> key_value,
                                                        MicroBatch& batch) = 0;
  // After the last op.
  virtual absl::Status Launch(MicroBatch&) { return absl::OkStatus(); }
  // Waits for all that was launched in streams of its own.
  virtual absl::Status Synchronize() { return absl::OkStatus(); }

 protected:
  // The answer of an op on the device.
  absl::StatusOr<transport::LentBytes> Lend(int op, const MicroBatch& batch) const;
  // What the launches of an op in a step's work depend on: all that they are given. Behind `executor` and `batch` they
  // read what `appends` and `launches` tell apart.
  struct AttendRecord {
    CudaAttentionExecutor* executor = nullptr;
    MicroBatch* batch = nullptr;
    const std::byte *query = nullptr, *key_value = nullptr;
    std::byte* answer = nullptr;         // in the peer's memory
    const std::byte* partial = nullptr;  // where it is otherwise
    const kernels::cuda::DeviceAttentionItem* items = nullptr;
    const int32_t *positions = nullptr, *row_items = nullptr;
    uint64_t offset = 0, appends = 0, launches = 0;
    int64_t partials_there = 0, ml_there = 0;  // of a step between GPUs with token shards
    kernels::cuda::ExchangeEnd end;
    int32_t op = 0, op_index = 0;
    uint16_t group = 0, is_appended = 0, waits_apart = 0, unused = 0;
  };
  // Of the step and the op; not what one way alone has.
  AttendRecord RecordOf(int op, const std::byte* key_value, MicroBatch& batch) const;
  // Of a step whose tokens come to the device: kInternal if they do not.
  absl::Status CheckTokensCome(MicroBatchId id, int op) const;
  // Tells appends that are not one run apart.
  static uint64_t WordOf(const std::vector<AppendRun>& appends, uint64_t word);

  CudaAttentionExecutor& executor_;
};

// ThroughHosts: payloads are copied to the device, the answer is copied back, and each op is waited for.
// Threads: reactor-owned, as Crossing.
class CudaAttentionExecutor::HostCrossing final : public Crossing {
 public:
  using Crossing::Crossing;
  bool on_device() const override { return false; }
  absl::Status Use(const exchange::Seam& seam, MicroBatchId id, MicroBatch& batch) override;
  absl::Status TakeQuery(MicroBatch& batch) override;
  absl::StatusOr<transport::LentBytes> Run(MicroBatchId id, int op, std::span<const std::byte> key_value,
                                           MicroBatch& batch) override;
  absl::StatusOr<transport::LentBytes> RunState(MicroBatchId id, int op, std::span<const std::byte> key_value,
                                                MicroBatch& batch) override;

 private:
  absl::StatusOr<transport::LentBytes> Answer(MicroBatch& batch, const GroupStep& step, int64_t bytes);
};

// OnOneGpu: an op is a part of the step's work, which the compute worker launches. It writes new K and V to the blocks
// itself where they are whole.
// Threads: reactor-owned, as Crossing.
class CudaAttentionExecutor::OneGpuCrossing final : public Crossing {
 public:
  OneGpuCrossing(CudaAttentionExecutor& executor, exchange::SharedGpu& gpu) : Crossing(executor), gpu_(gpu) {}
  absl::Status Use(const exchange::Seam& seam, MicroBatchId id, MicroBatch& batch) override;
  absl::StatusOr<transport::LentBytes> Run(MicroBatchId id, int op, std::span<const std::byte> key_value,
                                           MicroBatch& batch) override;
  absl::StatusOr<transport::LentBytes> RunState(MicroBatchId id, int op, std::span<const std::byte> key_value,
                                                MicroBatch& batch) override;

 private:
  absl::Status Add(MicroBatchId id, int op, const std::byte* key_value, MicroBatch& batch);

  exchange::SharedGpu& gpu_;
};

// BetweenGpus: kernels wait for q, k and v in this worker's memory and store o into the peer's. Steps of several
// micro-batches run side by side, each in a stream of its own.
// Threads: reactor-owned, as Crossing.
class CudaAttentionExecutor::PeerCrossing final : public Crossing {
 public:
  PeerCrossing(CudaAttentionExecutor& executor, int micro_batches) : Crossing(executor), steps_(micro_batches) {}
  ~PeerCrossing() override { (void)PeerCrossing::Synchronize(); }
  bool answers_are_here() const override { return false; }
  bool records_states() const override { return true; }
  absl::Status Use(const exchange::Seam& seam, MicroBatchId id, MicroBatch& batch) override;
  absl::Status Begin(MicroBatchId id, MicroBatch& batch) override;
  absl::StatusOr<transport::LentBytes> Run(MicroBatchId id, int op, std::span<const std::byte> key_value,
                                           MicroBatch& batch) override;
  absl::StatusOr<transport::LentBytes> RunState(MicroBatchId id, int op, std::span<const std::byte> key_value,
                                                MicroBatch& batch) override;
  absl::Status Launch(MicroBatch& batch) override { return batch.work->Launch(*batch.stream); }
  absl::Status Synchronize() override;

 private:
  static constexpr int64_t kMostGraphRows = 256;  // of a step that is recorded

  struct Step {
    exchange::GpuExchange* peer = nullptr;
    std::unique_ptr<kernels::cuda::CudaStream> stream;
    kernels::cuda::StepWork work;
    kernels::cuda::CudaEvent copied;
    bool waits_apart = false;
  };
  std::vector<Step> steps_;           // by micro-batch
  std::optional<MicroBatchId> last_;  // whose step began last
};

}  // namespace dovetail::attention
