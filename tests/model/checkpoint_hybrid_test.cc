#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <map>

#include "model/checkpoint.h"
#include "model/describe.h"
#include "model/formats/safetensors.h"
#include "nlohmann/json.hpp"
#include "tests/support/test_data.h"

// Hugging Face folders of hybrids and of models with experts: every stored tensor is found and used, under each of the
// names that it goes by, and what is missing or misshapen is named.

namespace dovetail::model {
namespace {

namespace fs = std::filesystem;
using dovetail::test::ProjectData;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

const std::vector<std::string> kOurs = {
    "falcon_h1_multipliers", "falcon_h1_norm",   "gpt_oss_mxfp4",     "lfm2_bias",  "nemotron_h",
    "nemotron_h_latent",     "olmo_hybrid_nope", "nemotron_h_groups", "qwen3_5_moe"};

// A folder's tensors, to be changed and written again.
class Folder {
 public:
  explicit Folder(const fs::path& from) : path_(dovetail::test::TempFolder()) {
    fs::copy_file(from / "config.json", path_ / "config.json");
    const auto file = SafetensorsFile::OpenFolder(from);
    EXPECT_TRUE(file.ok()) << file.status();
    for (const SafetensorsTensor& tensor : (*file)->tensors())
      tensors_[std::string(tensor.name)] = {std::string(tensor.dtype),
                                            tensor.shape,
                                            {reinterpret_cast<const char*>(tensor.bytes.data()), tensor.bytes.size()}};
  }

  struct Tensor {
    std::string dtype;
    std::vector<int64_t> shape;
    std::string bytes;
  };
  Tensor& operator[](const std::string& name) {
    EXPECT_TRUE(tensors_.contains(name)) << name;
    return tensors_[name];
  }
  void Add(const std::string& name, Tensor tensor) { tensors_[name] = std::move(tensor); }
  void Remove(const std::string& name) { EXPECT_EQ(tensors_.erase(name), 1u) << name; }
  void Rename(const std::string& from, const std::string& to) {
    Tensor tensor = (*this)[from];
    Remove(from);
    tensors_[to] = std::move(tensor);
  }

  absl::StatusOr<std::unique_ptr<Checkpoint>> Open() const {
    nlohmann::json header = nlohmann::json::object();
    std::string data;
    for (const auto& [name, tensor] : tensors_) {
      header[name] = {{"dtype", tensor.dtype},
                      {"shape", tensor.shape},
                      {"data_offsets", {data.size(), data.size() + tensor.bytes.size()}}};
      data += tensor.bytes;
    }
    std::string text = header.dump();
    text.resize((text.size() + 7) / 8 * 8, ' ');
    const uint64_t size = text.size();
    std::ofstream out(path_ / "model.safetensors", std::ios::binary);
    out.write(reinterpret_cast<const char*>(&size), sizeof(size));
    out << text << data;
    out.close();
    return OpenCheckpoint(path_);
  }
  std::string ErrorOf() const {
    const auto checkpoint = Open();
    return checkpoint.ok() ? "accepted" : std::string(checkpoint.status().message());
  }

