#include "exchange/cuda/gpu_exchange.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>

#include "kernels/cuda/exchange/cuda_exchange.h"

namespace dovetail::exchange {

using kernels::cuda::CudaStream;
using kernels::cuda::ExchangeEnd;
using kernels::cuda::ExchangeWords;

namespace {

constexpr uint32_t kElement = 2;      // bytes of the wire types of a GPU
constexpr uint32_t kRowsBeyond = 16;  // what reads a slot as rows of a matrix may take a few more of them
constexpr uint32_t kMostMicroBatches = 16, kMostRows = 65536, kMostRowBytes = 1 << 20;
constexpr size_t kGpuBytes = sizeof(kernels::cuda::DeviceInfo::pci);  // of an offer
constexpr uint64_t kNumbersInFlight = 64;                             // steps that are enqueued and have not begun
constexpr size_t kWordsBytes = kMostMicroBatches * sizeof(ExchangeWords);
static_assert(kWordsBytes % 256 == 0);

// Pinned memory: what begins the steps in flight, words of each micro-batch, all ones, numbers of failed steps.
constexpr size_t kBeginWords = (sizeof(ExchangeWords) - offsetof(ExchangeWords, step)) / 8;
constexpr size_t kTurnAt = (offsetof(ExchangeWords, turn) - offsetof(ExchangeWords, step)) / 8;
constexpr size_t kFetchedAt = kNumbersInFlight * kBeginWords;
constexpr size_t kGiveUpAt = kFetchedAt + kMostMicroBatches * sizeof(ExchangeWords) / 8;
constexpr size_t kFailedAt = kGiveUpAt + 1, kPinnedWords = kFailedAt + kNumbersInFlight;

uint64_t* Words(const std::unique_ptr<kernels::Buffer>& pinned) { return reinterpret_cast<uint64_t*>(pinned->data()); }

}  // namespace

ExchangeRoom ExchangeRoom::Of(const proto::AttentionTable& table, int micro_batches, int rows) {
  ExchangeRoom room;
  room.micro_batches = static_cast<uint32_t>(micro_batches);
  room.rows = static_cast<uint32_t>(rows);
  for (const proto::SoftmaxSpec& spec : table.views) {
    const auto bytes = [](int heads, int dim) { return static_cast<uint32_t>(heads * dim) * kElement; };
    room.query_bytes = std::max(room.query_bytes, bytes(spec.query_heads, spec.key_dim));
    const auto gates = static_cast<uint32_t>(spec.kv_heads * spec.gates) * uint32_t{sizeof(float)};
    room.key_value_bytes = std::max(room.key_value_bytes, bytes(spec.kv_heads, spec.key_dim + spec.value_dim) + gates);
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

absl::StatusOr<std::unique_ptr<kernels::Buffer>> ExchangeMemory::Take(kernels::cuda::CudaDevice& device, size_t bytes) {
  const auto it =
      std::find_if(unused_.begin(), unused_.end(), [&](const auto& memory) { return memory->size_bytes() == bytes; });
  if (it == unused_.end()) return device.Allocate(bytes);
  std::unique_ptr<kernels::Buffer> memory = std::move(*it);
  unused_.erase(it);
  return memory;
}

void ExchangeMemory::GiveBack(std::unique_ptr<kernels::Buffer> memory) { unused_.push_back(std::move(memory)); }

absl::StatusOr<std::unique_ptr<GpuExchange>> GpuExchange::Create(const GpuExchangeMeans& means,
                                                                 const ExchangeRoom& room) {
  DT_RETURN_IF_ERROR(room.Validate());
  std::unique_ptr<GpuExchange> made(new GpuExchange(means, room));
  const size_t bytes = kWordsBytes + room.micro_batches * room.slot_bytes() + transport::DeviceLink::kTouched;
  DT_ASSIGN_OR_RETURN(made->memory_, means.memory->Take(*means.device, bytes));
  DT_ASSIGN_OR_RETURN(made->pinned_, means.device->AllocatePinned(kPinnedWords * sizeof(uint64_t)));
  std::fill_n(Words(made->pinned_), kPinnedWords, 0);
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
  if (link_ != nullptr) {
    (void)GiveUp();
    (void)aside_->SynchronizeStatus();
    for (CudaStream* const stream : streams_) (void)stream->SynchronizeStatus();
    (void)aside_->UseDevice();
    link_.reset();
  }
  if (memory_ != nullptr) means_.memory->GiveBack(std::move(memory_));
}

std::string GpuExchange::offer() const {
  std::string gpu = means_.device->info().pci;
  gpu.resize(kGpuBytes);
  return std::string(reinterpret_cast<const char*>(&room_), sizeof(room_)) + gpu + link_->offer();
}

absl::StatusOr<ExchangeRoom> GpuExchange::RoomOf(std::string_view offer) {
  ExchangeRoom room;
  if (offer.size() < sizeof(room) + kGpuBytes) return InvalidArgument("that is no offer of an exchange between GPUs");
  std::memcpy(&room, offer.data(), sizeof(room));
  DT_RETURN_IF_ERROR(room.Validate());
  return room;
}

absl::Status GpuExchange::Accept(std::string_view offer) {
  DT_ASSIGN_OR_RETURN(const ExchangeRoom theirs, RoomOf(offer));
  if (theirs != room_) return InvalidArgument("the two sides of an exchange between GPUs have unlike room");
  peer_gpu_ = offer.substr(sizeof(theirs), kGpuBytes);
  DT_RETURN_IF_ERROR(aside_->UseDevice());
  return link_->Accept(offer.substr(sizeof(theirs) + kGpuBytes));
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

absl::Status GpuExchange::BeginStep(CudaStream& stream, MicroBatchId id, StepId step,
                                    kernels::cuda::ExchangeTurn* turn) {
  uint64_t* const number = Words(pinned_) + begun_++ % kNumbersInFlight * kBeginWords;
  streams_.insert(&stream);
  std::fill_n(number, kBeginWords, 0);
  number[0] = step.value() * kernels::cuda::kExchangeOps;
  number[kTurnAt] = reinterpret_cast<uint64_t>(turn);
  return stream.Copy(&End(id).own->step, number, kBeginWords * sizeof(uint64_t));
}

ExchangeWords* GpuExchange::StatusWords(MicroBatchId id) const {
  return reinterpret_cast<ExchangeWords*>(Words(pinned_) + kFetchedAt) + id.value();
}

absl::Status GpuExchange::FetchStatus(CudaStream& stream, MicroBatchId id) {
  return stream.Copy(StatusWords(id), End(id).own, sizeof(ExchangeWords));
}

absl::Status GpuExchange::Status(MicroBatchId id) const {
  return kernels::cuda::ExchangeStatus(StatusWords(id)->failure);
}

bool GpuExchange::Fetched(MicroBatchId id, StepId step) const {
  return StatusWords(id)->step == step.value() * kernels::cuda::kExchangeOps;
}

bool GpuExchange::FailedByPeer(MicroBatchId id) const {
  const kernels::cuda::ExchangeReason reason = kernels::cuda::DecodeFailure(StatusWords(id)->failure).reason;
  return reason != kernels::cuda::ExchangeReason::kNone && reason != kernels::cuda::ExchangeReason::kElsewhere;
}

bool GpuExchange::MissedDeadline(MicroBatchId id) const {
  return kernels::cuda::DecodeFailure(StatusWords(id)->failure).reason == kernels::cuda::ExchangeReason::kDeadline;
}

GpuExchange::Times GpuExchange::TimesOf(MicroBatchId id) const {
  const ExchangeWords& words = *StatusWords(id);
  return {absl::Nanoseconds(words.waited_ns), absl::Nanoseconds(words.turn_ns), absl::Nanoseconds(words.peer_busy_ns)};
}

absl::Status GpuExchange::EndFailed(MicroBatchId id, StepId step) {
  if (!there_ || lost_ || id.value() >= room_.micro_batches) return absl::OkStatus();
  uint64_t* const number = Words(pinned_) + kFailedAt + failed_++ % kNumbersInFlight;
  *number = (step.value() + 1) * kernels::cuda::kExchangeOps;  // no op of the step has a greater one
  DT_RETURN_IF_ERROR(aside_->Copy(&End(id).peer->given_up, number, sizeof(uint64_t)));
  return aside_->Copy(&End(id).own->given_up, number, sizeof(uint64_t));
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
