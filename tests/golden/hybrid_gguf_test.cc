#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "tests/cluster/test_engine.h"
#include "tests/golden/converted_gguf.h"
#include "tests/golden/reference.h"
#include "tests/model/hybrid_gguf.h"
#include "tests/support/test_data.h"

// Hybrids from GGUF files, through the frames: the logits are those of the folder that the file was written from, whose
// own are held to the references by dense_golden_test.cc.

namespace dovetail::test {
namespace {

namespace fs = std::filesystem;

std::vector<float> LogitsOf(const fs::path& path) {
  auto model = TestModel::Load(path, model::WeightFormat::kF32, {.threads = 2});
  EXPECT_TRUE(model.ok()) << model.status();
  if (!model.ok()) return {};
  engine::EmbeddedClusterOptions options = ClusterOptionsFor(**model, DType::kF32);
  options.attention_workers = 2;
  auto cluster = StartCluster(**model, options);
  EXPECT_TRUE(cluster.ok()) << cluster.status();
  if (!cluster.ok()) return {};
  std::vector<TokenId> prompt;
  for (int i = 0; i < 77; ++i) prompt.push_back(3 + (i * 37 + 11) % 93);
  requests::GenerationRequest request = GreedyRequest(prompt, 8);
  request.logits_of_output = true;
  const auto done = Generate(**cluster, std::move(request));
  EXPECT_TRUE(done.ok()) << done.status();
  std::vector<float> logits;
  if (done.ok())
    for (const auto& row : (*done)->choices()[0].logits) logits.insert(logits.end(), row.begin(), row.end());
  return logits;
}

TEST(HybridGguf, GivesTheLogitsOfTheFolderItWasWrittenFrom) {
  for (const char* name : {"lfm2_bias", "gpt_oss_mxfp4"}) {
    const fs::path folder = ProjectData(absl::StrCat("goldens/", name));
    const auto checkpoint = model::OpenCheckpoint(folder);
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    const fs::path file = TempFolder() / "model.gguf";
    std::ofstream(file, std::ios::binary) << model::test::HybridGguf(**checkpoint).Build();
    const std::vector<float> expected = LogitsOf(folder);
    ASSERT_EQ(expected.size(), 8u * 96) << name;
    EXPECT_EQ(LogitsOf(file), expected) << name;
  }
}

TEST(HybridGguf, GivesTheLogitsOfMamba2) {
  DOVETAIL_DATA_OR_SKIP(const auto archive, "goldens/goldens_hybrid.tar.gz");
  const fs::path folder = Unpack(archive) / "hybrid" / "mamba2";
  const auto checkpoint = model::OpenCheckpoint(folder);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  const fs::path file = TempFolder() / "model.gguf";
  std::ofstream(file, std::ios::binary) << model::test::HybridGguf(**checkpoint).Build();
  const std::vector<float> expected = LogitsOf(folder);
  ASSERT_EQ(expected.size(), 8u * 320);
  EXPECT_LE(RelativeRms(LogitsOf(file), expected), 1e-6);  // its decays are rounded before they are stored
}

// Golden by golden, as llama.cpp's converter would write them.
struct Converted {
  const char* arch;
  const char* golden;
  const char* group;  // "ours", or of goldens_<group>.tar.gz of the test data
  double error;       // 0: the same bits; else what other sums, or multipliers within the weights, may change

