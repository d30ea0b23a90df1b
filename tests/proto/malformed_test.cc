#include <algorithm>
#include <cmath>
#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/proto/message_samples.h"

// One field wrong at a time: each is refused under its name.

namespace dovetail::proto::testing {
namespace {

using ::testing::HasSubstr;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr Position kLastPosition = Position{kMaxSequenceBlocks} * kSegmentTokens;

template <typename Change>
std::string Plan(Change change) {
  StepPlan plan = FullPlan();
  change(plan.entries[0]);
  const auto decoded = DecodeStepPlan(Bytes(plan));
  return decoded.ok() ? "accepted" : std::string(decoded.status().message());
}

template <typename Change>
std::string Sampling(Change change) {
  return Plan([&](StepEntry& entry) { change(entry.sampling); });
}

template <typename Change>
std::string Lists(Change change) {
  return Plan([&](StepEntry& entry) {
    SamplingLists lists = *entry.given.lists;
    change(lists);
    entry.given.lists = std::make_shared<const SamplingLists>(std::move(lists));
  });
}

template <typename Change>
std::string Result(Change change) {
  StepResult result = FullResult();
  change(result);
  const auto decoded = DecodeStepResult(Bytes(result));
  return decoded.ok() ? "accepted" : std::string(decoded.status().message());
}

template <typename Message>
std::string Whole(const Message& message) {
  const auto decoded = Decode<Message>(Bytes(message));
  return decoded.ok() ? "accepted" : std::string(decoded.status().message());
}

template <typename Change>
std::string OneShard(Change change) {
  OpenSequence open = FullOpen();
  change(open.shards[0]);
  return Whole(open);
}

TEST(StepPlanField, PositionsLieWithinTheLimit) {
  EXPECT_EQ(Plan([](StepEntry& e) { e.ctx_len = kLastPosition; }), "accepted");
  EXPECT_THAT(Plan([](StepEntry& e) { e.ctx_len = kLastPosition + 1; }),
              HasSubstr("StepPlan: ctx_len is not a position"));
  EXPECT_THAT(Plan([](StepEntry& e) { e.ctx_len = -1; }), HasSubstr("ctx_len is not a position"));
}

TEST(StepPlanField, AnEntryHasTokensAndAStepNotTooMany) {
  EXPECT_THAT(Plan([](StepEntry& e) { e.tokens.clear(), e.logits_rows = 0; }), HasSubstr("tokens is empty"));
  EXPECT_THAT(Plan([](StepEntry& e) { e.tokens.resize(kMaxStepTokens + 1); }),
              HasSubstr("tokens counts 65473 elements; at most 65472"));
  EXPECT_THAT(Plan([](StepEntry& e) { e.tokens.resize(kMaxStepTokens); }),
              HasSubstr("entries hold no token or more than a step may"))
      << "the other entry has one too";
  const auto none = DecodeStepPlan(Bytes(StepPlan{}));
  EXPECT_THAT(std::string(none.status().message()), HasSubstr("entries hold no token"));
}

TEST(StepPlanField, CountsAndRowsAreNotNegative) {
  EXPECT_THAT(Plan([](StepEntry& e) { e.rope_length = -1; }), HasSubstr("rope_length is negative"));
  EXPECT_THAT(Plan([](StepEntry& e) { e.prompt_tokens = -1; }), HasSubstr("prompt_tokens is negative"));
  EXPECT_THAT(Plan([](StepEntry& e) { e.logits_rows = -1; }), HasSubstr("logits_rows is more than the entry's tokens"));
  EXPECT_THAT(Plan([](StepEntry& e) { e.logits_rows = 6; }), HasSubstr("logits_rows is more than the entry's tokens"));
  EXPECT_EQ(Plan([](StepEntry& e) { e.logits_rows = 5; }), "accepted");
  EXPECT_EQ(Plan([](StepEntry& e) { e.pool_first = 0, e.pool_rows = 5; }), "accepted");
  for (const auto& [first, rows] : {std::pair{-1, 1}, {0, -1}, {0, 6}, {5, 1}, {1, 0x7fffffff}})
    EXPECT_THAT(Plan([first = first, rows = rows](StepEntry& e) { e.pool_first = first, e.pool_rows = rows; }),
                HasSubstr("pool_rows are not among the entry's tokens"));
}

TEST(StepPlanField, LogprobsLieWithinTheLimit) {
  EXPECT_EQ(Plan([](StepEntry& e) { e.prompt_logprobs = kMaxTopLogprobs; }), "accepted");
  for (const int bad : {-2, kMaxTopLogprobs + 1}) {
    EXPECT_THAT(Plan([&](StepEntry& e) { e.prompt_logprobs = bad; }),
                HasSubstr("prompt_logprobs is outside the limit"));
    EXPECT_THAT(Sampling([&](SamplingParams& p) { p.logprobs = bad; }), HasSubstr("logprobs is outside the limit"));
  }
}

TEST(StepPlanField, SamplingParametersAreNumbersInTheirRange) {
  for (const float bad : {-0.1f, kNan, kInfinity})
    EXPECT_THAT(Sampling([&](SamplingParams& p) { p.temperature = bad; }),
                HasSubstr("temperature is negative or not finite"));
  for (const float bad : {-0.1f, 1.1f, kNan, kInfinity}) {
    EXPECT_THAT(Sampling([&](SamplingParams& p) { p.top_p = bad; }), HasSubstr("top_p is outside 0..1"));
    EXPECT_THAT(Sampling([&](SamplingParams& p) { p.min_p = bad; }), HasSubstr("min_p is outside 0..1"));
  }
  for (const float bad : {0.0f, -1.0f, kNan, kInfinity})
    EXPECT_THAT(Sampling([&](SamplingParams& p) { p.repetition_penalty = bad; }),
                HasSubstr("repetition_penalty is not a positive"));
  for (const float bad : {kNan, kInfinity, -kInfinity}) {
    EXPECT_THAT(Sampling([&](SamplingParams& p) { p.presence_penalty = bad; }), HasSubstr("penalty is not finite"));
    EXPECT_THAT(Sampling([&](SamplingParams& p) { p.frequency_penalty = bad; }), HasSubstr("penalty is not finite"));
  }
  EXPECT_THAT(Lists([](SamplingLists& l) { l.logit_bias[1].first = -1; }), HasSubstr("logit_bias.token is negative"));
  EXPECT_THAT(Lists([](SamplingLists& l) { l.logit_bias[1].second = kNan; }),
              HasSubstr("logit_bias.value is not a number"));
  EXPECT_THAT(Lists([](SamplingLists& l) { l.logit_bias.resize(1025); }),
              HasSubstr("logit_bias counts 1025 elements; at most 1024"));
  for (const auto list :
       {&SamplingLists::allowed_token_ids, &SamplingLists::banned_token_ids, &SamplingLists::banned_early}) {
    EXPECT_EQ(Lists([&](SamplingLists& l) { (l.*list).resize(kMaxTokenList); }), "accepted");
    EXPECT_THAT(Lists([&](SamplingLists& l) { (l.*list).resize(kMaxTokenList + 1); }),
                HasSubstr("counts 1048577 elements; at most 1048576"));
  }
}

TEST(StepPlanField, FlagsAreZeroOrOne) {
  const auto bytes = Bytes(FullPlan());
  const auto with_two_at_the_flag = [&](auto clear) {
    StepPlan plan = FullPlan();
    clear(plan.entries[0]);
    auto changed = Bytes(plan);
    const auto flag = std::mismatch(bytes.begin(), bytes.end(), changed.begin()).first - bytes.begin();
    changed = bytes;
    changed[static_cast<size_t>(flag)] = std::byte{2};
    return std::string(DecodeStepPlan(changed).status().message());
  };
  EXPECT_THAT(with_two_at_the_flag([](StepEntry& e) { e.sample = false; }), HasSubstr("sample is neither 0 nor 1"));
  EXPECT_THAT(with_two_at_the_flag([](StepEntry& e) { e.history_given = false; }),
              HasSubstr("history_given is neither 0 nor 1"));
}

TEST(Shard, LiesOnSegmentBoundariesAndHasHeads) {
  EXPECT_EQ(OneShard([](Shard& s) { s.tokens = {64, 128}; }), "accepted");
  EXPECT_EQ(OneShard([](Shard& s) { s.tokens = {0, kLastPosition}; }), "accepted");
  for (const TokenRange bad : {TokenRange{64, 64}, TokenRange{128, 64}, TokenRange{-64, 64}})
    EXPECT_THAT(OneShard([&](Shard& s) { s.tokens = bad; }), HasSubstr("OpenSequence: shard.tokens is empty"));
  for (const TokenRange bad : {TokenRange{0, 65}, TokenRange{1, 64}})
    EXPECT_THAT(OneShard([&](Shard& s) { s.tokens = bad; }),
                HasSubstr("shard.tokens does not lie on segment boundaries"));
  for (const TokenRange bad :
       {TokenRange{0, kLastPosition + 64}, TokenRange{kLastPosition + 64, kOpenEnd}, TokenRange{0, kOpenEnd - 63}})
    EXPECT_THAT(OneShard([&](Shard& s) { s.tokens = bad; }), HasSubstr("shard.tokens lies beyond the last position"));
  for (const HeadRange bad : {HeadRange{0, 0}, HeadRange{-1, 2}, HeadRange{3, 2}, HeadRange{0, kMaxHeads + 1}})
    EXPECT_THAT(OneShard([&](Shard& s) { s.kv_heads = bad; }),
                HasSubstr("shard.kv_heads is empty or outside the limit"));
}

TEST(Shard, AreNotTooMany) {
  OpenSequence open = FullOpen();
  open.shards.resize(kMaxShards, open.shards[0]);
  EXPECT_EQ(Whole(open), "accepted");
  open.shards.push_back(open.shards[0]);
  EXPECT_THAT(Whole(open), HasSubstr("shards counts 65 elements; at most 64"));
}

TEST(StepBeginField, TokensLieWithinTheLimit) {
  StepBegin begin = FullBegin();
  for (const int bad : {0, -1, kMaxStepTokens + 1}) {
    begin.entries[0].q_len = bad;
    EXPECT_THAT(Whole(begin), HasSubstr("StepBegin: entry.q_len is outside the limit")) << bad;
  }
  begin.entries[0].q_len = kMaxStepTokens;
  EXPECT_THAT(Whole(begin), HasSubstr("entries hold no token or more than a step may"));
  begin.entries.resize(1);
  EXPECT_EQ(Whole(begin), "accepted");
  EXPECT_THAT(Whole(StepBegin{}), HasSubstr("entries hold no token"));
  begin.entries[0].ctx_len = -64;
  EXPECT_THAT(Whole(begin), HasSubstr("entry.ctx_len is not a position"));
}

TEST(StepBeginField, QueriesAttendWholeSegmentsBeforeTheStep) {
  StepBegin begin = FullBegin();
  for (const Position bad : {Position{-64}, Position{65}, Position{192}, kOpenEnd - 1}) {
    begin.entries[0].attend_end = bad;
    EXPECT_THAT(Whole(begin), HasSubstr("entry.attend_end is no segment boundary at or before ctx_len")) << bad;
  }
  for (const Position good : {Position{0}, Position{64}, Position{128}, kOpenEnd}) {
    begin.entries[0].attend_end = good;
    EXPECT_EQ(Whole(begin), "accepted") << good;
  }
}

TEST(StepBeginField, GatheredTokensLieBetweenWhatIsAttendedAndTheStep) {
  StepBegin begin = FullBegin();
  begin.entries[0].attend_end = 64;
  for (const Position bad : {Position{63}, Position{128}, Position{-1}, kOpenEnd - 1}) {
    begin.entries[0].gather_begin = bad;
    EXPECT_THAT(Whole(begin), HasSubstr("entry.gather_begin is not between attend_end and ctx_len")) << bad;
  }
  for (const Position good : {Position{64}, Position{127}, kOpenEnd}) {
    begin.entries[0].gather_begin = good;
    EXPECT_EQ(Whole(begin), "accepted") << good;
  }
  begin.entries[0].attend_end = kOpenEnd;
  begin.entries[0].gather_begin = 64;
  EXPECT_THAT(Whole(begin), HasSubstr("entry.gather_begin"));
}

TEST(StepBeginField, APieceOfWhatIsGatheredHasALargestSize) {
  StepBegin begin = FullBegin();
  for (const int64_t bad : {int64_t{-1}, kMaxGatherPieceBytes + 1}) {
    begin.gather_piece_bytes = bad;
    EXPECT_THAT(Whole(begin), HasSubstr("gather_piece_bytes is outside the limit")) << bad;
  }
  for (const int64_t good : {int64_t{0}, int64_t{1}, kMaxGatherPieceBytes}) {
    begin.gather_piece_bytes = good;
    EXPECT_EQ(Whole(begin), "accepted") << good;
  }
}

TEST(StepBeginField, WhatIsGatheredEndsBetweenItsBeginAndTheStep) {
  StepBegin begin = FullBegin();
  begin.entries[0].attend_end = begin.entries[0].gather_begin = 64;
  for (const Position bad : {Position{64}, Position{129}, Position{-1}, kOpenEnd - 1}) {
    begin.entries[0].gather_end = bad;
    EXPECT_THAT(Whole(begin), HasSubstr("entry.gather_end is not between gather_begin and ctx_len")) << bad;
  }
  for (const Position good : {Position{65}, Position{128}, kOpenEnd}) {
    begin.entries[0].gather_end = good;
    EXPECT_EQ(Whole(begin), "accepted") << good;
  }
  begin.entries[0].gather_begin = kOpenEnd;
  begin.entries[0].gather_end = 100;
  EXPECT_THAT(Whole(begin), HasSubstr("entry.gather_end"));
}

TEST(StepBeginField, StatesCrossInOneOfThreeWaysAndNotInAMove) {
  StepBegin begin = FullBegin();
  for (const auto good : {StateExchange::kTokens, StateExchange::kLeave, StateExchange::kFetch}) {
    begin.entries[0].states = good;
    EXPECT_EQ(Whole(begin), "accepted") << static_cast<int>(good);
  }
  begin.entries[0].states = static_cast<StateExchange>(3);
  EXPECT_THAT(Whole(begin), HasSubstr("entry.states is no way for states to cross"));
  begin = FullBegin();
  begin.entries[1].states = StateExchange::kLeave;  // which is a part of a move
  EXPECT_THAT(Whole(begin), HasSubstr("entry.states"));
}

TEST(PartField, FitsTheStepItIsOf) {
  EXPECT_EQ(Whole(BeginOfRank()), "accepted");
  const auto begin = [](auto change) {
    StepBegin begin = BeginOfRank();
    change(begin);
    return Whole(begin);
  };
  EXPECT_THAT(begin([](StepBegin& b) { b.part.ranks = 1; }), HasSubstr("part.ranks is outside the limit"));
  EXPECT_THAT(begin([](StepBegin& b) { b.part.ranks = kMaxPrefillRanks + 1; }), HasSubstr("part.ranks is outside"));
  EXPECT_THAT(begin([](StepBegin& b) { b.part.rank = 2; }), HasSubstr("part.rank is none of the ranks"));
  EXPECT_THAT(begin([](StepBegin& b) { b.part.rank = -1; }), HasSubstr("part.rank is none of the ranks"));
  EXPECT_THAT(begin([](StepBegin& b) { b.part.end = b.part.base; }), HasSubstr("part.end is not after part.base"));
  EXPECT_THAT(begin([](StepBegin& b) { b.part.base = 192; }), HasSubstr("part.rank does not begin where"));
  EXPECT_THAT(begin([](StepBegin& b) { b.part.end = 196; }), HasSubstr("part.rank does not end where"));
  EXPECT_THAT(begin([](StepBegin& b) { b.part.ranks = 3; }), HasSubstr("part.rank does not end where"));
  EXPECT_THAT(begin([](StepBegin& b) { b.part.rank = 0; }), HasSubstr("part.rank does not"));
  EXPECT_THAT(begin([](StepBegin& b) { b.entries.push_back(b.entries[0]); }), HasSubstr("are not one"));
  EXPECT_THAT(begin([](StepBegin& b) { b.entries[0].fill_end = 512; }), HasSubstr("are not one"));
  EXPECT_THAT(begin([](StepBegin& b) { b.entries[0].ctx_len = 191; }), HasSubstr("part.rank does not"));
  StepPlan plan = PlanOfRank();
  plan.step = plan.part.group;
  EXPECT_THAT(std::string(DecodeStepPlan(Bytes(plan)).status().message()), HasSubstr("is not the step of rank 0"));
}

TEST(ExchangeField, IsOneThatThereIsAndBetweenRanksOnlyInAGroup) {
  const auto said = [](const StepPlan& plan) { return std::string(DecodeStepPlan(Bytes(plan)).status().message()); };
  StepPlan plan = PlanOfRank();
  for (int e = 0; e <= static_cast<int>(kLastPrefixExchange); ++e) {
    plan.entries[0].exchange = static_cast<PrefixExchange>(e);
    EXPECT_EQ(said(plan), "") << NameOf(plan.entries[0].exchange);
  }
  plan.entries[0].exchange = static_cast<PrefixExchange>(static_cast<int>(kLastPrefixExchange) + 1);
  EXPECT_THAT(said(plan), HasSubstr("exchange is unknown"));
  plan = PlanOfRank();
  plan.entries[0].linear_exchange = static_cast<LinearExchange>(static_cast<int>(kLastLinearExchange) + 1);
  EXPECT_THAT(said(plan), HasSubstr("linear_exchange is unknown"));
  plan = FullPlan();
  EXPECT_EQ(said(plan), "");
  plan.entries[0].exchange = PrefixExchange::kSwitch;
  EXPECT_THAT(said(plan), HasSubstr("exchange is one between ranks, and the step is not a part of a group"));
  plan = FullPlan();
  plan.entries[1].linear_exchange = LinearExchange::kScan;
  EXPECT_THAT(said(plan), HasSubstr("exchange is one between ranks, and the step is not a part of a group"));
  for (const PrefixExchange exchange : {PrefixExchange::kGatherDirect, PrefixExchange::kRing}) {
    plan = PlanOfRank();
    plan.gives_back = true;
    plan.entries[0].exchange = exchange;
    if (exchange == PrefixExchange::kGatherDirect) {
      EXPECT_EQ(said(plan), "");
      EXPECT_TRUE(DecodeStepPlan(Bytes(plan))->gives_back);
    } else {
      EXPECT_THAT(said(plan), HasSubstr("gives_back goes with gather-direct only"));
    }
  }
  plan = PlanOfRank();
  plan.ranks.pop_back();
  EXPECT_THAT(said(plan), HasSubstr("ranks are not those of the group"));
  plan = PlanOfRank();
  plan.entries[0].exchange = PrefixExchange::kAsk;
  plan.entries[0].linear_exchange = LinearExchange::kStates;
  EXPECT_THAT(said(plan), HasSubstr("there is no exchange between them"));
  for (const auto& [rank, begin] : {std::pair(0, 64), {0, 192}, {1, 100}, {1, 191}, {1, 256}}) {
    plan = PlanOfRank();
    plan.ranks[static_cast<size_t>(rank)].begin = begin;
    EXPECT_THAT(said(plan), HasSubstr("ranks do not tile the group's tokens")) << rank << " at " << begin;
  }
  for (const bool step : {false, true}) {
    plan = PlanOfRank();
    (step ? plan.ranks[1].step : plan.ranks[0].step) = StepId(79);
    if (!step) plan.ranks[1].micro_batch = MicroBatchId(4);
    EXPECT_THAT(said(plan), HasSubstr("ranks have another step here"));
  }
}

TEST(MoveSequenceField, GoesForwardFromASegmentInASlotThatThereIs) {
  const MoveSequence good{SequenceId(5), 64, 700, 3, StepId(9), NodeId(7), Epoch(8)};
  EXPECT_EQ(Whole(good), "accepted");
  for (const auto& [begin, end, slot] : {std::tuple{Position{65}, Position{700}, 0},
                                         {Position{704}, Position{700}, 0},
                                         {Position{0}, Position{0}, 0},
                                         {Position{-64}, Position{700}, 0},
                                         {Position{0}, Position{1} << 40, 0},
                                         {Position{0}, Position{64}, 4}}) {
    MoveSequence bad = good;
    bad.begin = begin, bad.end = end, bad.slot = static_cast<uint16_t>(slot);
    EXPECT_THAT(Whole(bad), HasSubstr("MoveSequence: ")) << begin << ".." << end << " " << slot;
  }
}

TEST(OtherFields, OfSequenceMessages) {
  EXPECT_THAT(Whole(ForkSequence{SequenceId(1), SequenceId(2), -1}),
              HasSubstr("ForkSequence: ctx_len is not a position"));
  EXPECT_THAT(Whole(ReleaseSequence{SequenceId(1), kLastPosition + 1, {}}),
              HasSubstr("ReleaseSequence: ctx_len is not a position"));
  const auto cut = Decode<StepRefused>(Bytes(StepRefused{false, std::string(5000, 'x')}));
  ASSERT_TRUE(cut.ok()) << "a text is cut where it is encoded";
  EXPECT_EQ(cut->reason, std::string(4096, 'x'));
  std::vector<std::byte> longer = Bytes(StepRefused{false, std::string(4096, 'x')});
  longer[1] = std::byte{1};  // the lowest byte of the text's size
  EXPECT_THAT(std::string(Decode<StepRefused>(longer).status().message()),
              HasSubstr("reason counts 4097 elements; at most 4096"));
  auto refused = Bytes(StepRefused{});
  refused[0] = std::byte{7};
  EXPECT_THAT(std::string(Decode<StepRefused>(refused).status().message()),
              HasSubstr("out_of_memory is neither 0 nor 1"));
}

TEST(StepResultField, IsRefusedByName) {
  EXPECT_EQ(Result([](StepResult&) {}), "accepted");
  EXPECT_THAT(Result([](StepResult& r) { r.status = static_cast<StepStatus>(8); }),
              HasSubstr("StepResult: status is unknown"));
  EXPECT_THAT(Result([](StepResult& r) { r.entries[0].status = static_cast<StepStatus>(255); }),
              HasSubstr("status is unknown"));
  EXPECT_THAT(Result([](StepResult& r) { r.entries[0].position = -5; }), HasSubstr("position is not a position"));
  EXPECT_EQ(Result([](StepResult& r) { r.error.assign(4097, 'x'); }), "accepted") << "cut where it is encoded";
  EXPECT_THAT(Result([](StepResult& r) { r.entries[0].logprobs.top.resize(65); }),
              HasSubstr("top counts 65 elements; at most 64"));
  EXPECT_THAT(Result([](StepResult& r) { r.entries.resize(kMaxStepEntries + 1); }),
              HasSubstr("entries counts 4097 elements; at most 4096"));
}

}  // namespace
}  // namespace dovetail::proto::testing
