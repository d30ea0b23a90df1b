#include "kernels/rms_norm.h"

namespace dovetail::kernels {

absl::Status RmsNorm(const OpContext& context, const RmsNormArgs& args) {
  if (args.rows < 0 || args.vectors < 1 || args.size < 1 || args.size > (1 << 20)) {
    return InvalidArgument("rms_norm: ", args.rows, " rows of ", args.vectors, " vectors of ", args.size, " floats");
  }
  if (args.rows == 0) return absl::OkStatus();
  if (args.x == nullptr || args.weight == nullptr || args.out == nullptr) {
    return InvalidArgument("rms_norm: x, weight or out is null");
  }
  const int64_t width = int64_t{args.vectors} * args.size;
  const int64_t x_step = args.x_step != 0 ? args.x_step : width;
  const int64_t residual_step = args.residual_step != 0 ? args.residual_step : width;
  const int64_t out_step = args.out_step != 0 ? args.out_step : width;
  ForRows(context, args.rows, width, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      for (int v = 0; v < args.vectors; ++v) {
        const int64_t at = int64_t{v} * args.size;
        const float* residual = args.residual != nullptr ? args.residual + row * residual_step + at : nullptr;
        const float* weight = args.weight_each ? args.weight + at : args.weight;
        context.table->rms_norm(args.x + row * x_step + at, residual, weight, args.eps, args.size,
                                args.out + row * out_step + at);
      }
    }
  });
  return absl::OkStatus();
}

}  // namespace dovetail::kernels
