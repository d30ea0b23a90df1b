#include "kernels/kv_block.h"

#include <cstring>

namespace dovetail::kernels {

float KvBlockLayout::LoadElement(DType dtype, const std::byte* p) {
  if (dtype == DType::kF32) {
    float x;
    std::memcpy(&x, p, 4);
    return x;
  }
  uint16_t bits;
  std::memcpy(&bits, p, 2);
  return dtype == DType::kBF16 ? ToFloat(BF16{bits}) : ToFloat(F16{bits});
}

void KvBlockLayout::StoreElement(DType dtype, float x, std::byte* p) {
  if (dtype == DType::kF32) {
    std::memcpy(p, &x, 4);
    return;
  }
  const uint16_t bits = dtype == DType::kBF16 ? ToBF16(x).bits : ToF16(x).bits;
  std::memcpy(p, &bits, 2);
}

absl::Status KvBlockLayout::Validate() const {
  for (const int dim : {key_dim, value_dim}) {
    if (dim < 2 || dim > 256 || dim % 2 != 0) {
      return InvalidArgument("KV block: head dimensions ", key_dim, " (keys) and ", value_dim,
                             " (values) must be even and lie in 2..256");
    }
  }
  if (dtype != DType::kF32 && dtype != DType::kF16 && dtype != DType::kBF16) {
    return InvalidArgument("KV block: element type ", static_cast<int>(dtype), " is not float32, float16 or bfloat16");
  }
  return absl::OkStatus();
}

}  // namespace dovetail::kernels
