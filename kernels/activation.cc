#include "kernels/activation.h"

namespace dovetail::kernels {

namespace {

auto RowOpOf(const OpsTable& table, Activation activation) {
  switch (activation) {
    case Activation::kSilu: return table.silu_mul;
    case Activation::kGeluTanh: return table.gelu_mul;
    case Activation::kRelu: return table.relu_mul;
    case Activation::kIdentity: return table.mul;
    case Activation::kClampedSwiglu: return table.clamped_swiglu;
  }
  return table.silu_mul;
}

}  // namespace

absl::Status GatedActivation(const OpContext& context, const GatedActivationArgs& args) {
  if (args.rows < 0 || args.size < 0) return InvalidArgument("activation: ", args.rows, " rows of ", args.size);
  if (args.rows == 0 || args.size == 0) return absl::OkStatus();
  if (args.gate == nullptr || args.up == nullptr || args.out == nullptr) {
    return InvalidArgument("activation: gate, up or out is null");
  }
  const auto row_op = RowOpOf(*context.table, args.activation);
  const int64_t gate_step = args.gate_step != 0 ? args.gate_step : args.size;
  const int64_t up_step = args.up_step != 0 ? args.up_step : args.size;
  const int64_t out_step = args.out_step != 0 ? args.out_step : args.size;
  ForRows(context, args.rows, args.size, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      row_op(args.gate + row * gate_step, args.up + row * up_step, args.out + row * out_step, args.size);
    }
  });
  return absl::OkStatus();
}

namespace {

constexpr int64_t kRun = 4096;  // floats handed out together

template <typename Op>
absl::Status ForElements(const OpContext& context, int64_t n, Op&& op) {
  ForRows(context, (n + kRun - 1) / kRun, kRun, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kRun, last = end * kRun < n ? end * kRun : n;
    op(first, last - first);
  });
  return absl::OkStatus();
}

}  // namespace

absl::Status Add(const OpContext& context, const float* a, const float* b, float* out, int64_t n) {
  if (n < 0 || (n > 0 && (a == nullptr || b == nullptr || out == nullptr))) {
    return InvalidArgument("add: ", n, " floats, or a null pointer");
  }
  return ForElements(context, n,
                     [&](int64_t at, int64_t count) { context.table->add(a + at, b + at, out + at, count); });
}

absl::Status Scale(const OpContext& context, const float* a, float factor, float* out, int64_t n) {
  if (n < 0 || (n > 0 && (a == nullptr || out == nullptr)))
    return InvalidArgument("scale: ", n, " floats, or a null pointer");
  return ForElements(context, n,
                     [&](int64_t at, int64_t count) { context.table->scale(a + at, factor, out + at, count); });
}

}  // namespace dovetail::kernels
