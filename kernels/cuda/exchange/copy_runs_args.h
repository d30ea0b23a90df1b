#pragma once
#include <cstdint>

namespace dovetail::kernels::cuda {

// Short runs of bytes that lie apart, from one memory to another that the device reaches, a peer's too: what a copy
// engine takes long for. Row r of `rows` has runs i of `runs`, `run_bytes` each, at r * row_step + i * run_step of
// either side. All numbers are bytes and multiples of 16.
// Threads: plain values.
struct CopyRunsLaunch {
  const void* from = nullptr;
  void* to = nullptr;
  int64_t from_row_step = 0, to_row_step = 0;
  int32_t from_run_step = 0, to_run_step = 0;
  int32_t run_bytes = 0;
  int32_t runs = 1;
  int32_t rows = 0;
  int32_t blocks = 1;  // of threads, at most: the others are left to what runs at the same time
};

}  // namespace dovetail::kernels::cuda
