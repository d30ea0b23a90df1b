#include "compute_worker/cuda/cuda_rank_rows.h"

#include <algorithm>
#include <utility>

#include "compute_worker/core/compute_worker_core.h"
#include "compute_worker/cuda/prompt_rows.h"

namespace dovetail::compute {

using kernels::cuda::CudaStream;

absl::StatusOr<std::unique_ptr<CudaRankRows>> CudaRankRows::Create(kernels::cuda::CudaDevice& device,
                                                                   CudaRankMemory& memory) {
  std::unique_ptr<CudaRankRows> made(new CudaRankRows(device, memory));
  DT_ASSIGN_OR_RETURN(made->hand_ons_, device.CreateCudaStream());
  return made;
}

CudaRankRows::~CudaRankRows() {
  (void)copies_.SynchronizeStatus();
  if (hand_ons_ != nullptr) (void)hand_ons_->SynchronizeStatus();
}

// A piece that is large enough and that nothing on the device reads any more; else a second one, so that one is filled
// while the other is read; else the one whose readers are nearest to their end. A new one takes the place of one that
// is too small: those of a prompt's parts have one size.
absl::StatusOr<std::shared_ptr<CudaRankRows::Piece>> CudaRankRows::Find(Pieces& pieces, size_t bytes, bool pinned,
                                                                        CudaStream& fills) {
  const auto idle = [pinned](const auto& piece) {
    return piece->pinned == pinned && !piece->in_use.load(std::memory_order_acquire);
  };
  auto found = pieces.end(), oldest = pieces.end();
  for (auto piece = pieces.begin(); piece != pieces.end() && found == pieces.end(); ++piece) {
    if (!idle(*piece) || (*piece)->memory->size_bytes() < bytes) continue;
    DT_ASSIGN_OR_RETURN(const bool read, (*piece)->read.Done());
    if (read) found = piece;
    if (oldest == pieces.end()) oldest = piece;
  }
  const auto alike =
      std::count_if(pieces.begin(), pieces.end(), [pinned](const auto& piece) { return piece->pinned == pinned; });
  if (found == pieces.end() && alike >= kRingShards) found = oldest;
  if (found == pieces.end()) {
    if (oldest == pieces.end()) {
      const auto small = std::find_if(pieces.begin(), pieces.end(), idle);
      if (small != pieces.end()) {  // what still runs uses its memory
        DT_RETURN_IF_ERROR(fills.SynchronizeStatus());
        DT_RETURN_IF_ERROR((*small)->read.Synchronize());
        pieces.erase(small);
      }
    }
    DT_ASSIGN_OR_RETURN(std::shared_ptr<Piece> piece, MakePiece(bytes, pinned));
    found = pieces.insert(pieces.end(), std::move(piece));
  }
  (*found)->in_use.store(true, std::memory_order_relaxed);
  std::rotate(found, found + 1, pieces.end());
  return pieces.back();
}

absl::StatusOr<std::shared_ptr<CudaRankRows::Piece>> CudaRankRows::MakePiece(size_t bytes, bool pinned) {
  auto piece = std::make_shared<Piece>();
  piece->pinned = pinned;
  auto memory = pinned ? device_.AllocatePinned(bytes) : memory_.Allocate(bytes);
  if (absl::IsResourceExhausted(memory.status())) memory = device_.AllocatePinned(bytes);  // slower
  DT_ASSIGN_OR_RETURN(piece->memory, std::move(memory));
  DT_ASSIGN_OR_RETURN(piece->copied, device_.CreateEvent());
  DT_ASSIGN_OR_RETURN(piece->read, device_.CreateEvent());
  return piece;
}

// Parts of prompts differ a little in size: room for an eighth more.
absl::Status CudaRankRows::Reserve(Pieces& pieces, size_t bytes, size_t count, bool pinned, CudaStream& fills) {
  const auto fits = [&](const auto& piece) { return piece->pinned == pinned && piece->memory->size_bytes() >= bytes; };
  for (size_t there = std::count_if(pieces.begin(), pieces.end(), fits); there < count; ++there) {
    const auto small = std::find_if(pieces.begin(), pieces.end(), [&](const auto& piece) {
      return piece->pinned == pinned && !fits(piece) && !piece->in_use.load(std::memory_order_acquire);
    });
    if (small != pieces.end()) {
      DT_RETURN_IF_ERROR(fills.SynchronizeStatus());
      DT_RETURN_IF_ERROR((*small)->read.Synchronize());
      pieces.erase(small);
    }
    DT_ASSIGN_OR_RETURN(std::shared_ptr<Piece> piece, MakePiece(bytes + bytes / 8, pinned));
    pieces.insert(pieces.begin(), std::move(piece));
  }
  return absl::OkStatus();
}

absl::Status CudaRankRows::Reserve(size_t bytes, size_t given, size_t taken, bool on_device, CudaStream& fills) {
  DT_RETURN_IF_ERROR(Reserve(given_, bytes, given, /*pinned=*/!on_device, fills));
  return Reserve(taken_, bytes, taken, /*pinned=*/false, copies_);
}

std::shared_ptr<const void> CudaRankRows::OwnerOf(std::shared_ptr<Piece> piece) {
  const void* const memory = piece->memory->data();
  return {memory, [piece = std::move(piece)](const void*) { piece->in_use.store(false, std::memory_order_release); }};
}

CudaRankRows::Piece* CudaRankRows::PieceAt(const Pieces& pieces, const std::byte* memory) {
  const auto found =
      std::find_if(pieces.begin(), pieces.end(), [&](const auto& piece) { return piece->memory->data() == memory; });
  return found == pieces.end() ? nullptr : found->get();
}

absl::StatusOr<CudaRankRows::Given> CudaRankRows::Give(size_t bytes, bool on_device, CudaStream& stream) {
  DT_ASSIGN_OR_RETURN(std::shared_ptr<Piece> piece, Find(given_, bytes, /*pinned=*/!on_device, stream));
  std::byte* const memory = piece->memory->data();
  return Given{memory, {std::span<const std::byte>(memory, bytes), OwnerOf(std::move(piece))}};
}

absl::Status CudaRankRows::Fills(std::span<const std::byte> given, CudaStream& stream) {
  Piece* const piece = PieceAt(given_, given.data());
  return piece == nullptr ? absl::OkStatus() : stream.Record(piece->copied);
}

absl::StatusOr<bool> CudaRankRows::Filled(std::span<const std::byte> given) const {
  const Piece* const piece = PieceAt(given_, given.data());
  return piece == nullptr ? absl::StatusOr<bool>(true) : piece->copied.Done();
}

absl::StatusOr<RankTensor> CudaRankRows::Take(std::span<const std::byte> rows) {
  DT_ASSIGN_OR_RETURN(std::shared_ptr<Piece> piece, Find(taken_, rows.size(), /*pinned=*/false, copies_));
  DT_RETURN_IF_ERROR(copies_.Wait(piece->read));
  DT_RETURN_IF_ERROR(copies_.Copy(piece->memory->data(), rows.data(), rows.size()));
  DT_RETURN_IF_ERROR(copies_.Record(piece->copied));
  const std::span<const std::byte> memory(piece->memory->data(), rows.size());
  return RankTensor(memory, OwnerOf(std::move(piece)));
}

absl::StatusOr<bool> CudaRankRows::Taken(const RankTensor& rows) const {
  const Piece* const piece = PieceAt(taken_, rows.bytes.data());
  return piece == nullptr ? absl::StatusOr<bool>(true) : piece->copied.Done();
}

absl::StatusOr<transport::LentBytes> CudaRankRows::HandOn(const proto::SoftmaxSpec& spec,
                                                          std::span<const std::byte> taken,
                                                          std::shared_ptr<const void> owner, int64_t first_row,
                                                          bool on_device) {
  if (on_device && first_row == 0) return transport::LentBytes{taken, std::move(owner)};
  const size_t key = KeyBytes(spec, 1, spec.kv_heads), value = ValueBytes(spec, 1, spec.kv_heads);
  const size_t count = taken.size() / (key + value), dropped = static_cast<size_t>(first_row), rows = count - dropped;
  const size_t bytes = rows * (key + value);
  DT_ASSIGN_OR_RETURN(std::shared_ptr<Piece> piece, Find(handed_on_, bytes, /*pinned=*/!on_device, *hand_ons_));
  std::byte* const memory = piece->memory->data();
  DT_RETURN_IF_ERROR(hand_ons_->Copy(memory, taken.data() + dropped * key, rows * key));
  DT_RETURN_IF_ERROR(hand_ons_->Copy(memory + rows * key, taken.data() + count * key + dropped * value, rows * value));
  DT_RETURN_IF_ERROR(hand_ons_->Record(piece->copied));
  return transport::LentBytes{std::span<const std::byte>(memory, bytes), OwnerOf(std::move(piece))};
}

absl::StatusOr<bool> CudaRankRows::HandedOn(std::span<const std::byte> rows) const {
  const Piece* const piece = PieceAt(handed_on_, rows.data());
  return piece == nullptr ? absl::StatusOr<bool>(true) : piece->copied.Done();
}

absl::Status CudaRankRows::Reads(std::span<const std::byte> rows, CudaStream& stream) {
  Piece* const piece = PieceAt(taken_, rows.data());
  return piece == nullptr ? absl::OkStatus() : stream.Record(piece->read);
}

}  // namespace dovetail::compute
