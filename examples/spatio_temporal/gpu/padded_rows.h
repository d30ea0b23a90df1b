#pragma once
#include <vector>

#include "base/status.h"
#include "kernels/cuda/exchange/copy_runs_args.h"
#include "proto/token_layout.h"

namespace dovetail::spatio_temporal {

// One rank's part of a tensor in device memory whose rows have gaps: [rows][runs of run_bytes], rows row_step bytes
// apart and runs run_step bytes. Without the gaps it is the part that a proto::Layout speaks of: heads of 72 numbers
// lie 80 apart here, and 72 travel.
// Threads: plain values and pure functions.
struct PaddedRows {
  std::byte* data = nullptr;
  int64_t row_bytes = 0;  // without gaps: a multiple of run_bytes
  int64_t row_step = 0;
  int64_t run_bytes = 0;
  int64_t run_step = 0;
};

// What of a transfer belongs to frames [begin, end) of those that it moves, `frames` in all. The cut axis of either
// side is T or lies within T, so each frame has an equal and contiguous share of the transfer's bytes.
// kInvalidArgument: the transfer has no such share.
absl::StatusOr<proto::Transfer> FramesOf(const proto::Transfer& transfer, int64_t frames, int64_t begin, int64_t end);

// The copies that a transfer is: every byte of it once, and no gap. CopyRunsLaunch::blocks is not set.
// kInvalidArgument: the two sides have no rows in common.
absl::StatusOr<std::vector<kernels::cuda::CopyRunsLaunch>> CopiesOf(const proto::Transfer& transfer,
                                                                    const PaddedRows& from, const PaddedRows& to);

// The copy is one piece of memory on either side.
bool IsContiguous(const kernels::cuda::CopyRunsLaunch& copy);
int64_t BytesOf(const kernels::cuda::CopyRunsLaunch& copy);

}  // namespace dovetail::spatio_temporal
