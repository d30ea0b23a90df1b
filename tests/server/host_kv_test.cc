#include "server/cli/host_kv.h"

#include <gtest/gtest.h>

namespace dovetail::cli {
namespace {

model::ModelConfig Config() {
  model::ModelConfig config;
  config.kv_heads = 8;
  config.key_dim = config.value_dim = 128;
  config.layers.resize(32);
  return config;
}

// Llama 3 8B keeps 128 KiB of bfloat16 for each token.
TEST(HostKv, AStepReadsTheKvOfAllSequences) {
  const HostKv memory{.threads = 16, .read_bytes_per_s = 166e9, .gpu_bytes = 64e9};
  const HostKvOfBatch batch = HostKvOf(memory, Config(), DType::kBF16, 512, 32, 0.020);
  EXPECT_DOUBLE_EQ(batch.step_bytes, 32.0 * 512 * 131072);
  EXPECT_DOUBLE_EQ(batch.read_seconds, 32.0 * 512 * 131072 / 166e9);
  EXPECT_DOUBLE_EQ(batch.share, batch.read_seconds / 0.020);
  EXPECT_EQ(batch.gpu_batch, 953) << "64e9 / (512 x 131072)";
  EXPECT_EQ(
      TextOf(batch),
      "KV 2.15 GB a step: at least 12.9 ms, 65% of the read rate; the GPU's memory would hold 953 such sequences");
}

TEST(HostKv, HostMemoryMayHoldFewerBytesThanCross) {
  const HostKv memory{.threads = 16, .read_bytes_per_s = 166e9, .gpu_bytes = 64e9};
  const HostKvOfBatch batch = HostKvOf(memory, Config(), DType::kBF16, 512, 32, 0.020, 0.5);
  EXPECT_DOUBLE_EQ(batch.step_bytes, 16.0 * 512 * 131072);
  EXPECT_EQ(batch.gpu_batch, 953) << "as they cross";
}

TEST(HostKv, StatesAreReadAndWritten) {
  model::ModelConfig config = Config();
  for (auto& layer : config.layers) layer.kind = model::LayerKind::kLinearState;
  config.state = model::StateConfig{};
  config.state->heads = 32;
  config.state->key_dim = config.state->value_dim = 128;
  const HostKv memory{.threads = 1, .read_bytes_per_s = 1e9, .gpu_bytes = 1e9};
  const double state = 32.0 * 32 * 128 * 128 * 4;
  const HostKvOfBatch batch = HostKvOf(memory, config, DType::kBF16, 100000, 2, 1);
  EXPECT_DOUBLE_EQ(batch.step_bytes, 2 * 2 * state) << "whatever the length";
  EXPECT_EQ(batch.gpu_batch, static_cast<int64_t>(1e9 / state));
}

TEST(HostKv, AWindowBoundsWhatIsRead) {
  model::ModelConfig config = Config();
  for (auto& layer : config.layers) layer.window = 128;
  const HostKv memory{.threads = 1, .read_bytes_per_s = 1e9, .gpu_bytes = 0};
  const HostKvOfBatch batch = HostKvOf(memory, config, DType::kBF16, 4096, 1, 1);
  EXPECT_DOUBLE_EQ(batch.step_bytes, 128.0 * 131072);
  EXPECT_EQ(batch.gpu_batch, 0);
}

}  // namespace
}  // namespace dovetail::cli
