#include "engine/device_choice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "model/dummy_checkpoint.h"
#include "tests/support/test_data.h"

// --device: what it accepts, what it says, and what runs where. Holds on machines with and without a GPU.

namespace dovetail::engine {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

// A folder with nothing but config.json.
std::filesystem::path Shape(const std::string& name, const std::string& config) {
  const auto folder = test::TempFolder() / name;
  std::filesystem::create_directory(folder);
  std::ofstream(folder / "config.json") << config;
  return folder;
}

// The shape of a model that a GPU runs.
model::ModelConfig Llama() {
  const auto folder = Shape("tiny", R"({"model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
      "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 96,
      "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "tie_word_embeddings": false})");
  const auto checkpoint = model::OpenDummyCheckpoint(folder);
  EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
  return (*checkpoint)->config();
}

std::string ErrorOf(const DeviceRequest& request, const model::ModelConfig& config) {
  const auto device = ChooseDevice(request, config);
  return device.ok() ? "ok: " + (*device)->name() : std::string(device.status().message());
}

TEST(DeviceChoice, NamesAreChecked) {
  for (const char* name : {"cpu", "auto", "cuda", "cuda:0", "cuda:17"})
    EXPECT_TRUE(CheckDeviceName("--device", name).ok());
  for (const char* name : {"", "gpu", "cuda:", "cuda:-1", "cuda:x", "cpu:0"}) {
    const absl::Status status = CheckDeviceName("--device", name);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << name;
    EXPECT_THAT(std::string(status.message()), StartsWith("--device: '")) << name;
  }
}

TEST(DeviceChoice, AGpuThatIsNotThereIsNamedWithWhatIsMissing) {
  EXPECT_THAT(ErrorOf({.name = "cuda:4096"}, Llama()), StartsWith("--device cuda:4096: "));
  // Any GPU at all: where there is none the CPU does not take its place.
  EXPECT_THAT(ErrorOf({.name = "cuda"}, Llama()), AnyOf(StartsWith("--device cuda: "), StartsWith("ok: cuda:")));
  EXPECT_THAT(std::string(OpenDevice("--device", "auto", 1).status().message()), HasSubstr("neither cpu nor cuda:N"));
}

TEST(DeviceChoice, TheEnvironmentLimitsWhatACpuComputesWith) {
  const auto with = [](const char* isa) {
    setenv(kMaxCpuIsa, isa, /*overwrite=*/1);
    const auto device = OpenDevice("--device", "cpu", 1);
    unsetenv(kMaxCpuIsa);
    return device.ok() ? (*device)->arithmetic() : std::string(device.status().message());
  };
  EXPECT_EQ(with("avx2"), "CPU avx2");
  EXPECT_EQ(with(""), with("amx")) << "the strongest";
  EXPECT_EQ(with("sse"), "DOVETAIL_MAX_CPU_ISA: 'sse' is none of avx2, avx512 and amx");
}

TEST(DeviceChoice, WhatAGpuDoesNotComputeRunsOnTheCpuUnlessAGpuWasAskedFor) {
  EXPECT_EQ(ErrorOf({.name = "cpu", .threads = 1}, Llama()), "ok: cpu");
  EXPECT_EQ(ErrorOf({.name = "auto", .threads = 1, .f32_weights = true}, Llama()), "ok: cpu");
  EXPECT_EQ(ErrorOf({.name = "auto", .threads = 1, .kv = DType::kF32}, Llama()), "ok: cpu");
}

TEST(DeviceChoice, WhatAModelNeedsThatGpusDoNotHaveIsNamed) {
  model::ModelConfig config = Llama();
  EXPECT_TRUE(compute::CudaModel::Supports(config, DType::kBF16).ok());
  EXPECT_TRUE(compute::CudaModel::Supports(config, DType::kF16).ok());
  const auto says = [&](DType type) { return std::string(compute::CudaModel::Supports(config, type).message()); };
  EXPECT_THAT(says(DType::kF32), HasSubstr("float32"));
  config.key_dim = 20;
  EXPECT_THAT(says(DType::kBF16), HasSubstr("heads of 20 key dimensions"));
  config.key_dim = 264;
  EXPECT_THAT(says(DType::kBF16), HasSubstr("264"));
  config = Llama();
  config.experts = model::ExpertConfig{.experts = 8, .chosen = 2, .intermediate = 64};
  EXPECT_EQ(says(DType::kBF16), "");
  config.experts->intermediate = 60;
  EXPECT_THAT(says(DType::kBF16), HasSubstr("experts of 60 dimensions"));
  config.experts = model::ExpertConfig{.experts = 1025, .chosen = 2, .intermediate = 64};
  EXPECT_THAT(says(DType::kBF16), HasSubstr("1025 experts; up to 1024"));
  config = Llama();
  config.state = model::StateConfig{.heads = 2, .key_heads = 2, .key_dim = 64, .value_dim = 64};
  EXPECT_EQ(says(DType::kBF16), "");
  config.state->value_dim = 264;
  EXPECT_THAT(says(DType::kBF16), HasSubstr("linear-attention states of 64 x 264; up to 256 x 256"));
}

TEST(DeviceChoice, WeightsAreCountedAsTheyWillLieThere) {
  // Per layer q, k, v and o 64 x (64 + 32 + 32 + 64), gate, up and down 3 x 64 x 128; embedding and head 64 x 96 each.
  EXPECT_EQ(compute::CudaModel::WeightBytes(Llama()), 2u * (2 * (64 * 192 + 3 * 64 * 128) + 2 * 64 * 96));
}

TEST(DummyCheckpoint, HasEveryWeightOfTheShapeAsZerosAndLeavesNothingBehind) {
  const auto folder = Shape("shape", R"({"model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128,
      "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 96, "head_dim": 32,
      "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": true})");
  const auto checkpoint = model::OpenDummyCheckpoint(folder);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ((*checkpoint)->name(), "shape");
  EXPECT_EQ((*checkpoint)->folder(), folder) << "where its tokenizer is, if it has one";
  for (const auto& entry : std::filesystem::directory_iterator(std::filesystem::temp_directory_path()))
    EXPECT_FALSE(entry.path().filename().string().starts_with("dovetail-dummy-")) << entry.path();
  const auto q = (*checkpoint)->Find("layers.1.attn.q_proj.weight");
  ASSERT_TRUE(q.ok()) << q.status();
  EXPECT_EQ(q->rows, 128);
  EXPECT_EQ(q->cols, 64);
  EXPECT_EQ(q->ReadAll(), std::vector<float>(128 * 64, 0.0f));
  EXPECT_TRUE((*checkpoint)->Find("lm_head.weight").ok());

  EXPECT_EQ(model::OpenDummyCheckpoint(folder / "missing").status().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace dovetail::engine
