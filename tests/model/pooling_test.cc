#include "model/pooling.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <functional>

#include "model/formats/gguf.h"
#include "tests/model/gguf_builder.h"
#include "tests/support/test_data.h"

namespace dovetail::model {
namespace {

using ::testing::HasSubstr;

// A checkpoint without weights: a GGUF file's metadata, or a folder.
class TextSide final : public Checkpoint {
 public:
  explicit TextSide(std::unique_ptr<GgufFile> gguf) : gguf_(std::move(gguf)) {}
  explicit TextSide(std::filesystem::path folder) { folder_ = std::move(folder); }
  Format format() const override { return gguf_ != nullptr ? Format::kGguf : Format::kSafetensors; }
  std::vector<StoredTensor> stored_tensors() const override { return {}; }
  const GgufFile* gguf() const override { return gguf_.get(); }

 private:
  std::unique_ptr<GgufFile> gguf_;
};

std::string PoolingOfKeys(const std::function<void(test::GgufBuilder&)>& add) {
  test::GgufBuilder builder;
  builder.Text("general.architecture", "qwen3");
  add(builder);
  const std::string bytes = builder.Build();
  auto gguf = GgufFile::FromBytes("model.gguf", std::as_bytes(std::span(bytes.data(), bytes.size())));
  EXPECT_TRUE(gguf.ok()) << gguf.status();
  const auto pooling = PoolingOf(TextSide(*std::move(gguf)));
  return pooling.ok() ? *pooling : std::string(pooling.status().message());
}

TEST(Pooling, OfAGgufFileIsItsPoolingType) {
  const char* const expected[] = {"", "mean", "cls", "last", "rank", "pooling_type 5"};
  for (uint32_t kind = 0; kind < 6; ++kind)
    EXPECT_EQ(PoolingOfKeys([&](test::GgufBuilder& b) { b.U32("qwen3.pooling_type", kind); }), expected[kind]);
  EXPECT_EQ(PoolingOfKeys([](test::GgufBuilder&) {}), "");
  EXPECT_THAT(PoolingOfKeys([](test::GgufBuilder& b) { b.Text("qwen3.pooling_type", "mean"); }),
              HasSubstr("qwen3.pooling_type"));
}

std::string PoolingOfFile(const std::string& json, const char* name = kPoolingFile) {
  const std::filesystem::path folder = dovetail::test::TempFolder();
  std::filesystem::create_directories((folder / name).parent_path());
  std::ofstream(folder / name) << json;
  const auto pooling = PoolingOf(TextSide(folder));
  return pooling.ok() ? *pooling : std::string(pooling.status().message());
}

TEST(Pooling, OfAFolderIsWhatSentenceTransformersWrote) {
  EXPECT_EQ(PoolingOf(TextSide(dovetail::test::TempFolder())).value(), "");
  EXPECT_EQ(PoolingOfFile(R"({"pooling_mode_mean_tokens": true, "pooling_mode_cls_token": false})"), "mean");
  EXPECT_EQ(PoolingOfFile(R"({"pooling_mode_cls_token": true})"), "cls");
  EXPECT_EQ(PoolingOfFile(R"({"word_embedding_dimension": 8, "pooling_mode_lasttoken": true})"), "last");
  EXPECT_EQ(PoolingOfFile(R"({"pooling_mode_lasttoken": true})", kFlatPoolingFile), "last");
  EXPECT_EQ(PoolingOfFile(R"({"pooling_mode_max_tokens": true})"), "pooling_mode_max_tokens");
  EXPECT_EQ(PoolingOfFile(R"({"pooling_mode_mean_tokens": true, "pooling_mode_cls_token": true})"),
            "pooling_mode_cls_token and pooling_mode_mean_tokens");
  EXPECT_THAT(PoolingOfFile("[]"), HasSubstr("is not a JSON object"));
  EXPECT_THAT(PoolingOfFile("{"), HasSubstr("config.json"));
}

}  // namespace
}  // namespace dovetail::model
