#include "compute_worker/cpu/token_history.h"

#include <map>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dovetail::compute {
namespace {

using ::testing::HasSubstr;

// As the scheduler fills an entry: prompt_tokens counts within history and tokens, or within tokens alone.
proto::StepEntry Entry(uint64_t sequence, Position ctx_len, std::vector<TokenId> tokens, int prompt_tokens) {
  proto::StepEntry entry;
  entry.sequence = SequenceId(sequence);
  entry.ctx_len = ctx_len;
  entry.tokens.assign(tokens.begin(), tokens.end());
  entry.prompt_tokens = prompt_tokens;
  return entry;
}
proto::StepEntry WithHistory(proto::StepEntry entry, std::vector<TokenId> history) {
  entry.history_given = true;
  entry.history = std::move(history);
  return entry;
}

// token: how often it was generated; tokens of the prompt alone count 0.
std::map<TokenId, int> Counts(TokenHistory& history, uint64_t sequence) {
  std::map<TokenId, int> counts;
  for (const kernels::TokenCount& count : history.Counts(SequenceId(sequence))) counts[count.token] = count.generated;
  return counts;
}

using Map = std::map<TokenId, int>;

TEST(TokenHistory, CountsGeneratedTokensAndKnowsThoseOfThePrompt) {
  TokenHistory history;
  ASSERT_TRUE(history.Update(WithHistory(Entry(1, 0, {5, 6, 5}, 3), {})).ok());
  EXPECT_EQ(Counts(history, 1), (Map{{5, 0}, {6, 0}}));
  ASSERT_TRUE(history.Update(Entry(1, 3, {6}, 0)).ok());
  EXPECT_EQ(Counts(history, 1), (Map{{5, 0}, {6, 1}})) << "the prompt stays the prompt in later steps";
  ASSERT_TRUE(history.Update(Entry(1, 4, {9}, 0)).ok());
  ASSERT_TRUE(history.Update(Entry(1, 5, {9}, 0)).ok());
  EXPECT_EQ(Counts(history, 1), (Map{{5, 0}, {6, 1}, {9, 2}}));
}

TEST(TokenHistory, ASequenceThatComesBackWithItsHistoryCountsAsIfItHadNeverBeenAway) {
  TokenHistory stayed, moved;
  ASSERT_TRUE(stayed.Update(WithHistory(Entry(1, 0, {5, 6}, 2), {})).ok());
  for (Position at = 2; at < 6; ++at) ASSERT_TRUE(stayed.Update(Entry(1, at, {7}, 0)).ok());
  ASSERT_TRUE(moved.Update(WithHistory(Entry(1, 5, {7}, 2), {5, 6, 7, 7, 7})).ok());
  EXPECT_EQ(Counts(stayed, 1), Counts(moved, 1));
  EXPECT_EQ(Counts(moved, 1), (Map{{5, 0}, {6, 0}, {7, 4}}));
}

TEST(TokenHistory, APromptMayComeInPieces) {
  TokenHistory history;
  ASSERT_TRUE(history.Update(Entry(1, 0, {1, 2}, 2)).ok());
  ASSERT_TRUE(history.Update(Entry(1, 2, {3, 1}, 2)).ok());
  ASSERT_TRUE(history.Update(Entry(1, 4, {1}, 0)).ok());
  EXPECT_EQ(Counts(history, 1), (Map{{1, 1}, {2, 0}, {3, 0}}));
}

TEST(TokenHistory, ARepeatedStepCountsOnce) {
  TokenHistory history;
  ASSERT_TRUE(history.Update(WithHistory(Entry(1, 0, {1}, 1), {})).ok());
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(history.Update(Entry(1, 1, {8}, 0)).ok());
  EXPECT_EQ(Counts(history, 1), (Map{{1, 0}, {8, 1}}));
  ASSERT_TRUE(history.Update(Entry(1, 1, {9}, 0)).ok());
  EXPECT_EQ(Counts(history, 1), (Map{{1, 0}, {9, 1}})) << "another token at the position takes its place";
}

TEST(TokenHistory, SaysWhatItDoesNotKnow) {
  TokenHistory history;
  const absl::Status unknown = history.Update(Entry(1, 4, {8}, 0));
  EXPECT_TRUE(absl::IsFailedPrecondition(unknown));
  EXPECT_THAT(std::string(unknown.message()), HasSubstr("sequence 1: penalties need its first 4 tokens"));
  ASSERT_TRUE(history.Update(WithHistory(Entry(1, 0, {1, 2}, 2), {})).ok());
  EXPECT_THAT(std::string(history.Update(Entry(1, 5, {8}, 0)).message()), HasSubstr("this worker knows 2"));
}

TEST(TokenHistory, ForgetsTheLeastRecentlyUsedWhenItIsFull) {
  TokenHistory history;
  for (uint64_t id = 0; id < TokenHistory::kMaxSequences; ++id) ASSERT_TRUE(history.Update(Entry(id, 0, {1}, 1)).ok());
  ASSERT_TRUE(history.Update(Entry(0, 1, {2}, 0)).ok());
  ASSERT_TRUE(history.Update(Entry(TokenHistory::kMaxSequences, 0, {1}, 1)).ok());
  EXPECT_TRUE(history.Update(Entry(0, 2, {2}, 0)).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(history.Update(Entry(1, 1, {2}, 0))));
}

}  // namespace
}  // namespace dovetail::compute
