#include "base/dtype.h"

#include <immintrin.h>

namespace dovetail {

std::string_view Name(DType type) {
  switch (type) {
    case DType::kF32: return "float32";
    case DType::kF16: return "float16";
    case DType::kBF16: return "bfloat16";
  }
  return "unknown";
}

float ToFloat(F16 x) { return _cvtsh_ss(x.bits); }
F16 ToF16(float x) { return F16{_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT)}; }

}  // namespace dovetail
