#include "scheduler/core/cache_directory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "scheduler/core/block_hasher.h"
#include "tests/scheduler/fake_cluster.h"

namespace dovetail::scheduler {
namespace {

using requests::CacheEvent;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr WorkerId kOne{1}, kTwo{2};
constexpr Epoch kEpoch{1};
constexpr int kHeads = 2;

class Directory : public ::testing::Test {
 protected:
  // A name that goes out: block `number` of a prompt, as in BlockOf.
  proto::BlockHash Name(int number, TokenId version = 0) {
    const proto::BlockHash name = {static_cast<uint64_t>(number + 1), static_cast<uint64_t>(version)};
    const proto::BlockHash parent = {static_cast<uint64_t>(number), static_cast<uint64_t>(version)};
    directory_.Name(name, number > 0 ? &parent : nullptr, number, request_,
                    [&] { return std::vector<TokenId>(kSegmentTokens, version + number); });
    return name;
  }
  uint64_t Report(WorkerId worker, const proto::BlockHash& block, bool held, proto::HeadRange heads = {0, kHeads}) {
    return directory_.Take(worker, kEpoch, {{{block, LayerGroup(0), heads, held}}}, events_);
  }
  // What was told since the last call: "+0" block 0 is stored, "-0" it is not any more.
  std::vector<std::string> Told() {
    std::vector<std::string> told;
    for (const CacheEvent& event : std::exchange(events_, {}))
      told.push_back(absl::StrCat(event.stored ? "+" : "-", event.block->number));
    return told;
  }
  std::vector<std::string> Held() {
    events_ = directory_.Snapshot().events;
    return Told();
  }

  const proto::AttentionTable table_ = SmallTable(/*ops=*/1, kHeads);
  requests::GenerationRequest request_;
  CacheDirectory directory_{table_};
  std::vector<CacheEvent> events_;
};

TEST_F(Directory, ABlockIsStoredOnceHoweverManyWorkersHoldIt) {
  const proto::BlockHash block = Name(0);
  Report(kOne, block, true);
  Report(kTwo, block, true);
  EXPECT_THAT(Told(), ElementsAre("+0"));
  Report(kOne, block, false);
  EXPECT_THAT(Told(), IsEmpty());
  Report(kTwo, block, false);
  EXPECT_THAT(Told(), ElementsAre("-0"));
}

TEST_F(Directory, ABlockIsStoredWhenAllItsHeadsAre) {
  const proto::BlockHash block = Name(0);
  Report(kTwo, block, true, {1, 2});
  EXPECT_THAT(Told(), IsEmpty());
  Report(kOne, block, true, {0, 1});
  EXPECT_THAT(Told(), ElementsAre("+0"));
  Report(kTwo, block, false, {1, 2});
  EXPECT_THAT(Told(), ElementsAre("-0"));
}

TEST_F(Directory, SaysWhoseTokensABlockHasAndWhatTheyFollow) {
  request_.tenant = "us";
  request_.cache_salt = "salt";
  const proto::BlockHash first = Name(0), second = Name(1);
  Report(kOne, first, true);
  Report(kOne, second, true);
  ASSERT_EQ(events_.size(), 2u);
  EXPECT_EQ(events_[0].block->parent, std::nullopt);
  EXPECT_EQ(events_[1].block->parent, first);
  EXPECT_THAT(events_[1].block->tokens, ::testing::Each(1));
  EXPECT_EQ(events_[1].block->of->tenant, "us");
  EXPECT_EQ(events_[1].block->of->cache_salt, "salt");
  EXPECT_EQ(events_[1].block->of, events_[0].block->of) << "one copy for a sequence";
}

TEST_F(Directory, ALostWorkerTakesWhatOnlyItHeld) {
  for (const int number : {0, 1, 2}) Report(kOne, Name(number), true);
  Report(kTwo, Name(0), true);
  Told();
  directory_.Lose(kOne, kEpoch, events_);
  EXPECT_THAT(Told(), ElementsAre("-1", "-2"));
  EXPECT_THAT(Held(), ElementsAre("+0"));
}

TEST_F(Directory, ASnapshotHasParentsFirstWhateverCameFirst) {
  for (const int number : {2, 0, 1}) Report(kOne, Name(number), true);
  EXPECT_TRUE(directory_.Snapshot().reset);
  EXPECT_THAT(Held(), ElementsAre("+0", "+1", "+2"));
}

TEST_F(Directory, ABlockThatComesBackHasItsTokensStill) {
  const proto::BlockHash block = Name(0);
  for (const bool held : {true, false, true}) Report(kOne, block, held);
  EXPECT_THAT(Told(), ElementsAre("+0", "-0", "+0"));
}

TEST_F(Directory, NamesThatNoWorkerTakesUpAreForgottenAndHeldOnesAreNot) {
  const proto::BlockHash held = Name(0, /*version=*/1), unheld = Name(0, /*version=*/2);
  Report(kOne, held, true);
  for (size_t i = 0; i < CacheDirectory::kMaxUnheld + 1; ++i) Name(0, static_cast<TokenId>(3 + i));
  EXPECT_LE(directory_.size(), CacheDirectory::kMaxUnheld + 1);
  EXPECT_EQ(Report(kOne, unheld, true), 1u) << "counted, not told";
  Told();
  Report(kOne, held, false);
  EXPECT_THAT(Told(), ElementsAre("-0"));
}

TEST_F(Directory, WhatIsToldTwiceOrIsUnknownChangesNothing) {
  const proto::BlockHash block = Name(0);
  EXPECT_EQ(Report(kOne, block, true) + Report(kOne, block, true), 0u);
  EXPECT_EQ(Report(kOne, {99, 99}, true), 1u);
  EXPECT_EQ(Report(kOne, block, true, {0, kHeads + 1}), 1u);
  EXPECT_EQ(directory_.Take(kOne, kEpoch, {{{block, LayerGroup(1), {0, kHeads}, true}}}, events_), 1u);
  EXPECT_THAT(Told(), ElementsAre("+0"));
}

}  // namespace
}  // namespace dovetail::scheduler
