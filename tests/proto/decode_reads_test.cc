#include "proto/decode_reads.h"

#include <gtest/gtest.h>

namespace dovetail::proto {
namespace {

constexpr SoftmaxSpec kSoftmax{.query_heads = 32, .kv_heads = 8, .key_dim = 128, .value_dim = 128, .scale = 1};

TEST(DecodeBytes, AreTheKAndVThatATokenSees) {
  // Llama-3-8B: 128 KiB a token.
  const auto llama = AttentionTable::Build(std::vector<AttentionSpec>(32, kSoftmax));
  ASSERT_TRUE(llama.ok());
  EXPECT_EQ(DecodeBytes(*llama, KvStorage::kAsSent, 1), 131072);
  EXPECT_EQ(DecodeBytes(*llama, KvStorage::kAsSent, 4096), 4096.0 * 131072);
  EXPECT_EQ(DecodeBytes(*llama, KvStorage::kE4M3, 4096), 4096.0 * 131072 / 2);
  EXPECT_EQ(DecodeBytes(*llama, KvStorage::kInt8, 1), 32 * 8 * (256 + 4));
  EXPECT_EQ(DecodeBytes(*llama, KvStorage::kAsSent, 0), 0);
}

TEST(DecodeBytes, OfAWindowAreNoMoreThanItsTokens) {
  SoftmaxSpec windowed = kSoftmax;
  windowed.window = 512;
  const auto both = AttentionTable::Build({windowed, kSoftmax});
  ASSERT_TRUE(both.ok());
  EXPECT_EQ(DecodeBytes(*both, KvStorage::kAsSent, 500), 2 * 500.0 * 4096);
  EXPECT_EQ(DecodeBytes(*both, KvStorage::kAsSent, 4096), (512.0 + 4096) * 4096);
}

TEST(DecodeBytes, OfALinearStateDoNotDependOnTheLength) {
  LinearSpec linear;
  linear.heads = 4;
  linear.key_dim = 64;
  linear.value_dim = 32;
  linear.token_decay = true;
  const auto table = AttentionTable::Build({linear, linear}, std::vector<LinearConstants>(2));
  ASSERT_TRUE(table.ok());
  EXPECT_EQ(DecodeBytes(*table, KvStorage::kAsSent, 1), 2 * 2 * 4 * 64 * 32 * 4);
  EXPECT_EQ(DecodeBytes(*table, KvStorage::kInt8, 100000), 2 * 2 * 4 * 64 * 32 * 4);
}

}  // namespace
}  // namespace dovetail::proto
