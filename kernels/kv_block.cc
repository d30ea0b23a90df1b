#include "kernels/kv_block.h"

#include <cstring>
#include <string>

#include "kernels/kv_eight_bits.h"

namespace dovetail::kernels {
namespace {

float ScaleAt(const std::byte* p) {
  BF16 scale;
  std::memcpy(&scale, p, sizeof(scale));
  return ToFloat(scale);
}

}  // namespace

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

float KvBlockLayout::Key(const std::byte* block, int t, int i) const {
  const std::byte* const at = block + key_offset(t, i);
  if (storage == KvStorage::kE4M3) return FromE4M3(static_cast<uint8_t>(*at));
  if (storage == KvStorage::kInt8) return static_cast<int8_t>(*at) * ScaleAt(block + key_scale_offset(t));
  return LoadElement(dtype, at);
}

float KvBlockLayout::Value(const std::byte* block, int t, int i) const {
  const std::byte* const at = block + value_offset(t, i);
  if (storage == KvStorage::kE4M3) return FromE4M3(static_cast<uint8_t>(*at));
  if (storage == KvStorage::kInt8) return static_cast<int8_t>(*at) * ScaleAt(block + value_scale_offset(t));
  return LoadElement(dtype, at);
}

void KvBlockLayout::ReadRow(const std::byte* block, int t, std::byte* k, std::byte* v) const {
  const size_t element = SizeOf(dtype);
  if (storage == KvStorage::kInt8) {
    const float key_scale = ScaleAt(block + key_scale_offset(t)), value_scale = ScaleAt(block + value_scale_offset(t));
    const auto copy = [](const std::byte* code, float scale, std::byte* out) {
      const BF16 element = FromInt8(static_cast<int8_t>(*code), scale);
      std::memcpy(out, &element, sizeof(element));
    };
    for (int i = 0; i < key_dim; ++i) copy(block + key_offset(t, i), key_scale, k + i * element);
    for (int i = 0; i < value_dim; ++i) copy(block + value_offset(t, i), value_scale, v + i * element);
    return;
  }
  if (storage == KvStorage::kE4M3) {
    for (int i = 0; i < key_dim; ++i) StoreElement(dtype, Key(block, t, i), k + i * element);
    for (int i = 0; i < value_dim; ++i) StoreElement(dtype, Value(block, t, i), v + i * element);
    return;
  }
  for (int i = 0; i < key_dim; ++i) std::memcpy(k + i * element, block + key_offset(t, i), element);
  std::memcpy(v, block + value_offset(t, 0), value_dim * element);
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
  if (storage > KvStorage::kInt8)
    return InvalidArgument("KV block: storage ", static_cast<int>(storage), " is none of as sent, E4M3 and int8");
  if (eight_bits() && dtype != DType::kBF16) {
    return InvalidArgument("KV block: ", std::string(Name(storage)), " holds rows of bfloat16, and these are ",
                           std::string(Name(dtype)));
  }
  return absl::OkStatus();
}

}  // namespace dovetail::kernels
