#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "grammar/grammar_engine.h"
#include "grammar/grammar_states.h"

namespace dovetail::grammar {
namespace {

using testing::HasSubstr;

// Token 0 ends a text, token 1 + b is the byte b, 257 is "ab".
constexpr TokenId kEnd = 0, kAb = 257;
constexpr int kVocab = 258;
TokenId Byte(char c) { return 1 + static_cast<uint8_t>(c); }

GrammarEngine Engine() {
  const auto tokens = []() -> absl::StatusOr<std::vector<std::string>> {
    std::vector<std::string> all = {""};
    for (int byte = 0; byte < 256; ++byte) all.emplace_back(1, static_cast<char>(byte));
    all.emplace_back("ab");
    return all;
  };
  return GrammarEngine(tokens, kVocab);
}

std::vector<TokenId> In(std::span<const uint32_t> mask) {
  std::vector<TokenId> in;
  for (TokenId id = 0; id < kVocab; ++id)
    if (mask[id / 32] >> (id % 32) & 1) in.push_back(id);
  return in;
}

// Waits until the grammar is compiled in the background.
absl::StatusOr<std::vector<TokenId>> MaskOf(GrammarStates& states, uint64_t sequence, const std::string& source,
                                            const std::vector<TokenId>& ends, const std::vector<TokenId>& output) {
  while (!states.Prepare(SequenceId(sequence), source, ends)) std::this_thread::yield();
  DT_ASSIGN_OR_RETURN(const auto mask, states.Mask(SequenceId(sequence), source, ends, output));
  return In(mask);
}

TEST(Grammar, AMaskHasTheTokensThatMayFollowAndTheEndOnlyAfterAWholeText) {
  GrammarEngine engine = Engine();
  GrammarStates states(&engine);
  const std::string source = SourceOf(Kind::kRegex, "abc|x");
  const auto next = [&](std::vector<TokenId> output) {
    const auto mask = MaskOf(states, 1, source, {kEnd}, output);
    EXPECT_TRUE(mask.ok()) << mask.status();
    return mask.value_or(std::vector<TokenId>());
  };
  EXPECT_EQ(next({}), (std::vector<TokenId>{Byte('a'), Byte('x'), kAb}));
  EXPECT_EQ(next({kAb}), std::vector<TokenId>{Byte('c')});
  EXPECT_EQ(next({kAb, Byte('c')}), std::vector<TokenId>{kEnd});
  // A step that is repeated, and a log that took another way: the state follows the tokens.
  EXPECT_EQ(next({kAb, Byte('c')}), std::vector<TokenId>{kEnd});
  EXPECT_EQ(next({Byte('a')}), std::vector<TokenId>{Byte('b')});
  EXPECT_EQ(next({Byte('x')}), std::vector<TokenId>{kEnd});
}

TEST(Grammar, ALogOutsideItsGrammarIsAnError) {
  GrammarEngine engine = Engine();
  GrammarStates states(&engine);
  const std::string source = SourceOf(Kind::kRegex, "ab");
  const std::vector<TokenId> ends = {kEnd};
  EXPECT_TRUE(absl::IsFailedPrecondition(MaskOf(states, 1, source, ends, {Byte('b')}).status()));
  EXPECT_TRUE(absl::IsFailedPrecondition(MaskOf(states, 1, source, ends, {kAb, kEnd}).status()));
  EXPECT_TRUE(absl::IsFailedPrecondition(MaskOf(states, 2, source, {}, {}).status()));
  GrammarStates none(nullptr);
  EXPECT_TRUE(absl::IsFailedPrecondition(MaskOf(none, 1, source, ends, {}).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(MaskOf(states, 3, SourceOf(Kind::kRegex, "("), ends, {}).status()));
}

TEST(Grammar, WhatTheCompilerIgnoresIsRefusedEachTime) {
  GrammarEngine engine = Engine();
  const std::string source = SourceOf(Kind::kJsonSchema, R"({"type":"string","minLength":2,"pattern":"a*"})");
  for (int i = 0; i < 2; ++i)
    EXPECT_THAT(std::string(engine.Compile(source).status().message()), HasSubstr("would not be enforced"));
  EXPECT_TRUE(absl::IsInvalidArgument(engine.Compile(SourceOf(Kind::kRegex, "(")).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(engine.Compile("").status()));
  EXPECT_TRUE(absl::IsResourceExhausted(engine.Compile(std::string(kMaxSourceBytes + 1, 'r')).status()));
}

// A step loop asks and goes on: neither the vocabulary nor a grammar is read on its thread.
TEST(Grammar, IsPreparedOnAnotherThread) {
  const std::thread::id here = std::this_thread::get_id();
  absl::Notification let_go;
  std::thread::id reader;
  GrammarEngine engine(
      [&]() -> absl::StatusOr<std::vector<std::string>> {
        reader = std::this_thread::get_id();
        if (reader != here) let_go.WaitForNotificationWithTimeout(absl::Seconds(60));
        return std::vector<std::string>{"", "a"};
      },
      2);
  GrammarStates states(&engine);
  const std::string source = SourceOf(Kind::kRegex, "a");
  const std::vector<TokenId> ends = {kEnd};
  for (int i = 0; i < 3; ++i) EXPECT_FALSE(states.Prepare(SequenceId(1), source, ends));
  EXPECT_TRUE(absl::IsFailedPrecondition(states.Mask(SequenceId(1), source, ends, {}).status()));
  let_go.Notify();
  while (!states.Prepare(SequenceId(1), source, ends)) std::this_thread::yield();
  EXPECT_TRUE(states.Mask(SequenceId(1), source, ends, {}).ok());
  EXPECT_NE(reader, here);
  EXPECT_TRUE(states.Prepare(SequenceId(2), source, ends)) << "the engine keeps it";
}

// As many as a large vocabulary has.
std::vector<std::string> ManyTokens() {
  std::vector<std::string> tokens = {""};
  for (int byte = 0; byte < 256; ++byte) tokens.emplace_back(1, static_cast<char>(byte));
  std::mt19937_64 random(1);
  while (tokens.size() < 60'000) {
    std::string token;
    for (const size_t length = 2 + random() % 7; token.size() < length;)
      token += static_cast<char>('a' + random() % (tokens.size() % 2 == 0 ? 26 : 3));
    tokens.push_back(token);
  }
  return tokens;
}

TEST(Grammar, WhatTakesTooLongToCompileIsRefused) {
  GrammarEngine engine([]() -> absl::StatusOr<std::vector<std::string>> { return ManyTokens(); }, 60'000);
  ASSERT_TRUE(engine.Compile(SourceOf(Kind::kRegex, "a")).ok());
  std::string properties;
  for (int i = 0; i < 600; ++i)
    absl::StrAppend(&properties, i > 0 ? "," : "", "\"p", i, R"(":{"type":"string","pattern":"[a-z]{400}"})");
  const std::string object =
      absl::StrCat(R"({"type":"object","additionalProperties":false,"required":[],"properties":{)", properties, "}}");
  const std::string source = SourceOf(Kind::kJsonSchema, object);
  const absl::Status busy = engine.Compile(source, nullptr, /*max_wall_ms=*/1).status();
  EXPECT_TRUE(absl::IsUnavailable(busy)) << busy;
  EXPECT_THAT(std::string(busy.message()), HasSubstr("this machine is busy"));
  const absl::Status status = engine.Compile(source, nullptr, /*max_wall_ms=*/0).status();
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("ms to compile"));
  CancelToken cancelled;
  cancelled.Cancel();
  EXPECT_TRUE(absl::IsCancelled(engine.Compile(SourceOf(Kind::kRegex, "[a-z]{500}"), &cancelled).status()));
}

// Bytes, and pieces of texts that reach over what a rule ends with; some longer than any chain of states that is
// followed.
std::vector<std::string> Pieces() {
  std::vector<std::string> pieces = {""};
  for (int byte = 0; byte < 256; ++byte) pieces.emplace_back(1, static_cast<char>(byte));
  for (const char* piece :
       {"ab",  "\"}",  "\":", "\",\"", "a\"",  "\"a",  "{\"",   "[\"", "]}", "[[",  "],[",  "12",   "0.", ", ",
        "\\n", "\\\"", "é",   "aé",    "日本", "日\"", "éa\"}", "x-",  "--", "a\n", "true", "null", "cb", "ccb"})
    pieces.emplace_back(piece);
  for (const size_t length : {15, 31, 32, 64, 127, 128, 129, 140}) {
    pieces.emplace_back(length, 'a');
    pieces.emplace_back(length, ' ');
    pieces.push_back(std::string(length, 'a') + "\"");
  }
  std::mt19937_64 random(2);
  constexpr std::string_view kOf = "aaabcxyz019 -\"";
  while (pieces.size() < 600) {
    std::string piece;
    for (const size_t length = 2 + random() % 9; piece.size() < length;) piece += kOf[random() % kOf.size()];
    pieces.push_back(piece);
  }
  return pieces;
}

bool MayFollow(const std::shared_ptr<const Compiled>& grammar, const std::vector<TokenId>& text, TokenId token) {
  const TokenId ends[] = {kEnd};
  Matcher matcher(grammar, ends);
  for (const TokenId before : text) EXPECT_TRUE(matcher.Accept(before));
  return matcher.Accept(token);
}

std::string Written(const std::vector<std::string>& pieces, const std::vector<TokenId>& text) {
  std::string written;
  for (const TokenId token : text) written += pieces[token];
  return written;
}

// Walks a few texts: tokens outside the masks are refused when tried, each of them, and those inside are taken.
void ExpectMasksAsTried(const std::shared_ptr<const Compiled>& grammar, const std::vector<std::string>& pieces,
                        std::mt19937_64& random) {
  const TokenId ends[] = {kEnd};
  for (int walk = 0; walk < 3; ++walk) {
    Matcher matcher(grammar, ends);
    std::vector<TokenId> text;
    std::vector<uint32_t> mask((pieces.size() + 31) / 32);
    while (text.size() < 60 && !matcher.ended()) {
      ASSERT_TRUE(matcher.FillMask(mask).ok());
      std::vector<TokenId> in;
      for (TokenId id = 0; id < static_cast<TokenId>(pieces.size()); ++id) {
        if (mask[id / 32] >> (id % 32) & 1) {
          in.push_back(id);
        } else {
          ASSERT_FALSE(matcher.Accept(id)) << Written(pieces, text) << " and token " << id << ": " << pieces[id];
        }
      }
      ASSERT_FALSE(in.empty());
      for (int i = 0; i < 8; ++i) {
        const TokenId token = in[random() % in.size()];
        ASSERT_TRUE(MayFollow(grammar, text, token))
            << Written(pieces, text) << " and token " << token << ": " << pieces[token];
      }
      // Short ones often, so that texts come to their bounds one by one, too.
      TokenId next = in[random() % in.size()];
      for (int i = 0; walk > 0 && next > 256 && i < 8; ++i) next = in[random() % in.size()];
      ASSERT_TRUE(matcher.Accept(next));
      text.push_back(next);
    }
  }
}

TEST(Grammar, MasksAreWhatTryingEachTokenSays) {
  const std::vector<std::string> pieces = Pieces();
  GrammarEngine engine([&]() -> absl::StatusOr<std::vector<std::string>> { return pieces; },
                       static_cast<int>(pieces.size()));
  const std::string sources[] = {
      SourceOf(Kind::kRegex, "[a-z ]{1,40}"),
      SourceOf(Kind::kRegex, "[a-z ]{1,300}"),
      SourceOf(Kind::kRegex, "[^\"]{20,30}"),
      SourceOf(Kind::kRegex, ".{3,200}"),
      SourceOf(Kind::kRegex, "a{140,}"),
      SourceOf(Kind::kRegex, "(ab|cd|[xyz]){1,150}"),
      SourceOf(Kind::kRegex, "(a|aa|b){2,9}c?"),
      SourceOf(Kind::kRegex, "([a-z]{1,8}-){2,5}[a-z]{0,8}"),
      SourceOf(Kind::kJsonSchema, R"({"type":"string","maxLength":12})"),
      SourceOf(Kind::kJsonSchema, R"({"type":"string","maxLength":300})"),
      SourceOf(Kind::kJsonSchema, R"({"type":"string","minLength":140})"),
      SourceOf(Kind::kJsonSchema, R"({"type":"string","minLength":3,"maxLength":5})"),
      SourceOf(Kind::kJsonSchema, R"({"type":"string","pattern":"^[a-z0-9-]{1,256}$"})"),
      SourceOf(Kind::kJsonSchema, R"({"type":"array","items":{"type":"string","maxLength":9},"maxItems":6})"),
      SourceOf(Kind::kJsonSchema, R"({"type":"object","additionalProperties":false,"required":["a"],"properties":{
        "a":{"type":"string","maxLength":20},"b":{"type":"string","maxLength":20},"c":{"type":"integer"}}})"),
      SourceOf(Kind::kEbnf, "root ::= \"a\" root \"b\" | \"c\""),
      SourceOf(Kind::kEbnf, "root ::= \"a\" root | part\npart ::= [a-c]{2,6}"),
      SourceOf(Kind::kEbnf, "root ::= part \"x\" | part\npart ::= (\"a\" | \"ab\"){0,5}"),
      SourceOf(Kind::kEbnf, "root ::= part part\npart ::= end | \"-\" end\nend ::= [a-c]{0,4}"),
      SourceOf(Kind::kEbnf, "root ::= list\nlist ::= \"[\" (list (\",\" list)*)? \"]\" | word\nword ::= [a-z]{1,20}")};
  std::mt19937_64 random(3);
  for (const std::string& source : sources) {
    SCOPED_TRACE(source);
    const auto compiled = engine.Compile(source);
    ASSERT_TRUE(compiled.ok()) << compiled.status();
    ExpectMasksAsTried(*compiled, pieces, random);
  }
}

}  // namespace
}  // namespace dovetail::grammar
