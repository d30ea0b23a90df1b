#include "exchange/cuda/gpu_exchange.h"

#include <algorithm>
#include <cstring>

#include "kernels/cuda/cuda_exchange.h"

namespace dovetail::exchange {

using kernels::cuda::CudaStream;
using kernels::cuda::ExchangeEnd;
using kernels::cuda::ExchangeWords;

namespace {

constexpr uint32_t kElement = 2;  // bytes of the wire types of a GPU
constexpr uint32_t kRowsBeyond = 16;  // what reads a slot as rows of a matrix may take a few more of them
constexpr uint32_t kMostMicroBatches = 16, kMostRows = 65536, kMostRowBytes = 1 << 20;
constexpr uint64_t kNumbersInFlight = 64;  // steps that are enqueued and have not begun
constexpr size_t kWordsBytes = kMostMicroBatches * sizeof(ExchangeWords);
static_assert(kWordsBytes % 256 == 0);

// Pinned memory: {number, 0} for steps in flight, a status for each micro-batch, all ones.
constexpr size_t kStatusAt = kNumbersInFlight * 2, kGiveUpAt = kStatusAt + kMostMicroBatches;
constexpr size_t kPinnedWords = kGiveUpAt + 1;

uint64_t* Words(const std::unique_ptr<kernels::Buffer>& pinned) {
  return reinterpret_cast<uint64_t*>(pinned->data());
}

}  // namespace

ExchangeRoom ExchangeRoom::Of(const proto::AttentionTable& table, int micro_batches, int rows) {
  ExchangeRoom room;
  room.micro_batches = static_cast<uint32_t>(micro_batches);
  room.rows = static_cast<uint32_t>(rows);
  for (const proto::SoftmaxSpec& spec : table.views) {
    const auto bytes = [](int heads, int dim) { return static_cast<uint32_t>(heads * dim) * kElement; };
    room.query_bytes = std::max(room.query_bytes, bytes(spec.query_heads, spec.key_dim));
    room.key_value_bytes = std::max(room.key_value_bytes, bytes(spec.kv_heads, spec.key_dim + spec.value_dim));
    room.partial_bytes = std::max(room.partial_bytes, bytes(spec.query_heads, spec.value_dim));
  }
  return room;
}

absl::Status ExchangeRoom::Validate() const {
  const bool good = micro_batches >= 1 && micro_batches <= kMostMicroBatches && rows >= 1 && rows <= kMostRows &&
                    std::max({query_bytes, key_value_bytes, partial_bytes}) <= kMostRowBytes;
  if (good) return absl::OkStatus();
  return InvalidArgument("an exchange between GPUs of ", micro_batches, " micro-batches of ", rows,
                         " rows is outside the limits of ", kMostMicroBatches, " and ", kMostRows);
}

size_t ExchangeRoom::slot_bytes() const {
  const size_t row = std::max<size_t>(size_t{query_bytes} + key_value_bytes, partial_bytes);
  return ((rows + kRowsBeyond) * row + 4095) / 4096 * 4096;
}

absl::StatusOr<std::unique_ptr<GpuExchange>> GpuExchange::Create(const GpuExchangeMeans& means,
                                                                 const ExchangeRoom& room) {
  DT_RETURN_IF_ERROR(room.Validate());
  std::unique_ptr<GpuExchange> made(new GpuExchange(means, room));
  const size_t bytes = kWordsBytes + room.micro_batches * room.slot_bytes() + transport::DeviceLink::kTouched;
  DT_ASSIGN_OR_RETURN(made->memory_, means.device->Allocate(bytes));
  DT_ASSIGN_OR_RETURN(made->pinned_, means.device->AllocatePinned(kPinnedWords * sizeof(uint64_t)));
  Words(made->pinned_)[kGiveUpAt] = ~uint64_t{0};
  DT_ASSIGN_OR_RETURN(made->aside_, means.device->CreateCudaStream());
  DT_RETURN_IF_ERROR(made->aside_->Fill(made->memory_->data(), 0, bytes));
  DT_RETURN_IF_ERROR(made->aside_->SynchronizeStatus());
  DT_RETURN_IF_ERROR(made->aside_->UseDevice());
  DT_ASSIGN_OR_RETURN(made->link_, means.links->Link(made->memory_->data(), bytes));
  return made;
}

// Kernels that still wait for the peer, or store into its memory, end before that is unmapped.
GpuExchange::~GpuExchange() {
  if (link_ == nullptr) return;
  (void)GiveUp();
  (void)aside_->SynchronizeStatus();
  if (const auto stream = means_.device->WorkerStream(); stream.ok()) (void)(*stream)->SynchronizeStatus();
  (void)aside_->UseDevice();
  link_.reset();
}

std::string GpuExchange::offer() const {
  return std::string(reinterpret_cast<const char*>(&room_), sizeof(room_)) + link_->offer();
}

absl::StatusOr<ExchangeRoom> GpuExchange::RoomOf(std::string_view offer) {
  ExchangeRoom room;
  if (offer.size() < sizeof(room)) return InvalidArgument("that is no offer of an exchange between GPUs");
  std::memcpy(&room, offer.data(), sizeof(room));
  DT_RETURN_IF_ERROR(room.Validate());
  return room;
}

absl::Status GpuExchange::Accept(std::string_view offer) {
  DT_ASSIGN_OR_RETURN(const ExchangeRoom theirs, RoomOf(offer));
  if (theirs != room_) return InvalidArgument("the two sides of an exchange between GPUs have unlike room");
  DT_RETURN_IF_ERROR(aside_->UseDevice());
  return link_->Accept(offer.substr(sizeof(theirs)));
}

absl::StatusOr<bool> GpuExchange::Progress() {
  DT_RETURN_IF_ERROR(aside_->UseDevice());
  DT_ASSIGN_OR_RETURN(there_, link_->Progress());
  return there_;
}

ExchangeEnd GpuExchange::End(MicroBatchId id) const {
  return {reinterpret_cast<ExchangeWords*>(memory_->data()) + id.value(),
          reinterpret_cast<ExchangeWords*>(link_->peer_memory()) + id.value(), kDeadlineNs};
}

std::byte* GpuExchange::Slot(std::byte* memory, MicroBatchId id) const {
  return memory + kWordsBytes + id.value() * room_.slot_bytes();
}

absl::Status GpuExchange::BeginStep(CudaStream& stream, MicroBatchId id, StepId step) {
  uint64_t* const number = Words(pinned_) + begun_++ % kNumbersInFlight * 2;
  number[0] = step.value() * kernels::cuda::kExchangeOps;
  number[1] = 0;
  return stream.Copy(&End(id).own->step, number, 2 * sizeof(uint64_t));
}

absl::Status GpuExchange::FetchStatus(CudaStream& stream, MicroBatchId id) {
  return stream.Copy(Words(pinned_) + kStatusAt + id.value(), &End(id).own->failure, sizeof(uint64_t));
}

absl::Status GpuExchange::Status(MicroBatchId id) const {
  return kernels::cuda::ExchangeStatus(Words(pinned_)[kStatusAt + id.value()]);
}

absl::Status GpuExchange::GiveUp() {
  lost_ = true;
  if (!there_) return absl::OkStatus();
  for (uint32_t m = 0; m < room_.micro_batches; ++m)
    DT_RETURN_IF_ERROR(aside_->Copy(&End(MicroBatchId(static_cast<uint16_t>(m))).own->given_up,
                                    Words(pinned_) + kGiveUpAt, sizeof(uint64_t)));
  return absl::OkStatus();
}

}  // namespace dovetail::exchange
