#include "compute_worker/prompt_scratch_size.h"

#include <gtest/gtest.h>

#include "compute_worker/tuned_options.h"

namespace dovetail::compute {
namespace {

// Blocks of 64 tokens and heads of 128: 32,768 bytes in bfloat16, 16,640 in int8, 16,384 in E4M3.
proto::AttentionTable Table() {
  proto::SoftmaxSpec spec{.query_heads = 8, .kv_heads = 2, .key_dim = 128, .value_dim = 128, .scale = 1};
  spec.kv = DType::kBF16;
  return *proto::AttentionTable::Build({spec, spec});
}

constexpr uint64_t kMiB = uint64_t{1} << 20;

TEST(PromptScratchSize, BlocksOf8BitsAreNearlyTwiceAsMany) {
  EXPECT_EQ(PromptScratchBlocks(Table(), 512, kMiB), 32u);
  EXPECT_EQ(PromptScratchBlocks(Table(), 512, kMiB, KvStorage::kE4M3), 64u);
  EXPECT_EQ(PromptScratchBlocks(Table(), 512, kMiB, KvStorage::kInt8), 63u);
}

TEST(PromptScratchSize, AComputeWorkerOnACpuCountsBlocksOfTheStorageThatItAttendsIn) {
  ComputeWorkerOptions options;
  options.max_step_tokens = 512;
  ComputeWorkerTuning tuning;
  tuning.prompt_scratch_bytes = kMiB;
  EXPECT_EQ(Tuned(options, tuning, Table()).prompt_blocks, 32u);
  tuning.kv_storage = KvStorage::kInt8;
  EXPECT_EQ(Tuned(options, tuning, Table()).prompt_blocks, 63u);
}

}  // namespace
}  // namespace dovetail::compute
