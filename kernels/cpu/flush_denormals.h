#pragma once
#include <xmmintrin.h>

namespace dovetail::kernels {

// While it lives, floats of this thread that are too small to be normal (below 1.2e-38) count as zero, as operands and
// as results. Decays multiply until nothing is left, and processors of Intel take some 150 cycles for each product on
// the way from the least normal float to zero. For a scope that calls no code of other libraries. Not for results that
// threads without it must reproduce bit by bit.
// Threads: one thread makes and destroys it, and only that thread is concerned.
class FlushDenormals {
 public:
  FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | kFlushToZero | kDenormalsAreZero); }
  ~FlushDenormals() { _mm_setcsr(before_); }
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
  static constexpr unsigned kFlushToZero = 1u << 15, kDenormalsAreZero = 1u << 6;
  const unsigned before_;
};

}  // namespace dovetail::kernels
