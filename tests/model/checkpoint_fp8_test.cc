#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <fstream>

#include "base/dtype.h"
#include "model/checkpoint.h"
#include "model/formats/dequantize.h"
#include "nlohmann/json.hpp"
#include "tests/support/test_data.h"

// FP8 checkpoints: E4M3 weights with a scale for each row, or one for all, as compressed-tensors and fbgemm write them.

namespace dovetail::model {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

struct Tensor {
  std::string name, dtype;
  std::vector<int64_t> shape;
  std::string data;
};

std::string Floats(const std::vector<float>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)};
}
std::string BFloats(const std::vector<float>& values) {
  std::string bytes;
  for (const float v : values) {
    const BF16 x = ToBF16(v);
    bytes.append(reinterpret_cast<const char*>(&x), sizeof(x));
  }
  return bytes;
}

// A llama of one layer whose projections are E4M3: 4 hidden, 2 intermediate dimensions, 3 tokens.
struct Fp8Folder {
  nlohmann::json config = {
      {"model_type", "llama"},
      {"hidden_size", 4},
      {"intermediate_size", 2},
      {"num_hidden_layers", 1},
      {"num_attention_heads", 2},
      {"vocab_size", 3},
      {"max_position_embeddings", 16},
      {"eos_token_id", 2},
      {"quantization_config", {{"quant_method", "compressed-tensors"}, {"format", "float-quantized"}}}};
  std::vector<Tensor> tensors;

  Fp8Folder() {
    const auto plain = [&](const char* name, std::vector<int64_t> shape) {
      int64_t count = 1;
      for (const int64_t size : shape) count *= size;
      tensors.push_back({name, "F32", std::move(shape), Floats(std::vector<float>(count, 1))});
    };
    plain("model.embed_tokens.weight", {3, 4});
    plain("model.layers.0.input_layernorm.weight", {4});
    plain("model.layers.0.post_attention_layernorm.weight", {4});
    plain("model.norm.weight", {4});
    plain("lm_head.weight", {3, 4});
    for (const auto& [name, rows, cols] : {std::tuple{"self_attn.q_proj", 4, 4},
                                           {"self_attn.k_proj", 4, 4},
                                           {"self_attn.v_proj", 4, 4},
                                           {"self_attn.o_proj", 4, 4},
                                           {"mlp.gate_proj", 2, 4},
                                           {"mlp.up_proj", 2, 4},
                                           {"mlp.down_proj", 4, 2}}) {
      const std::string weight = std::string("model.layers.0.") + name + ".weight";
      tensors.push_back({weight, "F8_E4M3", {rows, cols}, std::string(rows * cols, '\x38')});  // 1.0
      tensors.push_back({weight + "_scale", "F32", {rows, 1}, Floats(std::vector<float>(rows, 0.5f))});
    }
  }
  Tensor& At(const std::string& name) {
    for (Tensor& tensor : tensors)
      if (tensor.name == "model.layers.0." + name) return tensor;
    ADD_FAILURE() << name;
    return tensors[0];
  }
  absl::StatusOr<std::unique_ptr<Checkpoint>> Open() const {
    const std::filesystem::path path = dovetail::test::TempFolder();
    nlohmann::json header = nlohmann::json::object();
    std::string data;
    for (const Tensor& tensor : tensors) {
      header[tensor.name] = {{"dtype", tensor.dtype},
                             {"shape", tensor.shape},
                             {"data_offsets", {data.size(), data.size() + tensor.data.size()}}};
      data += tensor.data;
    }
    const std::string text = header.dump();
    const uint64_t size = text.size();
    std::ofstream(path / "model.safetensors", std::ios::binary)
        << std::string(reinterpret_cast<const char*>(&size), sizeof(size)) << text << data;
    std::ofstream(path / "config.json") << config.dump();
    return OpenCheckpoint(path);
  }
  std::string Error() const { return std::string(Open().status().message()); }
};

TEST(Fp8Checkpoint, EveryRowHasItsScale) {
  Fp8Folder folder;
  // 1, -2, 448 (the largest), 2^-9 (the smallest); then zeros, and 0.4375 = 1.75 / 4.
  folder.At("self_attn.q_proj.weight").data =
      std::string("\x38\xc0\x7e\x01", 4) + std::string("\x00\x80\x2e\x38", 4) + std::string(8, '\x38');
  folder.At("self_attn.q_proj.weight_scale").data = Floats({1, 2, 0.25f, 3});
  const auto checkpoint = folder.Open();
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_THAT((*checkpoint)->warnings(), IsEmpty()) << "scales are used";
  const TensorSource q = (*checkpoint)->Find("layers.0.attn.q_proj.weight").value();
  EXPECT_EQ(q.type, GgmlType::kBF16);
  EXPECT_FALSE(q.has_rows());
  EXPECT_THAT(q.ReadAll(), ElementsAre(1, -2, 448, 0x1p-9f, 0, 0, 0.875f, 2, 0.25f, 0.25f, 0.25f, 0.25f, 3, 3, 3, 3));
  float scale = 0;
  const auto row = q.E4M3Row(1, scale);
  EXPECT_EQ(scale, 2);
  EXPECT_THAT(row, ElementsAre(std::byte{0}, std::byte{0x80}, std::byte{0x2e}, std::byte{0x38}));
}

