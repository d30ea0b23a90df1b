#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/status.h"
#include "kernels/device.h"
#include "kernels/packed_weights.h"

namespace dovetail::kernels {

// One of the products that share an x.
struct GemmOutput {
  const PackedWeights* weights = nullptr;
  float* y = nullptr;  // [m, weights->rows()], row stride y_stride >= weights->rows()
  int64_t y_stride = 0;
  const float* bias = nullptr;                      // [weights->rows()] or null
  bool accumulate = false;                          // y += x W^T + bias: the residual add
  ActivationBits activations = ActivationBits::k8;  // f32 weights ignore it
};

struct GemmArgs {
  const float* x = nullptr;  // [m, cols], row stride x_stride >= cols, any alignment; every
                             // output's weights have these cols
  int64_t x_stride = 0;
  int64_t m = 0;                        // 0 writes nothing
  std::span<const GemmOutput> outputs;  // q, k and v, or gate and up: x is converted once, and one
                                        // parallel region covers all
  std::span<std::byte> scratch;         // at least GemmScratchBytes, aligned to 64; its contents are
                                        // undefined before and after
};

inline constexpr int64_t kMaxGemmRows = 1 << 20;
inline constexpr size_t kMaxGemmOutputs = 64;

// Bytes that Gemm needs for x of [m, cols], whatever the formats of the weights and activations.
size_t GemmScratchBytes(int64_t m, int64_t cols);

// y = x W^T + bias (or y += ...) for each output, in f32.
//
// f32 weights: f32 multiply and add. bf16 weights: the same, with 8-bit activations after x has been
// rounded to bf16; with 16-bit activations AMX multiplies the three bf16 numbers whose sum is an element of x, which
// rounds nothing more.
// Quantised weights: x is quantised per row and group of 32 columns to 8 or 16 bits (x ~ s c,
// s = max|x| / 127 or max|x| / 32512), products are summed exactly in integers within a group, then
// in f32 over groups in ascending order:
//   y = sum_g s_g scale_g sum_k (code_k - zero) c_k          (symmetric)
//   y = sum_g s_g scale_g sum_k code_k c_k + offset_g s_g sum_k c_k   (affine)
// With 8 bits the small values in the group of an outlier are lost, and the low bits of the outlier itself; 16 cost
// little at m = 1, where memory is the limit, and up to twice the time at large m (bench/results/).
// Numbers: each output depends on its row of x and on W only, not on m, the other rows, the other outputs or the number
// of threads (docs/ARCHITECTURE.md, determinism 1). AVX2 and AVX-512 may differ in the last bits, AVX-512 and AMX with
// bf16 weights alone. A NaN or infinity in x makes the outputs of its row NaN or infinite, and no others.
// Errors:  kInvalidArgument for null pointers, strides or sizes that do not fit, or too little scratch, before anything
// is written.
// Threads: runs on the caller and the stream's pool, returns when done.
// Memory:  allocates nothing.
// Oracle:  reference/gemm.h; error budgets in tests/kernels/gemm_test.cc.
absl::Status Gemm(const GemmArgs& args, Stream& stream);

}  // namespace dovetail::kernels