 private:
  fs::path path_;
  std::map<std::string, Tensor> tensors_;
};

void ExpectAllUsed(const fs::path& folder) {
  const auto checkpoint = OpenCheckpoint(folder);
  ASSERT_TRUE(checkpoint.ok()) << folder << ": " << checkpoint.status();
  EXPECT_THAT((*checkpoint)->warnings(), IsEmpty()) << folder << ": every stored tensor is one that the model needs";
  for (const std::string& weight : (*checkpoint)->names())
    for (const float value : (*checkpoint)->Find(weight)->ReadAll())
      ASSERT_TRUE(std::isfinite(value)) << folder << " " << weight;
  EXPECT_THAT(Describe(**checkpoint), HasSubstr("layers"));
}

TEST(HybridCheckpoint, UsesEveryTensorOfOurGoldens) {
  for (const std::string& name : kOurs) ExpectAllUsed(ProjectData("goldens/" + name));
}

TEST(HybridCheckpoint, UsesEveryTensorOfThePublishedGoldens) {
  for (const char* group : {"hybrid", "moe"}) {
    DOVETAIL_DATA_OR_SKIP(const auto archive, std::string("goldens/goldens_") + group + ".tar.gz");
    const fs::path folder = dovetail::test::TempFolder();
    ASSERT_EQ(std::system(("tar xzf '" + archive.string() + "' -C '" + folder.string() + "'").c_str()), 0);
    int models = 0;
    for (const auto& entry : fs::directory_iterator(folder / group)) {
      ExpectAllUsed(entry.path());
      ++models;
    }
    EXPECT_EQ(models, std::string(group) == "moe" ? 4 : 11);
  }
}

TEST(HybridCheckpoint, FindsOlmosTensorsUnderTheNamesOfEitherSpelling) {
  const fs::path golden = ProjectData("goldens/olmo_hybrid_nope");
  const auto saved = OpenCheckpoint(golden);
  ASSERT_TRUE(saved.ok()) << saved.status();
  Folder published(golden);  // transformers' own names, and one convolution
  for (const char* layer : {"model.layers.0.", "model.layers.1.", "model.layers.2."}) {
    const std::string l = layer;
    published.Rename(l + "attention_layer_norm.weight", l + "input_layernorm.weight");
    published.Rename(l + "feedforward_layer_norm.weight", l + "post_attention_layernorm.weight");
    Folder::Tensor conv = published[l + "linear_attn.q_conv1d.weight"];
    for (const char* part : {"k", "v"}) conv.bytes += published[l + "linear_attn." + part + "_conv1d.weight"].bytes;
    conv.shape[0] = 80;  // 2 x 12 keys twice, 4 x 8 values
    for (const char* part : {"q", "k", "v"}) published.Remove(l + "linear_attn." + part + "_conv1d.weight");
    published.Add(l + "linear_attn.conv1d.weight", conv);
  }
  published.Rename("model.layers.3.feedforward_layer_norm.weight", "model.layers.3.post_attention_layernorm.weight");
  const auto other = published.Open();
  ASSERT_TRUE(other.ok()) << other.status();
  EXPECT_THAT((*other)->warnings(), IsEmpty());
  ASSERT_EQ((*other)->names(), (*saved)->names());
  for (const std::string& name : (*saved)->names())
    EXPECT_EQ((*other)->Find(name)->ReadAll(), (*saved)->Find(name)->ReadAll()) << name;
  for (size_t layer = 0; layer < 3; ++layer)
    EXPECT_EQ((*other)->config().constants[layer].conv, (*saved)->config().constants[layer].conv);
}

TEST(HybridCheckpoint, ReadsGptOssExpertsFromBlocksAndFromTransposedMatrices) {
  const fs::path golden = ProjectData("goldens/gpt_oss_mxfp4");
  const auto blocks = OpenCheckpoint(golden);
  ASSERT_TRUE(blocks.ok()) << blocks.status();
  const TensorSource gate = *(*blocks)->Find("layers.1.experts.2.gate_proj.weight");
  EXPECT_EQ(gate.type, GgmlType::kMXFP4);
  EXPECT_EQ(gate.rows, 32);
  EXPECT_EQ((*blocks)->config().constants[1].sinks.size(), 4u);

  Folder dense(golden);  // the same values as f32, [experts, in, out], gate and up side by side
  for (int layer = 0; layer < 4; ++layer)
    for (const char* name : {"gate_up_proj", "down_proj"}) {
      const bool pair = std::string(name) == "gate_up_proj";
      const std::string stored = "model.layers." + std::to_string(layer) + ".mlp.experts." + name;
      const int64_t in = 32, out = pair ? 64 : 32;
      std::vector<float> values(static_cast<size_t>(4 * in * out));
      for (int64_t expert = 0; expert < 4; ++expert) {
        const std::string canonical = "layers." + std::to_string(layer) + ".experts." + std::to_string(expert) + ".";
        for (int64_t r = 0; r < out; ++r) {
          const std::string part = !pair ? "down_proj" : r % 2 == 0 ? "gate_proj" : "up_proj";
          std::vector<float> row(static_cast<size_t>(in));
          (*blocks)->Find(canonical + part + ".weight")->ReadRows(pair ? r / 2 : r, 1, row);
          for (int64_t c = 0; c < in; ++c) values[static_cast<size_t>((expert * in + c) * out + r)] = row[c];
        }
      }
      dense.Remove(stored + "_blocks");
      dense.Remove(stored + "_scales");
      dense.Add(stored, {"F32", {4, in, out}, {reinterpret_cast<const char*>(values.data()), values.size() * 4}});
    }
  const auto transposed = dense.Open();
  ASSERT_TRUE(transposed.ok()) << transposed.status();
  EXPECT_THAT((*transposed)->warnings(), IsEmpty());
  for (const std::string& name : (*blocks)->names())
    EXPECT_EQ((*transposed)->Find(name)->ReadAll(), (*blocks)->Find(name)->ReadAll()) << name;
}

TEST(HybridCheckpoint, FindsExpertsOneByOneOrAllInOneTensor) {
  const fs::path golden = ProjectData("goldens/nemotron_h_latent");
  const auto single = OpenCheckpoint(golden);
  ASSERT_TRUE(single.ok()) << single.status();
  Folder fused(golden);
  const std::string experts = "backbone.layers.0.mixer.experts.";
  for (const char* name : {"up_proj", "down_proj"}) {
    Folder::Tensor all = fused[experts + "0." + name + ".weight"];
    for (int x = 1; x < 4; ++x) all.bytes += fused[experts + std::to_string(x) + "." + name + ".weight"].bytes;
    all.shape.insert(all.shape.begin(), 4);
    for (int x = 0; x < 4; ++x) fused.Remove(experts + std::to_string(x) + "." + name + ".weight");
    fused.Add(experts + name, all);
  }
  const auto together = fused.Open();
  ASSERT_TRUE(together.ok()) << together.status();
  EXPECT_THAT((*together)->warnings(), IsEmpty());
  for (const std::string& name : (*single)->names())
    EXPECT_EQ((*together)->Find(name)->ReadAll(), (*single)->Find(name)->ReadAll()) << name;
}

TEST(HybridCheckpoint, AMissingOrMisnamedTensorIsNamed) {
  Folder nemotron(ProjectData("goldens/nemotron_h"));
  nemotron.Rename("backbone.layers.0.mixer.A_log", "backbone.layers.0.mixer.A_lag");
  EXPECT_THAT(nemotron.ErrorOf(), HasSubstr("tensor backbone.layers.0.mixer.A_log is missing, which nemotron_h needs"));

  Folder olmo(ProjectData("goldens/olmo_hybrid_nope"));
  olmo.Remove("model.layers.1.attention_layer_norm.weight");
  EXPECT_THAT(olmo.ErrorOf(), HasSubstr("tensor model.layers.1.attention_layer_norm.weight or "
                                        "model.layers.1.input_layernorm.weight is missing"));
  Folder parts(ProjectData("goldens/olmo_hybrid_nope"));
  parts.Remove("model.layers.0.linear_attn.v_conv1d.weight");
  EXPECT_THAT(parts.ErrorOf(), HasSubstr("v_conv1d.weight is missing, though "));

  Folder gpt_oss(ProjectData("goldens/gpt_oss_mxfp4"));
  gpt_oss.Remove("model.layers.2.mlp.experts.down_proj_scales");
  EXPECT_THAT(gpt_oss.ErrorOf(),
              HasSubstr("down_proj_scales is missing, though model.layers.2.mlp.experts.down_proj_blocks"));
  Folder sinks(ProjectData("goldens/gpt_oss_mxfp4"));
  sinks.Remove("model.layers.3.self_attn.sinks");
  EXPECT_THAT(sinks.ErrorOf(), HasSubstr("tensor model.layers.3.self_attn.sinks is missing"));
}

TEST(HybridCheckpoint, AMisshapenTensorIsNamedWithBothShapes) {
  Folder lfm2(ProjectData("goldens/lfm2_bias"));
  lfm2["model.layers.0.conv.conv.weight"].shape = {64, 1, 2};
  EXPECT_THAT(lfm2.ErrorOf(), HasSubstr("tensor model.layers.0.conv.conv.weight: its shape is [64, 1, 2], but the "
                                        "config asks for [32, 4]"));
  Folder scales(ProjectData("goldens/gpt_oss_mxfp4"));
  scales["model.layers.0.mlp.experts.gate_up_proj_scales"].shape = {4, 32, 2};
  EXPECT_THAT(scales.ErrorOf(),
              HasSubstr("gate_up_proj_scales: its shape is [4, 32, 2], but the config asks for [256, 1]"));
  Folder blocks(ProjectData("goldens/gpt_oss_mxfp4"));
  blocks["model.layers.0.mlp.experts.down_proj_blocks"].shape = {4, 32, 2, 8};
  EXPECT_THAT(blocks.ErrorOf(),
              HasSubstr("down_proj_blocks: its shape is [4, 32, 2, 8], but the config asks for [.., 1, 16]"));
  Folder conv(ProjectData("goldens/olmo_hybrid_nope"));
  conv["model.layers.0.linear_attn.q_conv1d.weight"].shape.back() /= 2;
  conv["model.layers.0.linear_attn.q_conv1d.weight"].shape.front() *= 2;
  EXPECT_THAT(conv.ErrorOf(), HasSubstr("q_conv1d.weight: its shape is"));
}

}  // namespace
}  // namespace dovetail::model
