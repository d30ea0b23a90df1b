#pragma once
#include <array>
#include <atomic>
#include <cstddef>
#include <deque>
#include <memory>
#include <thread>
#include <vector>

#include "attention_worker/cuda/gather_rows.h"
#include "base/mutex.h"
#include "base/status.h"
#include "kernels/cuda/runtime/cuda_device.h"
#include "proto/placement.h"
#include "proto/sequence_frames.h"

namespace dovetail::attention {

// K and V of some tokens of a shard on their way from blocks of a GPU to rows in host memory.
// Shapes:  blocks [segments, heads]; rows [tokens, heads, key_dim] and [tokens, heads, value_dim], in the wire's type.
// Threads: a value.
struct OutgoingPart {
  std::vector<const std::byte*> blocks;  // on the GPU: those that hold the tokens
  size_t block_bytes = 0;
  int heads = 0;
  proto::TokenRange tokens;
  GpuHeadRows rows;  // of the first token and head

  size_t staging_bytes() const { return blocks.size() * block_bytes; }
};

// Copies the blocks to `staging`, pinned memory of staging_bytes, waits for the stream, and gathers the rows.
// Errors:  kInternal: the device is lost.
// Threads: reentrant; the calling thread's current GPU is the stream's.
absl::Status CopyOut(const OutgoingPart& part, kernels::cuda::CudaStream& stream, std::byte* staging);

// A thread that does this for moves, so that the event loop goes on meanwhile.
// Ownership: must outlive neither the device nor the memory of the blocks. Once a move is given up, what they hold may
//            change, and its rows mean nothing.
// Errors:    kInternal: the device is lost.
// Threads:   reactor-owned.
class OutgoingRows {
 public:
  static absl::StatusOr<std::unique_ptr<OutgoingRows>> Create(kernels::cuda::CudaDevice& device);
  ~OutgoingRows();  // waits for what was begun

  // An op of the move in `slot`: its parts, behind all that was begun before. Keeps both buffers until it has ended.
  void Begin(int slot, std::vector<OutgoingPart> parts, std::shared_ptr<kernels::Buffer> rows,
             std::shared_ptr<kernels::Buffer> staging);
  // Whether the oldest of the slot that has not been told of has ended, or there is none; it is told of then.
  absl::StatusOr<bool> TakeOldest(int slot);

 private:
  struct Job {
    std::vector<OutgoingPart> parts;
    std::shared_ptr<kernels::Buffer> rows, staging;
    absl::Status status;  // once it has ended
    std::atomic<bool> ended = false;
  };
  explicit OutgoingRows(std::unique_ptr<kernels::cuda::CudaStream> stream);
  void Run();

  const std::unique_ptr<kernels::cuda::CudaStream> stream_;  // the thread's
  std::array<std::deque<std::shared_ptr<Job>>, proto::kMoveSlots> begun_;
  Mutex mutex_;
  CondVar changed_;
  std::deque<std::shared_ptr<Job>> jobs_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace dovetail::attention
