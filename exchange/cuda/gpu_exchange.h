#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/ids.h"
#include "base/status.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/exchange_args.h"
#include "proto/attention_spec.h"
#include "transport/device_link.h"

namespace dovetail::exchange {

// What a worker makes exchanges with. All outlive them.
struct GpuExchangeMeans {
  kernels::cuda::CudaDevice* device = nullptr;
  transport::DeviceLinks* links = nullptr;  // null: layers are exchanged through the hosts
  explicit operator bool() const { return device != nullptr && links != nullptr; }
};

// How much room a link has. Both sides must have the same; the compute worker chooses.
struct ExchangeRoom {
  uint32_t micro_batches = 0;
  uint32_t rows = 0;  // of a step; larger ones go through the hosts
  uint32_t query_bytes = 0, key_value_bytes = 0, partial_bytes = 0;  // of a row, the most of all layer groups

  static ExchangeRoom Of(const proto::AttentionTable& table, int micro_batches, int rows);
  absl::Status Validate() const;
  size_t slot_bytes() const;  // of a micro-batch
  bool operator==(const ExchangeRoom&) const = default;
};

// The device-driven exchange of layers between a compute worker's GPU and an attention worker's, of one peer: q, k and
// v go into a slot of the attention worker's GPU memory, o into one of the compute worker's, each followed by a number
// (kernels/cuda/exchange_args.h). One slot a micro-batch and direction is enough: who sends has always received the
// answer to what it sent before. Steps are numbered by the frames that begin them, so both sides know the number.
// Reactor-owned.
class GpuExchange {
 public:
  static constexpr uint64_t kDeadlineNs = 2'000'000'000;

  // kResourceExhausted: no memory for the slots; otherwise why there is no link.
  static absl::StatusOr<std::unique_ptr<GpuExchange>> Create(const GpuExchangeMeans& means, const ExchangeRoom& room);
  ~GpuExchange();  // waits for the device's worker stream, whose kernels use it

  std::string offer() const;  // for the peer: room and link
  static absl::StatusOr<ExchangeRoom> RoomOf(std::string_view offer);
  absl::Status Accept(std::string_view offer);
  absl::StatusOr<bool> Progress();  // true: kernels here reach the peer
  // The peer has said that it is there, too.
  void PeerIsThere() { peer_there_ = true; }
  bool there() const { return there_ && peer_there_ && !lost_; }
  bool linked() const { return there_; }

  const ExchangeRoom& room() const { return room_; }
  kernels::cuda::ExchangeEnd End(MicroBatchId id) const;
  std::byte* own_slot(MicroBatchId id) const { return Slot(memory_->data(), id); }
  std::byte* peer_slot(MicroBatchId id) const { return Slot(link_->peer_memory(), id); }
  // k and v follow q in the slot of the attention worker.
  size_t key_value_at() const { return (size_t{room_.rows} * room_.query_bytes + 255) / 256 * 256; }

  // Before the first kernel of a step, in its stream.
  absl::Status BeginStep(kernels::cuda::CudaStream& stream, MicroBatchId id, StepId step);
  // Part of a step's work, behind its last wait; Status may be asked once that has run. kUnavailable: the step failed.
  absl::Status FetchStatus(kernels::cuda::CudaStream& stream, MicroBatchId id);
  absl::Status Status(MicroBatchId id) const;

  // The peer is lost: kernels that wait for it stop. Waits for nobody.
  absl::Status GiveUp();

 private:
  GpuExchange(const GpuExchangeMeans& means, const ExchangeRoom& room) : means_(means), room_(room) {}
  std::byte* Slot(std::byte* memory, MicroBatchId id) const;

  const GpuExchangeMeans means_;
  const ExchangeRoom room_;
  std::unique_ptr<kernels::Buffer> memory_;  // words, then slots
  std::unique_ptr<kernels::Buffer> pinned_;  // numbers of steps, statuses, what gives up
  std::unique_ptr<transport::DeviceLink> link_;
  std::unique_ptr<kernels::cuda::CudaStream> aside_;
  uint64_t begun_ = 0;
  bool there_ = false, peer_there_ = false, lost_ = false;
};

}  // namespace dovetail::exchange
