// SHA256_Init and its like are deprecated in favour of EVP, and SHA256() itself goes through EVP: that fetches the
// algorithm under a lock and allocates a context in every call, which costs more than hashing a KV block's 272 bytes.
#define OPENSSL_SUPPRESS_DEPRECATED
#include "base/sha256.h"

#include <openssl/sha.h>

namespace dovetail {

Sha256Digest Sha256(std::span<const std::byte> bytes) {
  Sha256Digest digest;
  SHA256_CTX context;
  SHA256_Init(&context);
  SHA256_Update(&context, bytes.data(), bytes.size());
  SHA256_Final(digest.data(), &context);
  return digest;
}

}  // namespace dovetail
