#pragma once
#include <cstdint>

namespace dovetail::compute {

// Bytes of an element of a GPU's wire types, bf16 and f16.
inline constexpr int64_t kElement = 2;

}  // namespace dovetail::compute
