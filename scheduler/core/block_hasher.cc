#include "scheduler/core/block_hasher.h"

#include <array>
#include <bit>
#include <cstddef>
#include <cstring>
#include <vector>

#include "base/check.h"
#include "base/sha256.h"
#include "proto/attention_spec.h"

namespace dovetail::scheduler {
namespace {

static_assert(std::endian::native == std::endian::little, "hashes are over little-endian bytes");

proto::BlockHash Cut(const Sha256Digest& digest) {
  proto::BlockHash hash;
  std::memcpy(hash.data(), digest.data(), sizeof(hash));
  return hash;
}

void Append(const void* data, size_t size, std::vector<std::byte>& out) {
  const auto* bytes = static_cast<const std::byte*>(data);
  out.insert(out.end(), bytes, bytes + size);
}

}  // namespace

proto::BlockHash ChainSeed(uint64_t model_digest, const std::string& tenant, const std::string& cache_salt) {
  std::vector<std::byte> bytes;
  Append(&model_digest, sizeof(model_digest), bytes);
  for (const std::string* part : {&tenant, &cache_salt}) {
    const uint64_t size = part->size();
    Append(&size, sizeof(size), bytes);
    Append(part->data(), part->size(), bytes);
  }
  return Cut(Sha256(bytes));
}

proto::BlockHash NextBlockHash(const proto::BlockHash& previous, std::span<const TokenId> block) {
  DT_CHECK(block.size() == kSegmentTokens, "a block of ", block.size(), " tokens");
  std::array<std::byte, sizeof(proto::BlockHash) + kSegmentTokens * sizeof(TokenId)> bytes;
  std::memcpy(bytes.data(), previous.data(), sizeof(previous));
  std::memcpy(bytes.data() + sizeof(previous), block.data(), block.size_bytes());
  return Cut(Sha256(bytes));
}

}  // namespace dovetail::scheduler
