#pragma once
#include <atomic>
#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "base/status.h"
#include "compute_worker/core/rank_tensor.h"
#include "compute_worker/cuda/cuda_rank_memory.h"
#include "kernels/cuda/runtime/cuda_device.h"
#include "proto/attention_spec.h"
#include "transport/lent_bytes.h"

namespace dovetail::compute {

// Memory for what ranks of a prefill group give each other, on a GPU: what this rank sends, and what it got. It is K
// and V, and in a head switch q, k and v of some heads, and what attention to those gave. Pieces are used again when
// nothing holds them. A rank has those of kRankOpsAhead ops for each other rank; in a ring those of kRingShards ranks,
// and what is on its way to the next one; in a head switch of each other rank what it sent of two ops.
//
// What is sent lies in device memory where all other ranks of the step reach that (CudaRankMemory): the receiver's copy
// engine takes it from there, over NVLink where the GPUs have it. Else it lies in pinned host memory, and travels in
// frames. `on_device` of a step says which, and is the same for all of it.
//
// Errors: kResourceExhausted: no memory; kInternal: the device is lost.
// Ownership: must not outlive `memory`.
// Threads: thread-compatible, except that any thread may release the owners of what it gave.
class CudaRankRows {
 public:
  static absl::StatusOr<std::unique_ptr<CudaRankRows>> Create(kernels::cuda::CudaDevice& device,
                                                              CudaRankMemory& memory);
  ~CudaRankRows();  // waits for its own copies

  // So that so many pieces of so many bytes are there, to be given and to be taken: what is allocated later holds up
  // the GPU, and other GPUs with it. Waits for what uses those that are too small. `fills`: the stream that fills given
  // ones.
  absl::Status Reserve(size_t bytes, size_t given, size_t taken, bool on_device, kernels::cuda::CudaStream& fills);

  // Memory for rows that are sent, which work of `stream` fills; in use until the owner of `rows` goes. All of one
  // object are filled in one stream, or the host waits for what fills them.
  struct Given {
    std::byte* memory = nullptr;
    transport::LentBytes rows;
  };
  absl::StatusOr<Given> Give(size_t bytes, bool on_device, kernels::cuda::CudaStream& stream);
  // `stream` has been given all that fills what Give gave; and whether that has been done.
  absl::Status Fills(std::span<const std::byte> given, kernels::cuda::CudaStream& stream);
  absl::StatusOr<bool> Filled(std::span<const std::byte> given) const;

  // Rows that came, from host or device memory: begins to copy them to this device. They are read until Taken.
  absl::StatusOr<RankTensor> Take(std::span<const std::byte> rows);
  absl::StatusOr<bool> Taken(const RankTensor& rows) const;

  // Of rows that were Taken, those from first_row on, for the next rank: themselves, if they are all of them and it
  // reaches them; else a copy, which is there once HandedOn says so. Until then `owner` is to be kept.
  absl::StatusOr<transport::LentBytes> HandOn(const proto::SoftmaxSpec& spec, std::span<const std::byte> taken,
                                              std::shared_ptr<const void> owner, int64_t first_row, bool on_device);
  absl::StatusOr<bool> HandedOn(std::span<const std::byte> rows) const;

  // `stream` has been given what reads rows that were Taken. `rows`: those of the tensor.
  absl::Status Reads(std::span<const std::byte> rows, kernels::cuda::CudaStream& stream);

 private:
  struct Piece {
    std::unique_ptr<kernels::Buffer> memory;
    bool pinned = false;                    // as it was asked for: without room on the GPU the others are, too
    kernels::cuda::CudaEvent copied, read;  // of the last use
    std::atomic<bool> in_use{false};
  };
  using Pieces = std::vector<std::shared_ptr<Piece>>;

  CudaRankRows(kernels::cuda::CudaDevice& device, CudaRankMemory& memory)
      : device_(device), memory_(memory), copies_(memory.reads()) {}
  absl::StatusOr<std::shared_ptr<Piece>> Find(Pieces& pieces, size_t bytes, bool pinned,
                                              kernels::cuda::CudaStream& fills);
  absl::StatusOr<std::shared_ptr<Piece>> MakePiece(size_t bytes, bool pinned);
  absl::Status Reserve(Pieces& pieces, size_t bytes, size_t count, bool pinned, kernels::cuda::CudaStream& fills);
  static std::shared_ptr<const void> OwnerOf(std::shared_ptr<Piece> piece);
  static Piece* PieceAt(const Pieces& pieces, const std::byte* memory);

  kernels::cuda::CudaDevice& device_;
  CudaRankMemory& memory_;
  kernels::cuda::CudaStream& copies_;                    // of what came
  std::unique_ptr<kernels::cuda::CudaStream> hand_ons_;  // of that, for the next rank
  Pieces given_, taken_, handed_on_;                     // that were used longest ago first
};

}  // namespace dovetail::compute
