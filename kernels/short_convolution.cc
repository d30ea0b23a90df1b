#include "kernels/short_convolution.h"

#include "kernels/cpu/linear_state_kernels.h"

namespace dovetail::kernels {

absl::Status ShortConvolution(const OpContext& context, const ShortConvolutionArgs& args) {
  if (args.width < 2 || args.width > kMaxConvWidth || args.rows < 0 || args.channels < 0)
    return InvalidArgument("short convolution: ", args.rows, " rows of ", args.channels, " channels with ", args.width,
                           " taps");
  if (args.rows == 0 || args.channels == 0) return absl::OkStatus();
  if (args.x == nullptr || args.history == nullptr || args.weights == nullptr || args.out == nullptr)
    return InvalidArgument("short convolution: x, history, weights or out is null");
  const int64_t x_step = args.x_step != 0 ? args.x_step : args.channels;
  const int64_t out_step = args.out_step != 0 ? args.out_step : args.channels;
  const int64_t weight_step = args.weight_step != 0 ? args.weight_step : args.channels;
  const LinearStateKernels& kernels = SelectLinearState(context.table->isa);
  ForRows(context, args.rows, args.channels * args.width, [&](int64_t begin, int64_t end) {
    const float* taps[kMaxConvWidth];
    for (int64_t row = begin; row < end; ++row) {
      for (int w = 0; w < args.width; ++w) {
        const int64_t at = row - (args.width - 1) + w;
        taps[w] = at >= 0 ? args.x + at * x_step : args.history + (args.width - 1 + at) * args.channels;
      }
      kernels.convolve(taps, args.weights, weight_step, args.width, args.bias, args.silu, args.channels,
                       args.out + row * out_step);
    }
  });
  return absl::OkStatus();
}

absl::Status L2Norm(const OpContext& context, const L2NormArgs& args) {
  if (args.rows < 0 || args.vectors < 0 || args.size < 1)
    return InvalidArgument("l2 norm: ", args.rows, " rows of ", args.vectors, " vectors of ", args.size, " floats");
  if (args.rows == 0 || args.vectors == 0) return absl::OkStatus();
  if (args.x == nullptr || args.out == nullptr) return InvalidArgument("l2 norm: x or out is null");
  const int64_t width = int64_t{args.vectors} * args.size;
  const int64_t x_step = args.x_step != 0 ? args.x_step : width, out_step = args.out_step != 0 ? args.out_step : width;
  const LinearStateKernels& kernels = SelectLinearState(context.table->isa);
  ForRows(context, args.rows, width, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      for (int v = 0; v < args.vectors; ++v)
        kernels.l2_norm(args.x + row * x_step + int64_t{v} * args.size, args.eps, args.factor, args.size,
                        args.out + row * out_step + int64_t{v} * args.size);
  });
  return absl::OkStatus();
}

}  // namespace dovetail::kernels