  friend std::ostream& operator<<(std::ostream& out, const Converted& converted) {
    return out << converted.golden << " as " << converted.arch;
  }
};

class ConvertedFiles : public ::testing::TestWithParam<Converted> {};

TEST_P(ConvertedFiles, GiveTheLogitsOfTheFolder) {
  const std::string group = GetParam().group;
  fs::path folder;
  if (group == "ours") {
    folder = ProjectData(absl::StrCat("goldens/", GetParam().golden));
  } else {
    DOVETAIL_DATA_OR_SKIP(const auto archive, absl::StrCat("goldens/goldens_", group, ".tar.gz"));
    folder = Unpack(archive) / group / GetParam().golden;
  }
  const fs::path file = TempFolder() / "model.gguf";
  std::ofstream(file, std::ios::binary) << ConvertedGguf(folder, GetParam().arch);
  const auto checkpoint = model::OpenCheckpoint(file);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_THAT((*checkpoint)->warnings(), ::testing::IsEmpty());  // every tensor is used
  const std::vector<float> expected = LogitsOf(folder), found = LogitsOf(file);
  ASSERT_FALSE(expected.empty());
  const double error = found == expected ? 0 : RelativeRms(found, expected);
  RecordProperty("logits", absl::StrCat(error));
  EXPECT_LE(error, GetParam().error);
}

INSTANTIATE_TEST_SUITE_P(All, ConvertedFiles,
                         ::testing::Values(Converted{"llama", "mixtral", "moe", 0},
                                           Converted{"qwen3moe", "qwen3_moe", "moe", 0},
                                           Converted{"minimax-m2", "minimax_m2", "moe", 0},
                                           Converted{"qwen3next", "qwen3_next", "hybrid", 0},
                                           Converted{"qwen35", "qwen3_5", "hybrid", 2e-6},
                                           Converted{"kimi-linear", "kimi_linear", "hybrid", 0},
                                           Converted{"granitehybrid", "bamba", "hybrid", 0},
                                           Converted{"granitehybrid", "granite4_hybrid", "hybrid", 0},
                                           Converted{"falcon-h1", "falcon_h1", "hybrid", 0},
                                           Converted{"falcon-h1", "falcon_h1_multipliers", "ours", 2e-6},
                                           Converted{"nemotron_h_moe", "nemotron_h_latent", "ours", 0},
                                           Converted{"nemotron_h_moe", "nemotron_h_groups", "ours", 0},
                                           Converted{"qwen35moe", "qwen3_5_moe", "ours", 2e-6}),
                         [](const auto& info) { return std::string(info.param.golden); });

// Keys from the latent are stored transposed: what is a block in the file is an element of each of 32 rows.
TEST(HybridGguf, ReadsQuantisedKeysOfALatent) {
  DOVETAIL_DATA_OR_SKIP(const auto archive, "goldens/goldens_hybrid.tar.gz");
  const fs::path folder = Unpack(archive) / "hybrid" / "kimi_linear";
  std::vector<std::vector<float>> logits;
  for (const LatentKeys keys : {LatentKeys::kWideInQ8, LatentKeys::kWideRoundedToQ8}) {
    const fs::path file = TempFolder() / "model.gguf";
    std::ofstream(file, std::ios::binary) << ConvertedGguf(folder, "kimi-linear", keys);
    logits.push_back(LogitsOf(file));
    ASSERT_EQ(logits.back().size(), 8u * 320);
  }
  EXPECT_EQ(logits[0], logits[1]);
}

// Names and numbers in the bytes of a file, changed in place.
class Damaged {
 public:
  explicit Damaged(const std::string& bytes) : bytes_(bytes) {}
  Damaged& Rename(const std::string& from, const std::string& to) {
    EXPECT_EQ(from.size(), to.size());
    bytes_.replace(Find(from), from.size(), to);
    return *this;
  }
  Damaged& Set(const std::string& key, uint32_t value) {
    bytes_.replace(Find(key) + key.size() + sizeof(uint32_t), sizeof(value),
                   std::string(reinterpret_cast<const char*>(&value), sizeof(value)));  // after its type
    return *this;
  }
  std::string Error() const {
    const fs::path file = TempFolder() / "model.gguf";
    std::ofstream(file, std::ios::binary) << bytes_;
    return std::string(model::OpenCheckpoint(file).status().message());
  }

