#pragma once
#include <memory>
#include <span>
#include <vector>

#include "examples/spatio_temporal/gpu/padded_rows.h"
#include "examples/spatio_temporal/gpu/rank_board.h"
#include "kernels/cuda/runtime/cuda_device.h"
#include "proto/token_layout.h"

namespace dovetail::spatio_temporal {

// One tensor that a stage moves: how it lies before and after, and where, on this rank and on each.
struct Lane {
  std::shared_ptr<const proto::Switch> plan;  // shared by the lanes of tensors of one shape
  PaddedRows from;
  std::vector<PaddedRows> to;  // by rank
};

// One rank's side of switches between GPUs that reach each other's memory. Each destination has a stream of its own:
// copies of long pieces by the copy engines, of short runs by a kernel of a few thread blocks, straight into the
// destination's buffers. What is to be overwritten there must be free: in a pair of blocks that follows from what the
// sender has received (gpu_rank.h).
// Threads: the rank's thread only.
class GpuExchange {
 public:
  static constexpr int64_t kLongCopyBytes = int64_t{64} << 10;  // by a copy engine from here on
  static constexpr int kCopyBlocks = 48;                        // of the kernel, of 512 threads

  // Ownership: device and board outlive it. `compute` is the stream whose work is sent and waits, and outlives it.
  static absl::StatusOr<std::unique_ptr<GpuExchange>> Create(kernels::cuda::CudaDevice& device,
                                                             kernels::cuda::CudaStream& compute, RankBoard& board,
                                                             int rank, int ranks);

  // What Send takes from now on is what `compute` has been given so far.
  absl::Status Ready();
  // Enqueues frames [begin, end) of the `frames` that the lanes move to `destination`, which may be this rank itself,
  // and tells the destination.
  struct Frames {
    int64_t of = 0;
    int64_t begin = 0;
    int64_t end = 0;
  };
  absl::Status Send(std::span<const Lane> lanes, int destination, int64_t stage, const Frames& frames);

  // What `compute` is given from now on comes behind the arrival of so many frames of `stage` from each of the sources.
  struct Arrival {
    int source = 0;
    int64_t frames = 0;
  };
  absl::Status Await(int64_t stage, std::span<const Arrival> arrivals);

  int64_t bytes_sent() const { return bytes_sent_; }  // to other ranks
  // That `compute` stood still in Await, so far. All work must be done.
  absl::StatusOr<double> SecondsWaited();

 private:
  GpuExchange(kernels::cuda::CudaDevice& device, kernels::cuda::CudaStream& compute, RankBoard& board, int rank,
              int ranks)
      : device_(device), compute_(compute), board_(board), rank_(rank), ranks_(ranks) {}
  absl::Status Copy(kernels::cuda::CudaStream& stream, kernels::cuda::CopyRunsLaunch copy);

  kernels::cuda::CudaDevice& device_;
  kernels::cuda::CudaStream& compute_;
  RankBoard& board_;
  const int rank_, ranks_;
  std::vector<std::unique_ptr<kernels::cuda::CudaStream>> streams_;  // by destination
  kernels::cuda::CudaEvent ready_;
  struct Wait {
    kernels::cuda::CudaEvent begin, end;
  };
  std::vector<Wait> waits_;
  int64_t bytes_sent_ = 0;
};

}  // namespace dovetail::spatio_temporal
