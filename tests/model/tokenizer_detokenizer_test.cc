#include "model/tokenizer/detokenizer.h"

#include <gtest/gtest.h>

#include <random>

#include "model/tokenizer/utf8.h"
#include "tests/model/tokenizer_test_models.h"

namespace dovetail::model::test {
namespace {

TEST(IncrementalDetokenizer, HoldsBackAnIncompleteCharacter) {
  const auto tokenizer = Make(TinyByteLevelData());
  IncrementalDetokenizer detokenizer(*tokenizer);
  EXPECT_EQ(detokenizer.Push('a'), "a");
  EXPECT_EQ(detokenizer.Push(0xF0), "");
  EXPECT_EQ(detokenizer.Push(0x9F), "");
  EXPECT_EQ(detokenizer.Push(0x9A), "");
  EXPECT_EQ(detokenizer.emitted_bytes(), 1u);
  EXPECT_EQ(detokenizer.Push(0x80), "🚀");
  EXPECT_EQ(detokenizer.emitted_bytes(), 5u);
  EXPECT_EQ(detokenizer.emitted_code_points(), 2u);
  EXPECT_EQ(detokenizer.Flush(), "");
}

TEST(IncrementalDetokenizer, WhatCanNoLongerBecomeACharacterIsReplaced) {
  const auto tokenizer = Make(TinyByteLevelData());
  IncrementalDetokenizer detokenizer(*tokenizer);
  EXPECT_EQ(detokenizer.Push(0xE6), "");
  EXPECT_EQ(detokenizer.Push('a'), "\uFFFDa");
  EXPECT_EQ(detokenizer.Push(0xFF), "\uFFFD");
  EXPECT_EQ(detokenizer.Push(0xC3), "");
  EXPECT_EQ(detokenizer.Flush(), "\uFFFD");
  EXPECT_EQ(detokenizer.Flush(), "");
}

TEST(IncrementalDetokenizer, DropsOneSpaceOnlyAtTheStartOfTheSequence) {
  const auto tokenizer = Make(TinySpmData());
  const TokenId space = 259, hello = 290;
  IncrementalDetokenizer start(*tokenizer, {.at_sequence_start = true});
  EXPECT_EQ(start.Push(1), "");  // a hidden special token is not yet the start
  EXPECT_EQ(start.Push(hello), "hello");
  EXPECT_EQ(start.Push(hello), " hello");
  IncrementalDetokenizer two_spaces(*tokenizer, {.at_sequence_start = true});
  EXPECT_EQ(two_spaces.Push(space), "");
  EXPECT_EQ(two_spaces.Push(space), " ");
  IncrementalDetokenizer continuation(*tokenizer);
  EXPECT_EQ(continuation.Push(hello), " hello");
  IncrementalDetokenizer shown(*tokenizer, {.skip_special_tokens = false, .at_sequence_start = true});
  EXPECT_EQ(shown.Push(1), "<s>");
  EXPECT_EQ(shown.Push(hello), " hello");
}

TEST(IncrementalDetokenizer, EqualsDecodeForRandomIds) {
  for (const auto& data : {TinyByteLevelData(), TinySpmData(), TalesData()}) {
    const auto tokenizer = Make(data);
    std::mt19937_64 random(4);
    for (int round = 0; round < 300; ++round) {
      std::vector<TokenId> ids(random() % 40);
      for (TokenId& id : ids) {
        // Bytes often, so that characters form across tokens; now and then an id that does not exist.
        id = static_cast<TokenId>(random() % (random() % 2 ? 300 : tokenizer->vocab_size() + 3));
      }
      for (const bool skip : {false, true}) {
        IncrementalDetokenizer detokenizer(*tokenizer, {.skip_special_tokens = skip, .at_sequence_start = true});
        std::string text, bytes;
        for (const TokenId id : ids) {
          const std::string piece = detokenizer.Push(id);
          EXPECT_EQ(ValidUtf8Prefix(piece), piece.size());
          text += piece;
          EXPECT_EQ(detokenizer.emitted_bytes(), text.size());
          if (!skip || !tokenizer->IsSpecial(id)) bytes += tokenizer->TokenText(id);
        }
        text += detokenizer.Flush();
        EXPECT_EQ(text, tokenizer->Decode(ids, skip));
        // Against the bytes themselves: one pass over all of them.
        if (tokenizer->strip_first_space() && bytes.starts_with(' ')) bytes.erase(0, 1);
        std::string whole;
        DrainUtf8(bytes, /*finish=*/true, whole);
        EXPECT_EQ(text, whole);
      }
    }
  }
}

}  // namespace
}  // namespace dovetail::model::test
