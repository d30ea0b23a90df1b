#include <gtest/gtest.h>

#include <fstream>

#include "tests/cluster/test_engine.h"
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
  server::EmbeddedClusterOptions options = ClusterOptionsFor(**model, DType::kF32);
  options.attention_workers = 2;
  auto cluster = StartCluster(**model, options);
  EXPECT_TRUE(cluster.ok()) << cluster.status();
  if (!cluster.ok()) return {};
  std::vector<TokenId> prompt;
  for (int i = 0; i < 77; ++i) prompt.push_back(3 + (i * 37 + 11) % 93);
  scheduler::GenerationRequest request = GreedyRequest(prompt, 8);
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

}  // namespace
}  // namespace dovetail::test
