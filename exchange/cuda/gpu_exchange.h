#pragma once
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "absl/time/time.h"
#include "base/ids.h"
#include "base/status.h"
#include "kernels/cuda/exchange/exchange_args.h"
#include "kernels/cuda/runtime/cuda_device.h"
#include "proto/attention_spec.h"
#include "transport/device_link.h"

namespace dovetail::exchange {

// Memory that other processes were shown. They may have it mapped for as long as they live, and what maps it for them
// goes by its address: it is never freed before this is, and taken anew by exchanges of the same size.
// Threads: reactor-owned; at its end no kernel uses it.
class ExchangeMemory {
 public:
  absl::StatusOr<std::unique_ptr<kernels::Buffer>> Take(kernels::cuda::CudaDevice& device, size_t bytes);
  void GiveBack(std::unique_ptr<kernels::Buffer> memory);

 private:
  std::vector<std::unique_ptr<kernels::Buffer>> unused_;
};

// What a worker makes exchanges with. The device outlives them. Copies share links and memory: one of these a process
// and GPU.
struct GpuExchangeMeans {
  kernels::cuda::CudaDevice* device = nullptr;
  std::shared_ptr<transport::DeviceLinks> links;  // null: layers are exchanged through the hosts
  std::string why_not;                            // one line, without links
  bool required = false;                          // with peers that have a GPU nothing else will do
  bool on_cpu = true;                             // there is no GPU to speak of
  std::shared_ptr<ExchangeMemory> memory = std::make_shared<ExchangeMemory>();
  explicit operator bool() const { return device != nullptr && links != nullptr; }
};

// How much room a link has. Both sides must have the same; the compute worker chooses.
struct ExchangeRoom {
  uint32_t micro_batches = 0;
  uint32_t rows = 0;  // of a step; larger ones go through the hosts
  // Of a row, the most of all layer groups; a linear state's gates are among key_value_bytes.
  uint32_t query_bytes = 0, key_value_bytes = 0, partial_bytes = 0;

  static ExchangeRoom Of(const proto::AttentionTable& table, int micro_batches, int rows);
  absl::Status Validate() const;
  size_t slot_bytes() const;  // of a micro-batch
  bool operator==(const ExchangeRoom&) const = default;
};

// The device-driven exchange of layers between a compute worker's GPU and an attention worker's, of one peer: q, k and
// v go into a slot of the attention worker's GPU memory, o into one of the compute worker's, each followed by a number
// (kernels/cuda/exchange/exchange_args.h). One slot a micro-batch and direction is enough: a sender has always received
// the answer to what it sent before. Steps are numbered by the frames that begin them, so both sides know the number.
// Threads: reactor-owned.
class GpuExchange {
 public:
  static constexpr uint64_t kDeadlineNs = 2'000'000'000;

  // kResourceExhausted: no memory for the slots; otherwise why there is no link.
  static absl::StatusOr<std::unique_ptr<GpuExchange>> Create(const GpuExchangeMeans& means, const ExchangeRoom& room);
  ~GpuExchange();  // waits for the streams of its steps, which must still be there

  std::string offer() const;  // for the peer: room, GPU and link
  static absl::StatusOr<ExchangeRoom> RoomOf(std::string_view offer);
  absl::Status Accept(std::string_view offer);
  absl::StatusOr<bool> Progress();  // true: kernels here reach the peer
  // The peer has said that it is there, too.
  void PeerIsThere() { peer_there_ = true; }
  bool there() const { return there_ && peer_there_ && !lost_; }
  bool linked() const { return there_; }
  const std::string& peer_gpu() const { return peer_gpu_; }  // its place on the bus; once Accept went well

  const ExchangeRoom& room() const { return room_; }
  kernels::cuda::ExchangeEnd End(MicroBatchId id) const;
  std::byte* own_slot(MicroBatchId id) const { return Slot(memory_->data(), id); }
  std::byte* peer_slot(MicroBatchId id) const { return Slot(link_->peer_memory(), id); }
  // k and v follow q in the slot of the attention worker.
  size_t key_value_at() const { return (size_t{room_.rows} * room_.query_bytes + 255) / 256 * 256; }

  // Before the first kernel of a step, in its stream. `turn`: the step takes turns with others of this GPU, in memory
  // that outlives it; null: it does not.
  absl::Status BeginStep(kernels::cuda::CudaStream& stream, MicroBatchId id, StepId step,
                         kernels::cuda::ExchangeTurn* turn = nullptr);
  // Another stream stores into the peer's memory, too. It must still be there when this goes.
  void StoresFrom(kernels::cuda::CudaStream& stream) { streams_.insert(&stream); }
  // Part of a step's work, behind its last wait; Status may be asked once that has run. kUnavailable: the step failed.
  absl::Status FetchStatus(kernels::cuda::CudaStream& stream, MicroBatchId id);
  absl::Status Status(MicroBatchId id) const;
  bool Fetched(MicroBatchId id, StepId step) const;  // the status at hand is this step's
  bool FailedByPeer(MicroBatchId id) const;          // not by another of the step's
  bool MissedDeadline(MicroBatchId id) const;        // the peer did
  // Then also: how long kernels here waited for the peer and then for their turn, and for how long the peer was busy
  // with what it answered.
  struct Times {
    absl::Duration waited, turn, peer_busy;
  };
  Times TimesOf(MicroBatchId id) const;

  // The step failed on this host or on the peer's: kernels of either GPU that wait for a message of it, or of an
  // earlier one of the micro-batch, stop. Does not wait.
  absl::Status EndFailed(MicroBatchId id, StepId step);
  // The peer is lost: kernels that wait for it stop. Does not wait.
  absl::Status GiveUp();

 private:
  GpuExchange(const GpuExchangeMeans& means, const ExchangeRoom& room) : means_(means), room_(room) {}
  std::byte* Slot(std::byte* memory, MicroBatchId id) const;
  kernels::cuda::ExchangeWords* StatusWords(MicroBatchId id) const;  // pinned

  const GpuExchangeMeans means_;
  const ExchangeRoom room_;
  std::unique_ptr<kernels::Buffer> memory_;  // words, then slots
  std::unique_ptr<kernels::Buffer> pinned_;  // numbers of steps, statuses, what gives up
  std::unique_ptr<transport::DeviceLink> link_;
  std::unique_ptr<kernels::cuda::CudaStream> aside_;
  std::set<kernels::cuda::CudaStream*> streams_;  // of its steps
  uint64_t begun_ = 0, failed_ = 0;
  std::string peer_gpu_;
  bool there_ = false, peer_there_ = false, lost_ = false;
};

}  // namespace dovetail::exchange
