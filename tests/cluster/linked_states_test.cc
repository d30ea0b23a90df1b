#include <ostream>
#include <random>
#include <string>

#include "tests/cluster/linked_fixture.h"
#include "tests/cluster/tiny_hybrid.h"
#include "tests/golden/golden.h"

// Decodes of models with linear states, whose attention workers have GPUs that are linked with the compute worker's: q,
// k, v and gates of every layer, and o, cross between the GPUs. The logits are those of one GPU that does all. Runs on
// emulated GPUs.

namespace dovetail::test {
namespace {

using scheduler::PlacementPolicy;

class LinkedStates : public LinkedTest {
 protected:
  void SetUp() override {
    LinkedTest::SetUp();
    UseHybrid(TinyGatedDeltaConfig());
  }
  void UseHybrid(const std::string& config) { path_ = WriteTinyFolder(config, 5, TempFolder()); }
  static LinkedClusterOptions Over(int workers, PlacementPolicy placement = PlacementPolicy::kRequest) {
    return {.attention_workers = workers, .scratch_bytes = std::nullopt, .placement = placement};
  }
  // Of the same request; behind its first token no tensor goes through the hosts.
  void ExpectDecodesBetweenTheGpus(const char* what, const std::vector<TokenId>& prompt, int max_tokens) {
    const uint64_t request = linked_->Submit(prompt, max_tokens, 0, /*logits_of_output=*/true);
    ASSERT_TRUE(linked_->Until([&] { return !linked_->stream(request).tokens.empty(); })) << what;
    const LinkedFrames first = linked_->frames();
    ASSERT_TRUE(linked_->UntilTheEndOf(request)) << what;
    EXPECT_EQ(linked_->frames().tensors, first.tensors) << what;
    EXPECT_EQ(linked_->frames().begun_through_hosts, first.begun_through_hosts) << what;
    EXPECT_GE(linked_->frames().begun_between_gpus, first.begun_between_gpus + max_tokens - 2) << what;
    ExpectOfOneGpu(what, request, prompt, 0, max_tokens);
  }
  // Requests of all lengths that begin and end at different times.
  void ExpectTheSameOfManyThatComeAndGo(const char* what, int seed) {
    std::mt19937 random(seed);
    const auto draw = [&](int from, int to) { return from + static_cast<int>(random() % (to - from + 1)); };
    struct Sent {
      uint64_t id = 0;
      std::vector<TokenId> prompt;
      int tokens = 0;
    };
    std::vector<Sent> sent;
    for (int i = 0; i < 7; ++i) {
      Sent one{0, Tokens(draw(3, 140), draw(1, 50)), draw(2, 30)};
      one.id = linked_->Submit(one.prompt, one.tokens, 0, /*logits_of_output=*/true);
      sent.push_back(one);
      const Sent& waited = sent[draw(0, i)];
      const auto count = static_cast<size_t>(draw(1, waited.tokens));
      ASSERT_TRUE(linked_->Until([&] { return linked_->stream(waited.id).tokens.size() >= count; })) << what;
    }
    for (const Sent& one : sent) {
      ASSERT_TRUE(linked_->UntilTheEndOf(one.id)) << what;
      ExpectOfOneGpu(what, one.id, one.prompt, 0, one.tokens);
    }
  }
};

// The prompt's states come through the hosts, as the compute worker leaves them.
TEST_F(LinkedStates, OfSequencesThatLieWholeOnOneGpuCrossBetweenTheGpus) {
  ASSERT_NO_FATAL_FAILURE(Start(Over(1)));
  ExpectDecodesBetweenTheGpus("a prompt of three parts", Tokens(150, 1), 12);
  EXPECT_GT(linked_->frames().begun_through_hosts, 0) << "its prompt";
  ExpectDecodesBetweenTheGpus("over the end of a block of tokens, and of the next", Tokens(60, 2), 80);
}

// Their tokens are few enough to be those of decodes.
TEST_F(LinkedStates, OfShortPromptsCrossBetweenTheGpusFromTheFirstTokenOn) {
  ASSERT_NO_FATAL_FAILURE(Start(Over(2, PlacementPolicy::kHeads)));
  ExpectTheSame("a short prompt", Tokens(9, 3), 9, 12);
  ExpectNothingThroughHosts();
}

TEST_F(LinkedStates, DividedByHeadsOverTwoAndThreeGpusCrossBetweenTheGpus) {
  for (const int workers : {2, 3}) {
    ASSERT_NO_FATAL_FAILURE(Start(Over(workers, PlacementPolicy::kHeads)));
    ExpectDecodesBetweenTheGpus("by heads", Tokens(100, 4), 12);
  }
}

// Softmax layers divided by tokens lie on several GPUs, states by heads or on one.
TEST_F(LinkedStates, BesideSoftmaxLayersThatAreDividedByTokensCrossBetweenTheGpus) {
  ASSERT_NO_FATAL_FAILURE(Start(Over(3, PlacementPolicy::kTokens)));
  ExpectDecodesBetweenTheGpus("by tokens", Tokens(250, 5), 12);
}

TEST_F(LinkedStates, OfManySequencesThatComeAndGoHaveTheLogitsOfOneGpu) {
  int seed = 1;
  for (const PlacementPolicy placement : {PlacementPolicy::kRequest, PlacementPolicy::kMixed}) {
    for (const int micro_batches : {1, 2}) {
      LinkedClusterOptions options = Over(1 + micro_batches, placement);
      options.micro_batches = micro_batches;
      ASSERT_NO_FATAL_FAILURE(Start(options));
      ExpectTheSameOfManyThatComeAndGo(placement == PlacementPolicy::kMixed ? "mixed" : "whole", seed++);
      EXPECT_GE(linked_->frames().begun_between_gpus, 10);
    }
  }
}

// Three sequences that do not fit when they have grown: one is preempted, and its states are computed again.
TEST_F(LinkedStates, OfPreemptedSequencesHaveTheLogitsOfOneGpu) {
  LinkedClusterOptions options = Over(1);
  options.kv_blocks = 150;
  ASSERT_NO_FATAL_FAILURE(Start(options));
  constexpr int kRequests = 3, kTokens = 90;
  std::vector<uint64_t> requests;
  for (int i = 0; i < kRequests; ++i) requests.push_back(linked_->Submit(Tokens(40 + i, 11 + i), kTokens, 0, true));
  for (const uint64_t request : requests) ASSERT_TRUE(linked_->UntilTheEndOf(request));
  EXPECT_GE(linked_->stats().preemptions, 1u);
  for (int i = 0; i < kRequests; ++i) ExpectOfOneGpu("preempted", requests[i], Tokens(40 + i, 11 + i), 0, kTokens);
}

// One worker refuses a step that the other takes part in: what it does not wait for is not appended there.
TEST_F(LinkedStates, BehindAStepThatFailedHaveTheLogitsOfOneGpu) {
  ASSERT_NO_FATAL_FAILURE(Start(Over(2, PlacementPolicy::kHeads)));
  for (int worker = 0; worker < 2; ++worker) {
    const std::vector<TokenId> stays = Tokens(90, 30 + worker), prompt = Tokens(9, 15 + worker);
    const uint64_t before = linked_->Submit(stays, 40, 0, true);
    ASSERT_TRUE(linked_->Until([&] { return linked_->stream(before).tokens.size() >= 5; }));
    linked_->LetAnOpFail(worker);
    const uint64_t failed = linked_->Submit(prompt, 4, 0, true);
    ASSERT_TRUE(linked_->UntilTheEndOf(failed) && linked_->UntilTheEndOf(before));
    EXPECT_GE(linked_->failed_steps(), worker + 1);
    if (linked_->stream(failed).error.empty()) ExpectOfOneGpu("planned again", failed, prompt, 0, 4);
    if (linked_->stream(before).error.empty()) ExpectOfOneGpu("in its step", before, stays, 0, 40);
    ExpectDecodesBetweenTheGpus("behind it", Tokens(130, 18 + worker), 6);
  }
}

// One of three stops in mid-step, with heads of all sequences: waits end at their deadline, and the sequences begin
// again on the two that are left.
TEST_F(LinkedStates, GoOnAmongTheOthersWhenOneOfTheirAttentionWorkersIsLost) {
  ASSERT_NO_FATAL_FAILURE(Start(Over(3, PlacementPolicy::kHeads)));
  const std::vector<TokenId> one = Tokens(150, 13), other = Tokens(40, 14);
  const uint64_t first = linked_->Submit(one, 12, 0, true), second = linked_->Submit(other, 30, 0, true);
  ASSERT_TRUE(linked_->Until([&] { return linked_->stream(first).tokens.size() >= 4; }));
  linked_->Stop(1);
  ASSERT_TRUE(linked_->Until([&] { return linked_->failed_steps() >= 1; }));
  linked_->Lose(1);
  const int before = linked_->frames().begun_between_gpus;
  ASSERT_TRUE(linked_->UntilTheEndOf(first) && linked_->UntilTheEndOf(second));
  ExpectOfOneGpu("among the others", first, one, 0, 12);
  ExpectOfOneGpu("among the others", second, other, 0, 30);
  EXPECT_GE(linked_->frames().begun_between_gpus, before + 2 * 7);
}

struct Family {
  const char* name;
  const char* group;  // of the goldens