 private:
  size_t Find(const std::string& text) const {
    const size_t at = bytes_.find(text);
    EXPECT_NE(at, std::string::npos) << text;
    return at;
  }
  std::string bytes_;
};

TEST(BadHybridGguf, IsNamedByKeyOrTensor) {
  const std::string nemotron = ConvertedGguf(ProjectData("goldens/nemotron_h_latent"), "nemotron_h_moe");
  EXPECT_EQ(Damaged(nemotron).Error(), "");
  EXPECT_EQ(Damaged(nemotron).Rename("blk.0.ffn_up_exps.weight", "blk.0.ffn_up_expt.weight").Error(),
            "model.gguf: tensor blk.0.ffn_up_exps.weight is missing, which nemotron_h needs");
  EXPECT_EQ(Damaged(nemotron).Rename("blk.1.ssm_conv1d.bias", "blk.1.ssm_conv2d.bias").Error(),
            "model.gguf: tensor blk.1.ssm_conv1d.bias is missing, which nemotron_h needs");
  EXPECT_EQ(Damaged(nemotron).Rename("nemotron_h_moe.expert_used_count", "nemotron_h_moe.expert_used_fount").Error(),
            "model.gguf: metadata key nemotron_h_moe.expert_used_count is missing");
  EXPECT_EQ(Damaged(nemotron).Set("nemotron_h_moe.expert_count", 5).Error(),
            "model.gguf: tensor blk.0.ffn_gate_inp.weight: its shape is [4, 32], but the config asks for [5, 32]");
  EXPECT_EQ(Damaged(nemotron).Set("nemotron_h_moe.ssm.inner_size", 63).Error(),
            "model.gguf: metadata key nemotron_h_moe.ssm.inner_size is 63, which 4 heads cannot share evenly");
  EXPECT_EQ(Damaged(nemotron).Set("nemotron_h_moe.expert_group_count", 4).Error(),
            "model.gguf: nemotron_h_moe.expert_group_count is 4, but 4 experts cannot lie in so many equal groups of "
            "at least 2");
  EXPECT_EQ(Damaged(nemotron).Set("nemotron_h_moe.moe_latent_size", 0).Error(),
            "model.gguf: metadata key nemotron_h_moe.moe_latent_size is 0; it must be positive");

  const std::string groups = ConvertedGguf(ProjectData("goldens/nemotron_h_groups"), "nemotron_h_moe");
  EXPECT_EQ(Damaged(groups).Set("nemotron_h_moe.expert_group_used_count", 5).Error(),
            "model.gguf: nemotron_h_moe.expert_group_used_count is 5; it must be from 1 to "
            "nemotron_h_moe.expert_group_count, 4");
  EXPECT_EQ(Damaged(groups).Rename("expert_group_used_count", "expert_group_used_fount").Error(),
            "model.gguf: metadata key nemotron_h_moe.expert_group_used_count is missing");

  const std::string qwen = ConvertedGguf(ProjectData("goldens/qwen3_5_moe"), "qwen35moe");
  EXPECT_EQ(Damaged(qwen).Rename("blk.0.ffn_gate_exps.weight", "blk.0.ffn_gate_expt.weight").Error(),
            "model.gguf: tensor blk.0.ffn_gate_exps.weight or blk.0.ffn_gate_up_exps.weight is missing, which "
            "qwen3_5_moe_text needs");
  EXPECT_EQ(Damaged(qwen).Rename("moe.expert_feed_forward_length", "moe.expert_feed_forward_fength").Error(),
            "model.gguf: metadata key qwen35moe.expert_feed_forward_length is missing");
  EXPECT_EQ(Damaged(qwen).Set("qwen35moe.ssm.time_step_rank", 8).Error(),
            "model.gguf: tensor blk.0.ssm_beta.weight: its shape is [4, 32], but the config asks for [8, 32]");
  EXPECT_EQ(Damaged(qwen).Set("qwen35moe.nextn_predict_layers", 0).Error(),
            "model.gguf: tensor blk.4.attn_norm.weight is missing, which qwen3_5_moe_text needs");
  EXPECT_EQ(Damaged(qwen).Set("qwen35moe.nextn_predict_layers", 5).Error(),
            "model.gguf: metadata key qwen35moe.nextn_predict_layers is 5 of 5 layers");

  const std::string falcon = ConvertedGguf(ProjectData("goldens/falcon_h1_multipliers"), "falcon-h1");
  EXPECT_EQ(Damaged(falcon).Set("falcon-h1.attention.head_count_kv", 0).Error(),
            "model.gguf: metadata key falcon-h1.attention.head_count_kv is 0 for layer 0");
  EXPECT_EQ(Damaged(falcon).Rename("blk.0.ffn_norm", "blk.0.ffn_form").Error(),
            "model.gguf: tensor blk.0.ffn_norm or blk.0.ffn_norm.weight is missing, which falcon_h1 needs");
  EXPECT_EQ(Damaged(falcon).Set("falcon-h1.ssm.state_size", 8).Error(),
            "model.gguf: tensor blk.0.ssm_in.weight: its shape is [196, 32], but the config asks for [164, 32]");
}

}  // namespace
}  // namespace dovetail::test
