#include "kernels/convert.h"

namespace dovetail::kernels {

void ToFloat(const OpContext& context, DType dtype, const void* in, float* out, const RowShape& shape) {
  const int64_t in_step = (shape.in_step != 0 ? shape.in_step : shape.size) * static_cast<int64_t>(SizeOf(dtype));
  const int64_t out_step = shape.out_step != 0 ? shape.out_step : shape.size;
  ForRows(context, shape.rows, shape.size, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      context.table->to_float[static_cast<int>(dtype)](static_cast<const std::byte*>(in) + row * in_step,
                                                       out + row * out_step, shape.size);
    }
  });
}

void FromFloat(const OpContext& context, DType dtype, const float* in, void* out, const RowShape& shape) {
  const int64_t in_step = shape.in_step != 0 ? shape.in_step : shape.size;
  const int64_t out_step = (shape.out_step != 0 ? shape.out_step : shape.size) * static_cast<int64_t>(SizeOf(dtype));
  ForRows(context, shape.rows, shape.size, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      context.table->from_float[static_cast<int>(dtype)](in + row * in_step,
                                                         static_cast<std::byte*>(out) + row * out_step, shape.size);
    }
  });
}

}  // namespace dovetail::kernels
