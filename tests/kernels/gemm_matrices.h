#pragma once
#include <cstdint>
#include <vector>

#include "kernels/packed_weights.h"

namespace dovetail::kernels::test {

// A weight matrix in a file's row format, made of random blocks with plausible scales: every code,
// sign and sub-block scale occurs.
class RawMatrix {
 public:
  RawMatrix(RowFormat format, int64_t rows, int64_t cols, uint32_t seed);

  RowSource source() const {
    return {format_, rows_, cols_, at_};
  }  // valid as long as this object, which does not move
  RawMatrix(const RawMatrix&) = delete;

 private:
  struct RowAt {
    const std::byte* operator()(int64_t row) const { return data + row * row_bytes; }
    const std::byte* data = nullptr;
    int64_t row_bytes = 0;
  };

  RowFormat format_;
  int64_t rows_, cols_;
  std::vector<std::byte> bytes_;
  RowAt at_;
};

// Normal values with an outlier now and then, as activations have.
std::vector<float> RandomActivations(int64_t count, uint32_t seed);

// sqrt(sum (y - expected)^2 / sum expected^2).
double RelativeRms(const float* y, int64_t y_stride, const std::vector<double>& expected, int64_t m, int64_t n);

}  // namespace dovetail::kernels::test
