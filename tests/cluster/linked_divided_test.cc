#include "tests/cluster/linked_fixture.h"

// Sequences that are divided among the attention workers of several linked GPUs: their decodes, and prompts that are
// attended there, cross between the GPUs, and the logits are those of one GPU that does all. Runs on emulated GPUs.

namespace dovetail::test {
namespace {

using scheduler::PlacementPolicy;

class LinkedDivided : public LinkedTest {
 protected:
  void SetUp() override {
    LinkedTest::SetUp();
    TinyModelSpec spec;
    spec.layers = 4;
    spec.heads = 8;
    spec.kv_heads = 4;
    UseModel(spec);
  }
  static LinkedClusterOptions Divided(PlacementPolicy placement, int workers) {
    return {.attention_workers = workers, .scratch_bytes = std::nullopt, .placement = placement};
  }
  // Several at once, of unlike lengths, some of which end before others.
  void ExpectTheSameOfSeveral(const char* what) {
    constexpr int kRequests = 3;
    std::vector<uint64_t> requests;
    for (int i = 0; i < kRequests; ++i)
      requests.push_back(linked_->Submit(Tokens(30 + 60 * i, 3 + i), 6 + 4 * i, 0, /*logits_of_output=*/true));
    for (int i = 0; i < kRequests; ++i) {
      ASSERT_TRUE(linked_->UntilTheEndOf(requests[i])) << what;
      ExpectOfOneGpu(what, requests[i], Tokens(30 + 60 * i, 3 + i), 0, 6 + 4 * i);
    }
  }
};

TEST_F(LinkedDivided, ByHeadsOverTwoAndThreeGpusHaveTheLogitsOfOne) {
  for (const int workers : {2, 3}) {
    ASSERT_NO_FATAL_FAILURE(Start(Divided(PlacementPolicy::kHeads, workers)));
    ExpectTheSame("a prompt and its decodes", Tokens(150, 1), 150, 12);
    ExpectTheSameOfSeveral("several");
    ExpectNothingThroughHosts();
  }
}

// Their prompts go through the hosts: partial results of so many rows are larger than a slot. A shard is 64 tokens
// long, so each of the workers has several of a sequence, and the last one changes as it grows.
TEST_F(LinkedDivided, ByTokensOverTwoAndThreeGpusHaveTheLogitsOfOne) {
  for (const int workers : {2, 3}) {
    ASSERT_NO_FATAL_FAILURE(Start(Divided(PlacementPolicy::kTokens, workers)));
    ExpectTheSame("a prompt and its decodes", Tokens(250, 1), 250, 12);
    const LinkedFrames before = linked_->frames();
    EXPECT_GE(before.begun_between_gpus, 2 * 11) << "a step for each further token";
    EXPECT_LE(before.begun_through_hosts, workers * 4) << "the prompt's four parts";
    ExpectTheSameOfSeveral("several");
    EXPECT_GE(linked_->frames().begun_between_gpus, before.begun_between_gpus + 2 * 10);
  }
}

// Some sequences lie whole, some are divided by heads, some by tokens, in one batch.
TEST_F(LinkedDivided, BesideWholeOnesHaveTheLogitsOfOneGpuAndSoHaveThose) {
  for (const int workers : {2, 3}) {
    LinkedClusterOptions options = Divided(PlacementPolicy::kMixed, workers);
    options.micro_batches = workers - 1;
    ASSERT_NO_FATAL_FAILURE(Start(options));
    ExpectTheSameOfSeveral("all kinds");
    EXPECT_GE(linked_->frames().begun_between_gpus, 2 * 10);
  }
}

TEST_F(LinkedDivided, ByHeadsInSeveralMicroBatchesHaveTheLogitsOfOneGpu) {
  LinkedClusterOptions options = Divided(PlacementPolicy::kHeads, 2);
  options.micro_batches = 2;
  ASSERT_NO_FATAL_FAILURE(Start(options));
  ExpectTheSameOfSeveral("two micro-batches");
  ExpectNothingThroughHosts();
}

TEST_F(LinkedDivided, OfWindowedLayersHaveTheLogitsOfOneGpu) {
  TinyModelSpec spec;
  spec.architecture = "gemma3";
  spec.layers = 4;
  spec.window = 70;
  UseModel(spec);
  ASSERT_NO_FATAL_FAILURE(Start(Divided(PlacementPolicy::kHeads, 2)));
  ExpectTheSame("windows, by heads", Tokens(300, 6), 300, 12);
  ExpectNothingThroughHosts();
  ASSERT_NO_FATAL_FAILURE(Start(Divided(PlacementPolicy::kTokens, 3)));
  ExpectTheSame("windows, by tokens", Tokens(300, 6), 300, 12);
  EXPECT_GE(linked_->frames().begun_between_gpus, 11) << "in a window's ops, of those workers that it reaches";
}

// A prompt that is attended on the compute worker takes its steps through the hosts; the decodes that follow do not.
TEST_F(LinkedDivided, WhosePromptsAreAttendedOnTheComputeWorkerDecodeBetweenTheGpus) {
  LinkedClusterOptions options = Divided(PlacementPolicy::kHeads, 2);
  options.scratch_bytes = 16 << 20;
  ASSERT_NO_FATAL_FAILURE(Start(options));
  ExpectTheSame("a prompt attended here", Tokens(150, 9), 150, 8);
  EXPECT_EQ(linked_->prompt_tokens_here(), 150u - 150u % 64u + 22u);
  EXPECT_EQ(linked_->frames().begun_through_hosts, 2 * 3) << "the prompt's three parts, on two workers";
  EXPECT_GE(linked_->frames().begun_between_gpus, 2 * 7) << "a step for each further token";
}

// One worker refuses a step that the other takes part in. Either the refusal or the end of the GPUs' waits is known
// first: the request ends with an error, or its step is planned again.
TEST_F(LinkedDivided, BehindAStepThatFailedHaveTheLogitsOfOneGpu) {
  ASSERT_NO_FATAL_FAILURE(Start(Divided(PlacementPolicy::kHeads, 2)));
  for (int worker = 0; worker < 2; ++worker) {
    linked_->LetAnOpFail(worker);
    const std::vector<TokenId> prompt = Tokens(100, 15 + worker);
    const uint64_t failed = linked_->Submit(prompt, 4, 0, true);
    ASSERT_TRUE(linked_->UntilTheEndOf(failed));
    EXPECT_EQ(linked_->failed_steps(), worker + 1);
    if (linked_->stream(failed).error.empty()) ExpectOfOneGpu("planned again", failed, prompt, 0, 4);
    ExpectTheSame("behind it", Tokens(130, 18 + worker), 130);
  }
  ExpectNothingThroughHosts();
}

// One of three stops while a sequence decodes on all: waits end at their deadline, and the sequence begins again on the
// two that are left, which hold all of its heads then.
TEST_F(LinkedDivided, GoOnAmongTheOthersWhenOneOfTheirAttentionWorkersIsLost) {
  for (const PlacementPolicy placement : {PlacementPolicy::kHeads, PlacementPolicy::kTokens}) {
    ASSERT_NO_FATAL_FAILURE(Start(Divided(placement, 3)));
    const std::vector<TokenId> prompt = Tokens(150, 13);
    const uint64_t request = linked_->Submit(prompt, 12, 0, true);
    ASSERT_TRUE(linked_->Until([&] { return linked_->stream(request).tokens.size() >= 4; }));
    linked_->Stop(1);
    ASSERT_TRUE(linked_->Until([&] { return linked_->failed_steps() >= 1; }));
    linked_->Lose(1);
    const int before = linked_->frames().begun_between_gpus;
    ASSERT_TRUE(linked_->UntilTheEndOf(request));
    ExpectOfOneGpu("among the others", request, prompt, 0, 12);
    EXPECT_GE(linked_->frames().begun_between_gpus, before + 2 * 7);
    if (placement == PlacementPolicy::kHeads) ExpectNothingThroughHosts();
  }
}

}  // namespace
}  // namespace dovetail::test
