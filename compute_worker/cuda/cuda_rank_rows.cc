#include "compute_worker/cuda/cuda_rank_rows.h"

#include <algorithm>
#include <utility>

namespace dovetail::compute {

using kernels::cuda::CudaStream;

absl::StatusOr<std::unique_ptr<CudaRankRows>> CudaRankRows::Create(kernels::cuda::CudaDevice& device, bool on_device) {
  std::unique_ptr<CudaRankRows> made(new CudaRankRows(device, on_device));
  DT_ASSIGN_OR_RETURN(made->copies_, device.CreateCudaStream());
  return made;
}

CudaRankRows::~CudaRankRows() { (void)copies_->SynchronizeStatus(); }

// A piece that is large enough, or a new one in place of one that is too small: those of a prompt's parts have one
// size.
absl::StatusOr<std::shared_ptr<CudaRankRows::Piece>> CudaRankRows::Find(Pieces& pieces, size_t bytes, bool pinned,
                                                                        CudaStream& fills) {
  const auto idle = [](const auto& piece) { return !piece->in_use.load(std::memory_order_acquire); };
  const auto fits = [&](const auto& piece) { return idle(piece) && piece->memory->size_bytes() >= bytes; };
  auto found = std::find_if(pieces.begin(), pieces.end(), fits);
  if (found == pieces.end()) {
    found = std::find_if(pieces.begin(), pieces.end(), idle);
    if (found != pieces.end()) {  // what still runs uses its memory
      DT_RETURN_IF_ERROR(fills.SynchronizeStatus());
      DT_RETURN_IF_ERROR((*found)->read.Synchronize());
      pieces.erase(found);
    }
    auto piece = std::make_shared<Piece>();
    auto memory = pinned ? device_.AllocatePinned(bytes) : device_.Allocate(bytes);
    if (absl::IsResourceExhausted(memory.status())) memory = device_.AllocatePinned(bytes);  // slower
    DT_ASSIGN_OR_RETURN(piece->memory, std::move(memory));
    DT_ASSIGN_OR_RETURN(piece->copied, device_.CreateEvent());
    DT_ASSIGN_OR_RETURN(piece->read, device_.CreateEvent());
    found = pieces.insert(pieces.end(), std::move(piece));
  }
  (*found)->in_use.store(true, std::memory_order_relaxed);
  return *found;
}

std::shared_ptr<const void> CudaRankRows::OwnerOf(std::shared_ptr<Piece> piece) {
  const void* const memory = piece->memory->data();
  return {memory, [piece = std::move(piece)](const void*) { piece->in_use.store(false, std::memory_order_release); }};
}

CudaRankRows::Piece* CudaRankRows::PieceAt(const std::byte* memory) const {
  const auto found =
      std::find_if(taken_.begin(), taken_.end(), [&](const auto& piece) { return piece->memory->data() == memory; });
  return found == taken_.end() ? nullptr : found->get();
}

absl::StatusOr<CudaRankRows::Given> CudaRankRows::Give(size_t bytes, CudaStream& stream) {
  DT_ASSIGN_OR_RETURN(std::shared_ptr<Piece> piece, Find(given_, bytes, /*pinned=*/!on_device_, stream));
  std::byte* const memory = piece->memory->data();
  return Given{memory, {std::span<const std::byte>(memory, bytes), OwnerOf(std::move(piece))}};
}

absl::StatusOr<RankTensor> CudaRankRows::Take(std::span<const std::byte> rows) {
  DT_ASSIGN_OR_RETURN(std::shared_ptr<Piece> piece, Find(taken_, rows.size(), /*pinned=*/false, *copies_));
  DT_RETURN_IF_ERROR(copies_->Wait(piece->read));
  DT_RETURN_IF_ERROR(copies_->Copy(piece->memory->data(), rows.data(), rows.size()));
  DT_RETURN_IF_ERROR(copies_->Record(piece->copied));
  const std::span<const std::byte> memory(piece->memory->data(), rows.size());
  return RankTensor(memory, OwnerOf(std::move(piece)));
}

absl::StatusOr<bool> CudaRankRows::Taken(const RankTensor& rows) const {
  const Piece* const piece = PieceAt(rows.bytes.data());
  return piece == nullptr ? absl::StatusOr<bool>(true) : piece->copied.Done();
}

absl::Status CudaRankRows::Reads(std::span<const std::byte> rows, CudaStream& stream) {
  Piece* const piece = PieceAt(rows.data());
  return piece == nullptr ? absl::OkStatus() : stream.Record(piece->read);
}

}  // namespace dovetail::compute
