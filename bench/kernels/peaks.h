#pragma once
#include "kernels/thread_pool.h"

namespace dovetail::bench {

// What this machine can do right now with all threads of the pool, to judge kernels against in the
// same run.
struct Peaks {
  double int8_gops = 0;      // 2 x multiply-adds of vpdpbusd in registers; 0 without AVX-512 VNNI
  double bf16_gflops = 0;    // of vdpbf16ps
  double read_gb_per_s = 0;  // streaming 512 MiB of memory
};
Peaks MeasurePeaks(kernels::ThreadPool& pool);

// Register-only loops of one thread: returns the multiply-adds done. The sink keeps the compiler
// honest.
double Int8MultiplyAdds(long iterations, int* sink);
double BF16MultiplyAdds(long iterations, float* sink);

}  // namespace dovetail::bench
