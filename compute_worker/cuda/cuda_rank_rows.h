#pragma once
#include <atomic>
#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "base/status.h"
#include "compute_worker/core/rank_tensor.h"
#include "kernels/cuda/runtime/cuda_device.h"
#include "transport/lent_bytes.h"

namespace dovetail::compute {

// Memory for the K and V that ranks of a prefill group give each other, on a GPU: what this rank sends, and what it
// got. Pieces are used again when nothing holds them. A rank has those of kRankOpsAhead ops for each other rank.
//
// What is sent lies in device memory where all ranks are in this process: the receiver's copy engine takes it from
// there, over NVLink where the GPUs have it. Else it lies in pinned host memory, and travels in frames.
//
// Errors: kResourceExhausted: no memory; kInternal: the device is lost.
// Ownership: must not outlive the device.
// Threads: thread-compatible, except that any thread may release the owners of what it gave.
class CudaRankRows {
 public:
  // `on_device`: all other ranks reach this GPU's memory.
  static absl::StatusOr<std::unique_ptr<CudaRankRows>> Create(kernels::cuda::CudaDevice& device, bool on_device);
  bool on_device() const { return on_device_; }
  ~CudaRankRows();  // waits for its own copies

  // Memory for rows that are sent, which work of `stream` fills; in use until the owner of `rows` goes. All of one
  // object are filled in one stream, or the host waits for what fills them.
  struct Given {
    std::byte* memory = nullptr;
    transport::LentBytes rows;
  };
  absl::StatusOr<Given> Give(size_t bytes, kernels::cuda::CudaStream& stream);

  // Rows that came, from host or device memory: begins to copy them to this device. They are read until Taken.
  absl::StatusOr<RankTensor> Take(std::span<const std::byte> rows);
  absl::StatusOr<bool> Taken(const RankTensor& rows) const;

  // `stream` has been given what reads rows that were Taken. `rows`: those of the tensor.
  absl::Status Reads(std::span<const std::byte> rows, kernels::cuda::CudaStream& stream);

 private:
  struct Piece {
    std::unique_ptr<kernels::Buffer> memory;
    kernels::cuda::CudaEvent copied, read;  // of the last use
    std::atomic<bool> in_use{false};
  };
  using Pieces = std::vector<std::shared_ptr<Piece>>;

  CudaRankRows(kernels::cuda::CudaDevice& device, bool on_device) : device_(device), on_device_(on_device) {}
  absl::StatusOr<std::shared_ptr<Piece>> Find(Pieces& pieces, size_t bytes, bool pinned,
                                              kernels::cuda::CudaStream& fills);
  static std::shared_ptr<const void> OwnerOf(std::shared_ptr<Piece> piece);
  Piece* PieceAt(const std::byte* memory) const;

  kernels::cuda::CudaDevice& device_;
  const bool on_device_;
  std::unique_ptr<kernels::cuda::CudaStream> copies_;  // of what came
  Pieces given_, taken_;
};

}  // namespace dovetail::compute
