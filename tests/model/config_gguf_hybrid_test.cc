#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>

#include "model/checkpoint.h"
#include "nlohmann/json.hpp"
#include "tests/model/hybrid_gguf.h"
#include "tests/support/test_data.h"

// GGUF files of hybrids, written from the folders of the goldens: the same model comes out.

namespace dovetail::model {
namespace {

namespace fs = std::filesystem;
using dovetail::test::ProjectData;
using test::HybridGguf;
using ::testing::IsEmpty;

absl::StatusOr<std::unique_ptr<Checkpoint>> OpenBytes(const std::string& bytes) {
  const fs::path path = dovetail::test::TempFolder() / "model.gguf";
  std::ofstream(path, std::ios::binary) << bytes;
  return OpenCheckpoint(path);
}

void ExpectSame(const Checkpoint& folder, const Checkpoint& gguf) {
  EXPECT_THAT(gguf.warnings(), IsEmpty());
  const ModelConfig &a = folder.config(), &b = gguf.config();
  EXPECT_EQ(a.layers, b.layers);
  EXPECT_EQ(a.heads, b.heads);
  EXPECT_EQ(a.kv_heads, b.kv_heads);
  EXPECT_EQ(a.intermediate_size, b.intermediate_size);
  EXPECT_EQ(a.activation, b.activation);
  EXPECT_EQ(a.tie_embeddings, b.tie_embeddings);
  EXPECT_EQ(a.stop_ids, b.stop_ids);
  ASSERT_EQ(folder.names(), gguf.names());
  for (const std::string& name : folder.names()) {
    std::vector<float> expected = folder.Find(name)->ReadAll();
    if (name.ends_with("a_log"))  // GGUF files hold the decay itself
      for (float& value : expected) value = static_cast<float>(-std::exp(static_cast<double>(value)));
    EXPECT_EQ(gguf.Find(name)->ReadAll(), expected) << name;
  }
  ASSERT_EQ(a.constants.size(), b.constants.size());
  for (size_t i = 0; i < a.constants.size(); ++i) {
    EXPECT_EQ(a.constants[i].conv, b.constants[i].conv);
    EXPECT_EQ(a.constants[i].conv_bias, b.constants[i].conv_bias);
    EXPECT_EQ(a.constants[i].skip, b.constants[i].skip);
    EXPECT_EQ(a.constants[i].sinks, b.constants[i].sinks);
  }
}

TEST(HybridGgufFiles, HoldTheModelsOfTheirFolders) {
  for (const char* name : {"lfm2_bias", "gpt_oss_mxfp4"}) {
    const auto folder = OpenCheckpoint(ProjectData(std::string("goldens/") + name));
    ASSERT_TRUE(folder.ok()) << folder.status();
    const auto gguf = OpenBytes(HybridGguf(**folder).Build());
    ASSERT_TRUE(gguf.ok()) << name << ": " << gguf.status();
    SCOPED_TRACE(name);
    ExpectSame(**folder, **gguf);
  }
}

TEST(HybridGgufFiles, HoldNemotronsLayersOfOneMixer) {
  const fs::path folder = dovetail::test::TempFolder();
  const fs::path golden = ProjectData("goldens/nemotron_h");
  auto json = nlohmann::json::parse(dovetail::test::ReadFile(golden / "config.json"));
  json["layers_block_type"] = {"linear_attention", "mlp", "full_attention"};  // without the experts of the fourth
  std::ofstream(folder / "config.json") << json.dump();
  fs::copy_file(golden / "model.safetensors", folder / "model.safetensors");
  const auto from = OpenCheckpoint(folder);
  ASSERT_TRUE(from.ok()) << from.status();
  const auto gguf = OpenBytes(HybridGguf(**from).Build());
  ASSERT_TRUE(gguf.ok()) << gguf.status();
  EXPECT_EQ((*gguf)->config().layers[1].kind, LayerKind::kMlpOnly);
  EXPECT_EQ((*gguf)->config().state->out_norm_groups, 2);
  ExpectSame(**from, **gguf);
}

TEST(HybridGgufFiles, WhatIsWrongIsNamedByItsKey) {
  const auto folder = OpenCheckpoint(ProjectData("goldens/lfm2_bias"));
  ASSERT_TRUE(folder.ok()) << folder.status();
  const auto error = [&](const std::string& key, const std::string& replacement) {
    std::string bytes = HybridGguf(**folder).Build();
    const size_t at = bytes.find(key);
    EXPECT_NE(at, std::string::npos);
    bytes.replace(at, key.size(), replacement);
    const auto opened = OpenBytes(bytes);
    return opened.ok() ? "accepted" : std::string(opened.status().message());
  };
  EXPECT_EQ(error("lfm2.shortconv.l_cache", "lfm2.shortconv.l_cachf"),
            "model.gguf: metadata key lfm2.shortconv.l_cache is missing");
  EXPECT_EQ(error("blk.0.shortconv.in_proj.weight", "blk.0.shortconv.in_prok.weight"),
            "model.gguf: tensor blk.0.shortconv.in_proj.weight is missing, which lfm2 needs");
}

}  // namespace
}  // namespace dovetail::model
