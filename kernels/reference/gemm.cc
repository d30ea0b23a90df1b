#include "kernels/reference/gemm.h"

#include <cmath>

#include "base/dtype.h"

namespace dovetail::kernels::reference {

std::vector<float> DequantizeAll(const RowSource& source) {
  std::vector<float> w(source.rows * source.cols);
  for (int64_t r = 0; r < source.rows; ++r)
    DequantizeRow(source.format, source.row_at(r), source.cols, w.data() + r * source.cols);
  return w;
}

std::vector<double> Gemm(std::span<const float> x, std::span<const float> w, int64_t m, int64_t rows, int64_t cols) {
  std::vector<double> y(m * rows);
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t r = 0; r < rows; ++r) {
      double sum = 0;
      for (int64_t k = 0; k < cols; ++k) sum += static_cast<double>(x[i * cols + k]) * w[r * cols + k];
      y[i * rows + r] = sum;
    }
  }
  return y;
}

std::vector<float> AsActivations(PackedFormat format, ActivationBits bits, std::span<const float> x, int64_t m,
                                 int64_t cols) {
  std::vector<float> out(x.begin(), x.end());
  if (format == PackedFormat::kBF16 && bits == ActivationBits::k8) {
    for (float& v : out) v = ToFloat(ToBF16(v));
  }
  if (!IsQuantized(format)) return out;
  const float largest_code = bits == ActivationBits::k8 ? kLargestCode<1> : kLargestCode<2>;
  for (int64_t begin = 0; begin < m * cols; begin += kActivationGroup) {
    float largest = 0;
    for (int k = 0; k < kActivationGroup; ++k) largest = std::max(largest, std::fabs(x[begin + k]));
    const float scale = largest / largest_code;
    for (int k = 0; k < kActivationGroup; ++k) {
      out[begin + k] = largest == 0 ? 0.0f : scale * std::nearbyint(x[begin + k] * (largest_code / largest));
    }
  }
  return out;
}

}  // namespace dovetail::kernels::reference
