#include "model/describe.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/test_data.h"

namespace dovetail::model {
namespace {

TEST(Describe, SaysWhatAGgufFileHoldsAndNeeds) {
  DOVETAIL_DATA_OR_SKIP(const auto path, "models/stories260K/stories260K-f16.gguf");
  const auto checkpoint = OpenCheckpoint(path);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(Describe(**checkpoint),
            "stories260K-f16.gguf: GGUF version 3\n"
            "  architecture   llama, \"stories260K\"\n"
            "  parameters     260,032, output shared with the embedding\n"
            "  layers         5: 5 full attention\n"
            "  heads          8 query, 4 key/value, of 8 dimensions\n"
            "  sizes          hidden 64, MLP 172 (silu)\n"
            "  context        512 positions\n"
            "  rope           default, base 10000\n"
            "  vocabulary     512 tokens, begins with 1, ends at 2\n"
            "  tokenizer      llama (default)\n"
            "  chat template  no\n"
            "  tensors        36 F16 (506.5 KiB), 11 F32 (2.8 KiB)\n"
            "needs\n"
            "  weights        509.2 KiB\n"
            "  KV cache       640 B per token in bfloat16; 640.0 KiB for 1k tokens, 5.0 MiB for 8k\n");
}

TEST(Describe, SaysWhatAFolderHolds) {
  DOVETAIL_DATA_OR_SKIP(const auto path, "models/stories260K/hf");
  const auto checkpoint = OpenCheckpoint(path);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  const std::string text = Describe(**checkpoint);
  EXPECT_THAT(text, ::testing::StartsWith("hf: Hugging Face folder\n"));
  EXPECT_THAT(text, ::testing::HasSubstr("  tokenizer      absent\n"));
}

TEST(KvBytes, AWindowedLayerHoldsNoMoreThanItsWindow) {
  ModelConfig config;
  config.kv_heads = 2;
  config.key_dim = config.value_dim = 16;
  config.layers = {LayerConfig{}, LayerConfig{.kind = LayerKind::kSlidingAttention, .window = 16}};
  EXPECT_EQ(KvBytes(config, 10, DType::kBF16), 2 * 10 * 2 * 32 * 2);
  EXPECT_EQ(KvBytes(config, 100, DType::kBF16), (100 + 16) * 2 * 32 * 2);
  EXPECT_EQ(KvBytes(config, 100, DType::kF32), (100 + 16) * 2 * 32 * 4);
}

}  // namespace
}  // namespace dovetail::model