  friend std::ostream& operator<<(std::ostream& out, const Family& family) { return out << family.name; }
};

class LinkedStatesOfFamilies : public LinkedStates, public ::testing::WithParamInterface<Family> {};

TEST_P(LinkedStatesOfFamilies, CrossBetweenTheGpusWholeAndDivided) {
  path_ = GoldenFolder(GetParam().group, GetParam().name);
  if (path_.empty()) GTEST_SKIP() << "missing test data: goldens/" << GetParam().group;
  std::vector<TokenId> prompt = ReadGolden(path_).prompt;
  prompt.resize(std::min<size_t>(prompt.size(), 90));
  for (const int workers : {1, 2}) {
    ASSERT_NO_FATAL_FAILURE(Start(Over(workers, PlacementPolicy::kHeads)));
    ExpectDecodesBetweenTheGpus(GetParam().name, prompt, 8);
  }
}

INSTANTIATE_TEST_SUITE_P(Goldens, LinkedStatesOfFamilies,
                         ::testing::Values(Family{"minimax_lightning", "hybrid"},
                                           Family{"minimax_lightning_plain", "hybrid"}, Family{"qwen3_next", "hybrid"},
                                           Family{"qwen3_5", "hybrid"}, Family{"kimi_linear", "hybrid"},
                                           Family{"mamba2", "hybrid"}, Family{"bamba", "hybrid"},
                                           Family{"granite4_hybrid", "hybrid"}, Family{"olmo_hybrid", "hybrid"},
                                           Family{"lfm2", "hybrid"}, Family{"falcon_h1", "hybrid"},
                                           Family{"nemotron_h", "ours"}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace dovetail::test
