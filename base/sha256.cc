#include "base/sha256.h"

#include <openssl/sha.h>

namespace dovetail {

Sha256Digest Sha256(std::span<const std::byte> bytes) {
  Sha256Digest digest;
  SHA256(reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size(), digest.data());
  return digest;
}

}  // namespace dovetail
