#include "kernels/rope.h"

#include <cmath>
#include <cstring>

namespace dovetail::kernels {

void ComputeRopeTable(const OpContext& context, std::span<const int32_t> positions, std::span<const float> inv_freq,
                      float multiplier, float* cos_out, float* sin_out) {
  const auto count = static_cast<int64_t>(inv_freq.size());
  ForRows(context, static_cast<int64_t>(positions.size()), count * 16, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const auto position = static_cast<float>(positions[row]);
      for (int64_t i = 0; i < count; ++i) {
        const double angle = position * inv_freq[i];
        cos_out[row * count + i] = static_cast<float>(std::cos(angle)) * multiplier;
        sin_out[row * count + i] = static_cast<float>(std::sin(angle)) * multiplier;
      }
    }
  });
}

absl::Status Rope(const OpContext& context, const RopeArgs& args) {
  if (args.rows < 0 || args.heads < 1 || args.head_dim < 2 || args.head_dim > 256 || args.rotary < 0 ||
      args.rotary > args.head_dim || args.rotary % 2 != 0) {
    return InvalidArgument("rope: ", args.rows, " rows of ", args.heads, " heads of ", args.head_dim, ", ", args.rotary,
                           " of them rotated; heads have 2..256 dimensions, an even number of them rotated");
  }
  if (args.rows == 0) return absl::OkStatus();
  if (args.x == nullptr || args.out == nullptr || (args.cos == nullptr) != (args.sin == nullptr)) {
    return InvalidArgument("rope: x or out is null, or only one of cos and sin is");
  }
  const int half = args.cos != nullptr ? args.rotary / 2 : 0;
  const int64_t width = int64_t{args.heads} * args.head_dim;
  const int64_t x_step = args.x_step != 0 ? args.x_step : width;
  const int64_t out_step = args.out_step != 0 ? args.out_step : width;
  const OpsTable& table = *context.table;
  ForRows(context, args.rows, width, [&](int64_t begin, int64_t end) {
    alignas(64) float rotated[256];
    for (int64_t row = begin; row < end; ++row) {
      for (int head = 0; head < args.heads; ++head) {
        const float* x = args.x + row * x_step + int64_t{head} * args.head_dim;
        std::byte* out =
            static_cast<std::byte*>(args.out) + (row * out_step + int64_t{head} * args.head_dim) * SizeOf(args.dtype);
        if (half > 0) table.rope(x, args.cos + row * half, args.sin + row * half, half, rotated);
        std::memcpy(rotated + 2 * half, x + 2 * half, (args.head_dim - 2 * half) * sizeof(float));
        table.from_float[static_cast<int>(args.dtype)](rotated, out, args.head_dim);
      }
    }
  });
  return absl::OkStatus();
}

}  // namespace dovetail::kernels
