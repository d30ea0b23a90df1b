#include "proto/rank_memory.h"

#include <gtest/gtest.h>

#include "proto/rank_frames.h"

namespace dovetail::proto {
namespace {

TEST(RankMemory, ANameComesBackWithTheTypeOfItsFrame) {
  const std::string name("\0a name\0", 8);
  for (const FrameType type : {kRankRows, kRankHeads, kRankOutputs}) {
    const std::vector<std::byte> payload = EncodeRankMemory(type, name);
    const auto named = DecodeRankMemory(payload);
    ASSERT_TRUE(named.ok()) << named.status();
    EXPECT_EQ(named->type, type);
    EXPECT_EQ(named->name, name);
  }
}

TEST(RankMemory, WhatIsNoNameIsRefused) {
  EXPECT_FALSE(DecodeRankMemory({}).ok());
  EXPECT_FALSE(DecodeRankMemory(EncodeRankMemory(kRankRows, "")).ok());
  EXPECT_FALSE(DecodeRankMemory(EncodeRankMemory(kRankMemory, "name")).ok());
  EXPECT_FALSE(DecodeRankMemory(EncodeRankMemory(kRankState, "name")).ok()) << "states lie in host memory";
}

}  // namespace
}  // namespace dovetail::proto
