#include "kernels/state_gates.h"

#include <algorithm>
#include <cmath>

#include "kernels/cpu/linear_state_kernels.h"

namespace dovetail::kernels {

absl::Status SigmoidGate(const OpContext& context, const SigmoidGateArgs& args) {
  if (args.rows < 0 || args.size < 0) return InvalidArgument("sigmoid gate: ", args.rows, " rows of ", args.size);
  if (args.rows == 0 || args.size == 0) return absl::OkStatus();
  if (args.x == nullptr || args.gate == nullptr || args.out == nullptr)
    return InvalidArgument("sigmoid gate: x, gate or out is null");
  const auto step = [&](int64_t given) { return given != 0 ? given : args.size; };
  const int64_t x_step = step(args.x_step), gate_step = step(args.gate_step), out_step = step(args.out_step);
  const LinearStateKernels& kernels = SelectLinearState(context.table->isa);
  ForRows(context, args.rows, args.size, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      kernels.sigmoid_mul(args.gate + row * gate_step, args.x + row * x_step, args.out + row * out_step, args.size);
  });
  return absl::OkStatus();
}

namespace {

// ln(1 + e^x) in double: a decay near 1 has few bits to lose.
double Softplus(double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x))); }

}  // namespace

absl::Status StepDecay(const OpContext& context, const StepDecayArgs& args) {
  if (args.rows < 0 || args.heads < 1 || args.width < 1 || args.stride < args.width + (args.rate ? 1 : 0) ||
      (args.rate && args.width != 1))
    return InvalidArgument("step decay: ", args.rows, " rows of ", args.heads, " heads of ", args.width, " in ",
                           args.stride, " floats");
  if (args.rows == 0) return absl::OkStatus();
  if (args.x == nullptr || args.bias == nullptr || args.factor == nullptr || args.out == nullptr)
    return InvalidArgument("step decay: x, bias, factor or out is null");
  ForRows(context, args.rows, int64_t{args.heads} * args.width * 16, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      for (int h = 0; h < args.heads; ++h)
        for (int i = 0; i < args.width; ++i) {
          const int64_t at = int64_t{h} * args.width + i;
          const float x = args.x[row * args.heads * args.width + at];
          const double t = std::clamp<double>(Softplus(static_cast<double>(x) + args.bias[at]), args.low, args.high);
          float* out = args.out + (row * args.heads + h) * args.stride;
          out[i] = static_cast<float>(t * args.factor[at]);
          if (args.rate) out[1] = static_cast<float>(t);
        }
  });
  return absl::OkStatus();
}

absl::Status SigmoidRate(const OpContext& context, const SigmoidRateArgs& args) {
  if (args.rows < 0 || args.heads < 1 || args.at < 0 || args.at >= args.stride)
    return InvalidArgument("sigmoid rate: ", args.rows, " rows of ", args.heads, " heads at ", args.at, " of ",
                           args.stride);
  if (args.rows == 0) return absl::OkStatus();
  if (args.x == nullptr || args.out == nullptr) return InvalidArgument("sigmoid rate: x or out is null");
  ForRows(context, args.rows, int64_t{args.heads} * 16, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      for (int h = 0; h < args.heads; ++h)
        args.out[(row * args.heads + h) * args.stride + args.at] =
            static_cast<float>(args.scale / (1.0 + std::exp(-static_cast<double>(args.x[row * args.heads + h]))));
  });
  return absl::OkStatus();
}

}  // namespace dovetail::kernels