TEST(Fp8Checkpoint, ValuesAreRoundedToBFloat16Once) {
  Fp8Folder folder;
  folder.At("mlp.up_proj.weight").data = std::string(8, '\x3b');  // 1.375
  folder.At("mlp.up_proj.weight_scale").data = Floats({0.3f, 0.1f});
  const auto checkpoint = folder.Open();
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  const std::vector<float> up = (*checkpoint)->Find("layers.0.mlp.up_proj.weight").value().ReadAll();
  EXPECT_EQ(up[0], ToFloat(ToBF16(1.375f * 0.3f)));
  EXPECT_EQ(up[7], ToFloat(ToBF16(1.375f * 0.1f)));
}

TEST(Fp8Checkpoint, OneScaleServesTheTensorInAnyFloatType) {
  Fp8Folder folder;
  const std::string layer = "model.layers.0.";
  folder.At("self_attn.o_proj.weight_scale") = {layer + "self_attn.o_proj.weight_scale", "BF16", {1}, BFloats({4})};
  folder.At("self_attn.k_proj.weight_scale") = {layer + "self_attn.k_proj.weight_scale", "F32", {}, Floats({2})};
  folder.tensors.push_back({"model.layers.0.self_attn.o_proj.input_scale", "F32", {1}, Floats({1})});
  const auto checkpoint = folder.Open();
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_THAT((*checkpoint)->warnings(), IsEmpty()) << "activations stay in 16 bits";
  EXPECT_THAT((*checkpoint)->Find("layers.0.attn.o_proj.weight").value().ReadAll(), ::testing::Each(4.0f));
  EXPECT_THAT((*checkpoint)->Find("layers.0.attn.k_proj.weight").value().ReadAll(), ::testing::Each(2.0f));
}

TEST(Fp8Checkpoint, SaysWhichScalesAreNotRead) {
  Fp8Folder missing;
  std::erase_if(missing.tensors, [](const Tensor& t) { return t.name.ends_with("q_proj.weight_scale"); });
  EXPECT_EQ(missing.Error(),
            "model.safetensors: tensor model.layers.0.self_attn.q_proj.weight is stored as F8_E4M3, and tensor "
            "model.layers.0.self_attn.q_proj.weight_scale is missing; E4M3 is read with a scale for each row, or one "
            "for all");
  missing.tensors.push_back({"model.layers.0.self_attn.q_proj.weight_scale_inv", "F32", {1, 1}, Floats({1})});
  EXPECT_THAT(missing.Error(), HasSubstr("scales of blocks (weight_scale_inv) are not served"));
  Fp8Folder odd;
  odd.At("mlp.down_proj.weight_scale") = {"model.layers.0.mlp.down_proj.weight_scale", "F32", {2}, Floats({1, 1})};
  EXPECT_EQ(odd.Error(),
            "model.safetensors: tensor model.layers.0.mlp.down_proj.weight_scale: its shape is [2]; a scale for each "
            "of 4 rows, or one for all, is read");
  Fp8Folder infinite;
  infinite.At("mlp.down_proj.weight_scale").data = Floats({1, 1, INFINITY, 1});
  EXPECT_EQ(infinite.Error(),
            "model.safetensors: tensor model.layers.0.mlp.down_proj.weight_scale has a scale that is not finite");
}

TEST(Fp8Checkpoint, OtherQuantisationsAreRefusedByName) {
  Fp8Folder folder;
  for (const nlohmann::json& method :
       {nlohmann::json{{"quant_method", "fp8"}, {"weight_block_size", {128, 128}}},
        nlohmann::json{{"quant_method", "compressed-tensors"}, {"format", "pack-quantized"}},
        nlohmann::json{{"quant_method", "mxfp4"}}}) {
    folder.config["quantization_config"] = method;
    EXPECT_THAT(folder.Error(), HasSubstr("quantization_config is set, which is not served")) << method;
  }
  for (const char* method : {"fp8", "fbgemm_fp8"}) {
    folder.config["quantization_config"] = {{"quant_method", method}};
    EXPECT_TRUE(folder.Open().ok()) << folder.Error();
  }
}

}  // namespace
}  // namespace dovetail::model
