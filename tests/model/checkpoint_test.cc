#include "model/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>

#include "model/formats/dequantize.h"
#include "model/formats/gguf.h"
#include "nlohmann/json.hpp"
#include "tests/model/gguf_builder.h"
#include "tests/support/test_data.h"

namespace dovetail::model {
namespace {

namespace fs = std::filesystem;
using test::GgufBuilder;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

const std::vector<std::string> kDenseGoldens = {
    "gemma3",      "llama3_gqa",    "llama_bias",   "llama_dynamic", "llama_linear",    "llama_mha",    "llama_yarn",
    "mistral_swa", "phi3_longrope", "phi4_partial", "qwen2_bias",    "qwen3_mixed_swa", "qwen3_qknorm", "smollm3"};

void Write(const fs::path& path, const std::string& bytes) { std::ofstream(path, std::ios::binary) << bytes; }

// The folder with the unpacked dense goldens: <folder>/llama_mha/config.json and so on.
fs::path Unpack(const fs::path& archive) {
  const fs::path folder = dovetail::test::TempFolder();
  const std::string command = "tar xzf '" + archive.string() + "' -C '" + folder.string() + "'";
  EXPECT_EQ(std::system(command.c_str()), 0);
  return folder / "dense";
}

std::unique_ptr<Checkpoint> Open(const fs::path& path) {
  auto checkpoint = OpenCheckpoint(path);
  EXPECT_TRUE(checkpoint.ok()) << path << ": " << checkpoint.status();
  return checkpoint.ok() ? *std::move(checkpoint) : nullptr;
}

TEST(Checkpoint, OpensEveryDenseGoldenAndUsesEachOfItsTensors) {
  DOVETAIL_DATA_OR_SKIP(const auto archive, "goldens/goldens_dense.tar.gz");
  const fs::path folder = Unpack(archive);
  for (const std::string& name : kDenseGoldens) {
    const auto checkpoint = Open(folder / name);
    ASSERT_NE(checkpoint, nullptr);
    const auto tensors = nlohmann::json::parse(dovetail::test::ReadFile(folder / name / "tensors.json"));
    EXPECT_EQ(checkpoint->stored_tensors().size(), tensors.size()) << name;
    EXPECT_THAT(checkpoint->warnings(), IsEmpty()) << name << ": every stored tensor is one that the model needs";
    const ModelConfig& config = checkpoint->config();
    EXPECT_EQ(config.hidden_size, 64) << name;
    EXPECT_EQ(config.vocab_size, 320) << name;
    EXPECT_EQ(config.layers.size(), 4u) << name;
    EXPECT_THAT(config.stop_ids, ElementsAre(2)) << name;
    for (const std::string& weight : checkpoint->names()) {
      const TensorSource source = checkpoint->Find(weight).value();
      for (const float value : source.ReadAll()) ASSERT_TRUE(std::isfinite(value)) << name << " " << weight;
    }
  }
}

TEST(Checkpoint, CutsTheFusedProjectionsOfPhi3) {
  DOVETAIL_DATA_OR_SKIP(const auto archive, "goldens/goldens_dense.tar.gz");
  const auto checkpoint = Open(Unpack(archive) / "phi3_longrope");
  ASSERT_NE(checkpoint, nullptr);
  const TensorSource q = checkpoint->Find("layers.1.attn.q_proj.weight").value();
  const TensorSource k = checkpoint->Find("layers.1.attn.k_proj.weight").value();
  const TensorSource v = checkpoint->Find("layers.1.attn.v_proj.weight").value();
  EXPECT_EQ(q.stored_name, "model.layers.1.self_attn.qkv_proj.weight");
  EXPECT_EQ(k.stored_name, q.stored_name);
  EXPECT_EQ(q.rows, 64);
  EXPECT_EQ(k.rows, 32);
  EXPECT_EQ(v.rows, 32);
  EXPECT_EQ(k.bytes.data(), q.bytes.data() + q.bytes.size());
  EXPECT_EQ(v.bytes.data(), k.bytes.data() + k.bytes.size());
  const TensorSource gate = checkpoint->Find("layers.1.mlp.gate_proj.weight").value();
  const TensorSource up = checkpoint->Find("layers.1.mlp.up_proj.weight").value();
  EXPECT_EQ(up.bytes.data(), gate.bytes.data() + gate.bytes.size()) << "gate first";
}

TEST(Checkpoint, GivesGemmasNormsAsOnePlusW) {
  DOVETAIL_DATA_OR_SKIP(const auto archive, "goldens/goldens_dense.tar.gz");
  const auto checkpoint = Open(Unpack(archive) / "gemma3");
  ASSERT_NE(checkpoint, nullptr);
  for (const char* name : {"layers.0.input_norm.weight", "layers.0.attn.q_norm.weight", "layers.3.post_mlp_norm.weight",
                           "final_norm.weight"}) {
    const TensorSource source = checkpoint->Find(name).value();
    std::vector<float> stored(static_cast<size_t>(source.rows));
    Dequantize(source.type, source.bytes.data(), source.rows, stored.data());
    const std::vector<float> given = source.ReadAll();
    for (size_t i = 0; i < stored.size(); ++i) EXPECT_EQ(given[i], stored[i] + 1.0f) << name;
  }
  EXPECT_EQ(checkpoint->Find("layers.0.mlp.up_proj.weight").value().add, 0.0f);
}

TEST(Checkpoint, GivesTheSameWeightsFromGgufAsFromHuggingFace) {
  DOVETAIL_DATA_OR_SKIP(const auto folder, "models/stories260K");
  const auto hf = Open(folder / "hf"), f32 = Open(folder / "stories260K-f32.gguf"),
             f16 = Open(folder / "stories260K-f16.gguf");
  ASSERT_TRUE(hf && f32 && f16);
  EXPECT_EQ(hf->names(), f32->names());
  EXPECT_EQ(hf->names(), f16->names());
  int interleaved = 0;
  for (const std::string& name : hf->names()) {
    const std::vector<float> reference = hf->Find(name).value().ReadAll();
    EXPECT_EQ(f32->Find(name).value().ReadAll(), reference) << name;
    const TensorSource half = f16->Find(name).value();
    interleaved += half.interleaved_head_rows > 0;
    std::vector<float> rounded = reference;
    if (half.type == GgmlType::kF16) {
      for (float& value : rounded) value = ToFloat(ToF16(value));
    }
    EXPECT_EQ(half.ReadAll(), rounded) << name;
  }
  EXPECT_EQ(interleaved, 10) << "q and k of five layers";
  EXPECT_EQ(hf->config().ropes, f32->config().ropes);
  EXPECT_EQ(hf->config().layers, f32->config().layers);
  EXPECT_FLOAT_EQ(hf->config().norm_eps, f32->config().norm_eps);
  EXPECT_EQ(hf->config().stop_ids, f32->config().stop_ids);
  EXPECT_TRUE(f32->config().tie_embeddings);
}

TEST(Checkpoint, GivesTheRowOrderThatAPackerOfRawRowsNeeds) {
  DOVETAIL_DATA_OR_SKIP(const auto folder, "models/stories260K");
  const auto gguf = Open(folder / "stories260K-f32.gguf");
  ASSERT_NE(gguf, nullptr);
  const TensorSource q = gguf->Find("layers.2.attn.q_proj.weight").value();
  const std::vector<int32_t> order = q.RowOrder();
  ASSERT_EQ(order.size(), 64u);
  EXPECT_THAT(std::vector<int32_t>(order.begin(), order.begin() + 16),
              ElementsAre(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
  const std::vector<float> logical = q.ReadAll();
  std::vector<float> row(64);
  for (int64_t r = 0; r < q.rows; ++r) {
    Dequantize(q.type, q.bytes.data() + order[static_cast<size_t>(r)] * q.row_bytes, q.cols, row.data());
    EXPECT_TRUE(std::equal(row.begin(), row.end(), logical.begin() + r * 64)) << r;
  }
  EXPECT_THAT(gguf->Find("layers.2.attn.v_proj.weight").value().RowOrder(), IsEmpty());
}

TEST(Checkpoint, OpensTheQuickstartsModel) {
  const char* home = std::getenv("HOME");
  const fs::path path = fs::path(home == nullptr ? "/" : home) / ".cache/dovetail/smollm2-135m-instruct.gguf";
  if (!fs::exists(path)) GTEST_SKIP() << "missing model: ~/.cache/dovetail/smollm2-135m-instruct.gguf";
  const auto checkpoint = Open(path);
  ASSERT_NE(checkpoint, nullptr);
  const ModelConfig& config = checkpoint->config();
  EXPECT_EQ(config.architecture, Architecture::kLlama);
  EXPECT_EQ(config.hidden_size, 576);
  EXPECT_EQ(config.layers.size(), 30u);
  EXPECT_EQ(config.heads, 9);
  EXPECT_EQ(config.kv_heads, 3);
  EXPECT_EQ(config.key_dim, 64);
  EXPECT_EQ(config.vocab_size, 49152);
  EXPECT_EQ(config.max_positions, 8192);
  EXPECT_TRUE(config.tie_embeddings);
  ASSERT_EQ(config.ropes.size(), 1u);
  EXPECT_EQ(config.ropes[0].theta, 100000.0);
  EXPECT_EQ(config.bos, 1);
  EXPECT_THAT(config.stop_ids, ElementsAre(2));
  EXPECT_THAT(checkpoint->warnings(), IsEmpty());
  EXPECT_EQ(checkpoint->Find("layers.7.attn.q_proj.weight").value().type, GgmlType::kQ4_1);
  EXPECT_EQ(checkpoint->Find("lm_head.weight").value().bytes.data(),
            checkpoint->Find("embed.weight").value().bytes.data());
  for (const std::string& name : checkpoint->names()) {
    if (name == "embed.weight" || name == "lm_head.weight") continue;
    const std::vector<float> values = checkpoint->Find(name).value().ReadAll();
    double squares = 0;
    for (const float value : values) squares += static_cast<double>(value) * value;
    EXPECT_TRUE(squares > 0 && std::isfinite(squares)) << name;
  }
}

// A Hugging Face folder of the smallest Llama: every size 2 or 4.
class TinyFolder {
 public:
  fs::path path = dovetail::test::TempFolder();
  nlohmann::json config = {{"model_type", "llama"},         {"hidden_size", 4},         {"intermediate_size", 2},
                           {"num_hidden_layers", 1},        {"num_attention_heads", 2}, {"vocab_size", 3},
                           {"max_position_embeddings", 16}, {"eos_token_id", 2}};
  std::vector<std::pair<std::string, std::vector<int64_t>>> tensors = {
      {"model.embed_tokens.weight", {3, 4}},
      {"model.layers.0.input_layernorm.weight", {4}},
      {"model.layers.0.self_attn.q_proj.weight", {4, 4}},
      {"model.layers.0.self_attn.k_proj.weight", {4, 4}},
      {"model.layers.0.self_attn.v_proj.weight", {4, 4}},
      {"model.layers.0.self_attn.o_proj.weight", {4, 4}},
      {"model.layers.0.post_attention_layernorm.weight", {4}},
      {"model.layers.0.mlp.gate_proj.weight", {2, 4}},
      {"model.layers.0.mlp.up_proj.weight", {2, 4}},
      {"model.layers.0.mlp.down_proj.weight", {4, 2}},
      {"model.norm.weight", {4}},
      {"lm_head.weight", {3, 4}},
  };
  std::string dtype = "F32";
  int64_t element_bytes = 4;

  absl::StatusOr<std::unique_ptr<Checkpoint>> Open() const {
    nlohmann::json header = nlohmann::json::object();
    int64_t end = 0;
    for (const auto& [name, shape] : tensors) {
      int64_t bytes = element_bytes;
      for (const int64_t size : shape) bytes *= size;
      header[name] = {{"dtype", dtype}, {"shape", shape}, {"data_offsets", {end, end + bytes}}};
      end += bytes;
    }
    const std::string text = header.dump();
    Write(path / "model.safetensors",
          GgufBuilder::Raw<uint64_t>(text.size()) + text + std::string(static_cast<size_t>(end), '\0'));
    Write(path / "config.json", config.dump());
    return OpenCheckpoint(path);
  }
  std::string Error() const { return std::string(Open().status().message()); }
};

TEST(CheckpointErrors, TheSmallestFolderOpens) {
  const auto checkpoint = TinyFolder().Open();
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ((*checkpoint)->names().size(), 12u);
  EXPECT_EQ((*checkpoint)->Find("layers.1.input_norm.weight").status().code(), absl::StatusCode::kNotFound);
}

TEST(CheckpointErrors, NameTheTensorAndBothShapes) {
  TinyFolder folder;
  folder.tensors[3].second = {2, 4};
  EXPECT_EQ(folder.Error(),
            "model.safetensors: tensor model.layers.0.self_attn.k_proj.weight: its shape is [2, 4], but the config "
            "asks for [4, 4]");
}

TEST(CheckpointErrors, NameAMissingTensor) {
  TinyFolder folder;
  folder.tensors.erase(folder.tensors.begin() + 10);
  EXPECT_THAT(folder.Error(), HasSubstr(": tensor model.norm.weight is missing, which llama needs"));
}

TEST(CheckpointErrors, NameATypeThatIsNotRead) {
  TinyFolder folder;
  folder.dtype = "F8_E5M2";
  folder.element_bytes = 1;
  EXPECT_EQ(folder.Error(),
            "model.safetensors: tensor model.embed_tokens.weight is stored as F8_E5M2; F32, F16, BF16 and, with "
            "scales, F8_E4M3 are read from safetensors");
}

TEST(CheckpointErrors, AnUnknownTensorIsAWarningAndTheirNumberIsBounded) {
  TinyFolder folder;
  folder.tensors.push_back({"model.layers.0.self_attn.rotary_emb.inv_freq", {1}});
  folder.tensors.push_back({"model.extra.weight", {2}});
  auto checkpoint = folder.Open();
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_THAT((*checkpoint)->warnings(),
              ElementsAre("model.safetensors: tensor model.extra.weight is not used by llama"));
  for (int i = 0; i < 100; ++i) folder.tensors.push_back({absl::StrCat("extra.", i), {1}});
  checkpoint = folder.Open();
  ASSERT_EQ((*checkpoint)->warnings().size(), Checkpoint::kMaxWarnings);
  EXPECT_EQ((*checkpoint)->warnings().back(), "86 more tensors are not used");
}

TEST(CheckpointErrors, SayWhatAPathLacks) {
  const fs::path folder = dovetail::test::TempFolder();
  EXPECT_EQ(OpenCheckpoint(folder / "absent").status(), absl::NotFoundError("absent: no such file or folder"));
  EXPECT_THAT(std::string(OpenCheckpoint(folder).status().message()),
              HasSubstr("holds neither config.json nor a .gguf file"));
  Write(folder / "a.gguf", "");
  Write(folder / "b.gguf", "");
  EXPECT_THAT(std::string(OpenCheckpoint(folder).status().message()),
              HasSubstr("holds 2 GGUF models; name one of them, for example a.gguf"));
  fs::remove(folder / "a.gguf");
  EXPECT_THAT(std::string(OpenCheckpoint(folder).status().message()), HasSubstr("b.gguf: the magic needs 4 bytes"));
  Write(folder / "config.json", "{\"model_type\": \"llama\", ");
  EXPECT_THAT(std::string(OpenCheckpoint(folder).status().message()),
              HasSubstr("config.json: is not valid JSON at byte"));
}

TEST(CheckpointErrors, AVocabularyFileIsNoModel) {
  const std::string bytes = GgufBuilder()
                                .Text("general.architecture", "llama")
                                .U32("llama.block_count", 1)
                                .U32("llama.embedding_length", 4)
                                .U32("llama.feed_forward_length", 4)
                                .U32("llama.context_length", 8)
                                .U32("llama.attention.head_count", 2)
                                .F32("llama.attention.layer_norm_rms_epsilon", 1e-5f)
                                .Build();
  const fs::path path = dovetail::test::TempFolder() / "vocab.gguf";
  Write(path, bytes);
  EXPECT_EQ(OpenCheckpoint(path).status().message(),
            "vocab.gguf: tensor token_embd.weight is missing; this file holds no model (a vocabulary only?)");
}

}  // namespace
}  // namespace dovetail::model
