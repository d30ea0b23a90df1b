#include "model/formats/gguf.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "tests/model/gguf_builder.h"
#include "tests/support/test_data.h"

namespace dovetail::model {
namespace {

using test::GgufBuilder;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::span<const std::byte> Bytes(const std::string& text) { return std::as_bytes(std::span(text.data(), text.size())); }

absl::StatusOr<std::unique_ptr<GgufFile>> Parse(const std::string& bytes) {
  return GgufFile::FromBytes("model.gguf", Bytes(bytes));
}

void Write(const std::filesystem::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

// A small file with every kind of value and two tensors.
GgufBuilder Small() {
  GgufBuilder builder;
  builder.Text("general.architecture", "llama").U32("llama.block_count", 2).U64("llama.context_length", 4096);
  builder.F32("llama.rope.freq_base", 10000.0f).Bool("tokenizer.ggml.add_bos_token", true);
  builder.Strings("tokenizer.ggml.tokens", {"a", "", "c"}).I32s("tokenizer.ggml.token_type", {1, 2, -3});
  builder.Tensor("a.weight", {2, 3}, std::vector<float>{1, 2, 3, 4, 5, 6});
  builder.Tensor("b.weight", {32}, GgmlType::kQ8_0, std::string(34, '\1'));
  return builder;
}

TEST(Gguf, ReadsMetadataOfEveryKindAndTensorsByName) {
  const std::string bytes = Small().Build();
  const auto file = Parse(bytes);
  ASSERT_TRUE(file.ok()) << file.status();
  const GgufFile& gguf = **file;
  EXPECT_EQ(gguf.String("general.architecture").value().value(), "llama");
  EXPECT_EQ(gguf.Int("llama.block_count").value().value(), 2);
  EXPECT_EQ(gguf.Int("llama.context_length").value().value(), 4096) << "a u64 is read as a u32 is";
  EXPECT_EQ(gguf.Float("llama.rope.freq_base").value().value(), 10000.0);
  EXPECT_EQ(gguf.Bool("tokenizer.ggml.add_bos_token").value().value(), true);
  EXPECT_THAT(gguf.Strings("tokenizer.ggml.tokens").value().value(), ElementsAre("a", "", "c"));
  EXPECT_THAT(gguf.Ints("tokenizer.ggml.token_type").value().value(), ElementsAre(1, 2, -3));
  EXPECT_EQ(gguf.Int("llama.absent").value(), std::nullopt);

  ASSERT_EQ(gguf.tensors().size(), 2u);
  const GgufTensor* a = gguf.FindTensor("a.weight");
  ASSERT_NE(a, nullptr);
  EXPECT_THAT(a->dims, ElementsAre(2, 3));
  EXPECT_EQ(a->bytes.size(), 24u);
  EXPECT_EQ(gguf.FindTensor("b.weight")->bytes.size(), 34u);
  EXPECT_EQ(gguf.FindTensor("b.weight")->bytes[33], std::byte{1});
  EXPECT_EQ(gguf.FindTensor("c.weight"), nullptr);
}

TEST(Gguf, SaysWhichKeyHasTheWrongType) {
  const std::string bytes = Small().Build();
  const auto file = Parse(bytes);
  EXPECT_EQ((*file)->Int("general.architecture").status().message(),
            "model.gguf: metadata key general.architecture must be an integer of at most 63 bits, but is string");
  EXPECT_EQ((*file)->Strings("tokenizer.ggml.token_type").status().message(),
            "model.gguf: metadata key tokenizer.ggml.token_type must be an array of strings, but is an array of 3 i32");
}

TEST(Gguf, RefusesAFileCutAtAnyByteOfItsHeaderAndSaysWhatIsMissing) {
  const std::string whole = Small().Build();
  const size_t header = Small().Header().size();
  for (size_t cut = 0; cut < header; ++cut) {
    const auto file = Parse(whole.substr(0, cut));
    ASSERT_FALSE(file.ok()) << "cut at " << cut;
    EXPECT_EQ(file.status().code(), absl::StatusCode::kDataLoss) << cut << ": " << file.status();
    EXPECT_THAT(std::string(file.status().message()), HasSubstr("but the file ends")) << cut;
  }
}

TEST(Gguf, RefusesAFileCutInsideATensor) {
  const std::string whole = Small().Build();
  const size_t data = whole.size() - 96;  // 24 bytes padded to 32, then 34 bytes padded to 64
  for (const size_t cut : {data, data + 1, data + 23}) {
    EXPECT_EQ(Parse(whole.substr(0, cut)).status().message(),
              absl::StrCat("model.gguf: tensor a.weight: 6 elements of F32 need 24 bytes, but the file ends ",
                           cut - data, " bytes after its start; the download is probably incomplete"));
  }
  EXPECT_EQ(
      Parse(whole.substr(0, data + 32 + 33)).status().message(),
      "model.gguf: tensor b.weight: 32 elements of Q8_0 need 34 bytes, but the file ends 33 bytes after its start; "
      "the download is probably incomplete");
  EXPECT_TRUE(Parse(whole.substr(0, data + 32 + 34)).ok()) << "the last tensor's padding may be absent";
}

TEST(Gguf, ReadsVersion2AndAnyPowerOfTwoAlignment) {
  GgufBuilder builder = Small();
  builder.version = 2;
  EXPECT_TRUE(Parse(builder.Build()).ok());
  GgufBuilder wide;
  wide.alignment = 256;
  wide.U32("general.alignment", 256).Tensor("a", {1}, std::vector<float>{1}).Tensor("b", {1}, std::vector<float>{2});
  const std::string bytes = wide.Build();
  const auto file = Parse(bytes);
  ASSERT_TRUE(file.ok()) << file.status();
  float b = 0;
  std::memcpy(&b, (*file)->FindTensor("b")->bytes.data(), 4);
  EXPECT_EQ(b, 2.0f);
}

TEST(Gguf, OpensARealFileAndNamesOnlyItsBaseName) {
  DOVETAIL_DATA_OR_SKIP(const auto path, "models/stories260K/stories260K-f16.gguf");
  const auto file = GgufFile::Open(path);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ((*file)->name(), "stories260K-f16.gguf");
  EXPECT_EQ((*file)->tensors().size(), 47u);
  EXPECT_EQ((*file)->metadata().size(), 24u);
  EXPECT_EQ((*file)->FindTensor("token_embd.weight")->type, GgmlType::kF16);
}

TEST(Gguf, SaysThatAFileIsMissingOrAFolder) {
  const auto folder = dovetail::test::TempFolder();
  EXPECT_EQ(GgufFile::Open(folder / "absent.gguf").status(), absl::NotFoundError("absent.gguf: no such file"));
  EXPECT_THAT(std::string(GgufFile::Open(folder).status().message()), HasSubstr("is not a regular file"));
  Write(folder / "empty.gguf", "");
  EXPECT_EQ(GgufFile::Open(folder / "empty.gguf").status().message(),
            "empty.gguf: the magic needs 4 bytes, but the file ends 0 bytes after its start; the download is probably "
            "incomplete");
}

// Part `number` of `count`, with one tensor of its own.
GgufBuilder Part(uint32_t number, uint32_t count, const std::string& tensor) {
  GgufBuilder builder;
  builder.Key("split.no", 2, GgufBuilder::Raw<uint16_t>(static_cast<uint16_t>(number)));
  builder.Key("split.count", 2, GgufBuilder::Raw<uint16_t>(static_cast<uint16_t>(count)));
  builder.Key("split.tensors.count", 5, GgufBuilder::Raw<int32_t>(static_cast<int32_t>(count)));
  builder.Tensor(tensor, {1}, std::vector<float>{static_cast<float>(number)});
  return builder;
}

TEST(GgufSplit, JoinsThePartsBesideTheFirst) {
  const auto folder = dovetail::test::TempFolder();
  Write(folder / "m-00001-of-00002.gguf", Part(0, 2, "a").Build());
  Write(folder / "m-00002-of-00002.gguf", Part(1, 2, "b").Build());
  const auto file = GgufFile::Open(folder / "m-00001-of-00002.gguf");
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ((*file)->tensors().size(), 2u);
  EXPECT_EQ((*file)->FindTensor("b")->part, 1);
  EXPECT_EQ((*file)->part_name(1), "m-00002-of-00002.gguf");
  EXPECT_EQ(GgufFile::Open(folder / "m-00002-of-00002.gguf").status().message(),
            "m-00002-of-00002.gguf: is part 2 of 2 of a split model; open the part that ends in -00001-of-00002.gguf");
}

TEST(GgufSplit, RefusesPartsThatAreMissingRenamedOrForeign) {
  const auto folder = dovetail::test::TempFolder();
  const auto first = folder / "m-00001-of-00002.gguf", second = folder / "m-00002-of-00002.gguf";
  Write(first, Part(0, 2, "a").Build());
  EXPECT_EQ(GgufFile::Open(first).status(),
            absl::NotFoundError("m-00001-of-00002.gguf: part 2 of 2: m-00002-of-00002.gguf: no such file"));
  Write(second, Part(0, 2, "b").Build());
  EXPECT_THAT(std::string(GgufFile::Open(first).status().message()), HasSubstr("do not say that it is part 2 of 2"));
  Write(second, Part(1, 2, "a").Build());
  EXPECT_THAT(std::string(GgufFile::Open(first).status().message()),
              HasSubstr("tensor a is also in m-00001-of-00002.gguf"));
  Write(second, Part(1, 2, "b").Tensor("c", {1}, std::vector<float>{1}).Build());
  EXPECT_THAT(std::string(GgufFile::Open(first).status().message()),
              HasSubstr("split.tensors.count is 2, but the 2 parts hold 3"));
  Write(folder / "renamed.gguf", Part(0, 2, "a").Build());
  EXPECT_THAT(std::string(GgufFile::Open(folder / "renamed.gguf").status().message()),
              HasSubstr("give it its name back"));
}

}  // namespace
}  // namespace dovetail::model
