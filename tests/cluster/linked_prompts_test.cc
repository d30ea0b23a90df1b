#include "tests/cluster/linked_fixture.h"

// Prompts on a compute worker's GPU that is linked with those of its attention workers: they are attended there, decode
// rows on the attention workers, and what crosses does so from GPU to GPU. The logits are those of one GPU that does
// all. Runs on emulated GPUs.

namespace dovetail::test {
namespace {

using LinkedPrompts = LinkedTest;

TEST_F(LinkedPrompts, OfOneAndOfManyPartsAndTheirDecodesHaveTheLogitsOfOneGpu) {
  ASSERT_NO_FATAL_FAILURE(Start());
  ExpectTheSame("one part", Tokens(45, 1), 45);
  EXPECT_EQ(linked_->prompt_tokens_here(), 45u);
  ExpectTheSame("five parts", Tokens(300, 2), 300, 12);
  EXPECT_EQ(linked_->prompt_tokens_here(), 345u) << "all parts";
  ExpectTheSame("too few tokens to be attended here", Tokens(12, 8), 12);
  EXPECT_EQ(linked_->prompt_tokens_here(), 345u);
  ExpectNothingThroughHosts();
}

// Steps of more rows than are recorded, and heads that are not asked for.
TEST_F(LinkedPrompts, OfLargeStepsHaveTheLogitsOfOneGpu) {
  ASSERT_NO_FATAL_FAILURE(Start({.step_tokens = 320}));
  ExpectTheSame("a part of 320 tokens and one of 100", Tokens(420, 3), 20);
  EXPECT_EQ(linked_->prompt_tokens_here(), 420u);
  ExpectNothingThroughHosts();
}

TEST_F(LinkedPrompts, AfterACachedPrefixAreAttendedWhereThatIs) {
  ASSERT_NO_FATAL_FAILURE(Start());
  const std::vector<TokenId> prefix = Tokens(200, 3), prompt = Joined(prefix, Tokens(150, 4));
  ExpectTheSame("a prefix", prefix, 10);
  EXPECT_EQ(linked_->prompt_tokens_here(), 192u) << "but for the last 8, which are too few";
  ExpectTheSame("after a prefix", prompt, 150);
  EXPECT_EQ(linked_->prompt_tokens_here(), 192u) << "what it sees is not here";
  ExpectNothingThroughHosts();
}

// A prompt that outgrows the scratch goes on where its earlier parts are.
TEST_F(LinkedPrompts, ThatOutgrowTheScratchGoOnWhereTheirEarlierPartsAre) {
  // A block is 64 tokens of a KV head and an op, 4 KiB; 4 ops of 2 heads. Room for two parts of a prompt.
  ASSERT_NO_FATAL_FAILURE(Start({.scratch_bytes = 2 * 8 * 4096 + 4096}));
  ExpectTheSame("outgrown", Tokens(300, 5), 300);
  EXPECT_GE(linked_->prompt_tokens_here(), 64u);
  EXPECT_LE(linked_->prompt_tokens_here(), 128u);
  ExpectNothingThroughHosts();
}

TEST_F(LinkedPrompts, OfWindowedLayersHaveTheLogitsOfOneGpu) {
  TinyModelSpec spec;
  spec.architecture = "gemma3";
  spec.layers = 4;
  spec.window = 70;
  UseModel(spec);
  ASSERT_NO_FATAL_FAILURE(Start());
  ExpectTheSame("windows", Tokens(300, 6), 300);
  EXPECT_EQ(linked_->prompt_tokens_here(), 300u);
  ExpectNothingThroughHosts();
}

// Steps then have rows of prompts, and of sequences that attention workers attend.
TEST_F(LinkedPrompts, BesideDecodesHaveTheLogitsOfOneGpuAndSoHaveThose) {
  for (const int workers : {1, 2}) {  // as many micro-batches
    ASSERT_NO_FATAL_FAILURE(Start({.attention_workers = workers, .micro_batches = workers}));
    std::vector<std::vector<TokenId>> prompts;
    std::vector<uint64_t> decodes;
    for (int i = 0; i < 3; ++i) prompts.push_back(Tokens(20 + i, 5 + i));
    for (const auto& prompt : prompts) decodes.push_back(linked_->Submit(prompt, 24, 0, /*logits_of_output=*/true));
    for (const uint64_t decode : decodes)
      ASSERT_TRUE(linked_->Until([&] { return !linked_->stream(decode).tokens.empty(); }));
    ExpectTheSame("with decodes", Tokens(333, 9), 333);
    for (size_t i = 0; i < decodes.size(); ++i) {
      ASSERT_TRUE(linked_->UntilTheEndOf(decodes[i]));
      ExpectOfOneGpu("decodes with it", decodes[i], prompts[i], 0, 24);
    }
    EXPECT_GE(linked_->prompt_tokens_here(), 333u);
    ExpectNothingThroughHosts();
  }
}

// Two sequences that do not fit when they have grown: one is preempted, and computed again.
TEST_F(LinkedPrompts, ThatArePreemptedAndResumedHaveTheLogitsOfOneGpu) {
  ASSERT_NO_FATAL_FAILURE(Start({.kv_blocks = 72}));
  const std::vector<TokenId> one = Tokens(230, 11), other = Tokens(235, 12);
  const uint64_t first = linked_->Submit(one, 40, 0, true), second = linked_->Submit(other, 40, 0, true);
  ASSERT_TRUE(linked_->UntilTheEndOf(first) && linked_->UntilTheEndOf(second));
  EXPECT_GE(linked_->stats().preemptions, 1u);
  ExpectOfOneGpu("the first", first, one, 0, 40);
  ExpectOfOneGpu("the second", second, other, 0, 40);
  ExpectNothingThroughHosts();
}

TEST_F(LinkedPrompts, WithoutAScratchAreAttendedOnTheAttentionWorker) {
  for (const std::optional<uint64_t> scratch : {std::optional<uint64_t>(0), std::optional<uint64_t>()}) {
    ASSERT_NO_FATAL_FAILURE(Start({.scratch_bytes = scratch}));
    ExpectTheSame(scratch ? "no scratch" : "none by default", Tokens(150, 14), 150);
    EXPECT_EQ(linked_->prompt_tokens_here(), 0u);
    ExpectNothingThroughHosts();
  }
}

// The attention worker cannot do an op of a prompt's part: waits on both GPUs end, and blocks of the scratch and the
// slot serve other prompts.
TEST_F(LinkedPrompts, BehindOneWhoseStepFailedHaveTheLogitsOfOneGpu) {
  ASSERT_NO_FATAL_FAILURE(Start({.micro_batches = 2}));
  for (int i = 0; i < 3; ++i) {
    linked_->LetAnOpFail(0);
    const uint64_t failed = linked_->Submit(Tokens(200, 15 + i), 4);
    ASSERT_TRUE(linked_->UntilTheEndOf(failed));
    EXPECT_NE(linked_->stream(failed).error, "");
    ExpectTheSame("behind it", Tokens(130, 18 + i), 130);
  }
  EXPECT_GE(linked_->failed_steps(), 3);
  ExpectNothingThroughHosts();
}

// It stops after a part of a prompt. Kernels here wait for it until their deadline; the next parts go to the other one,
// from the first token on.
TEST_F(LinkedPrompts, GoOnElsewhereWhenTheirAttentionWorkerIsLostBetweenTheirParts) {
  ASSERT_NO_FATAL_FAILURE(Start({.attention_workers = 2}));
  const std::vector<TokenId> prompt = Tokens(320, 13);
  const uint64_t request = linked_->Submit(prompt, 6, 0, true);
  ASSERT_TRUE(linked_->Until([&] { return linked_->compute_steps() >= 2; }));
  linked_->Stop(0);  // the sequence lies there: both were empty
  ASSERT_TRUE(linked_->Until([&] { return linked_->failed_steps() >= 1; }));
  linked_->Lose(0);
  ASSERT_TRUE(linked_->UntilTheEndOf(request));
  ExpectOfOneGpu("elsewhere", request, prompt, 0, 6);
  EXPECT_GE(linked_->prompt_tokens_here(), 320u + 64u) << "from the first token on";
  ExpectNothingThroughHosts();
}

}  // namespace
}  // namespace dovetail::test
