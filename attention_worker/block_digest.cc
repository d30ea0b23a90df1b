#include "attention_worker/block_digest.h"

#include <isa-l/crc64.h>

namespace dovetail::attention {

uint64_t Digest(std::span<const std::byte> bytes, uint64_t before) {
  return crc64_ecma_refl(before, reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size());
}

}  // namespace dovetail::attention
