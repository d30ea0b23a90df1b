#include "model/formats/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>

#include "nlohmann/json.hpp"
#include "tests/support/test_data.h"

namespace dovetail::model {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::string U64(uint64_t value) {
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &value, 8);
  return bytes;
}

std::string File(const std::string& header, size_t data_bytes) {
  return U64(header.size()) + header + std::string(data_bytes, '\1');
}

absl::StatusOr<std::vector<SafetensorsTensor>> Parse(const std::string& bytes) {
  return ParseSafetensors("model.safetensors", std::as_bytes(std::span(bytes.data(), bytes.size())));
}
std::string Error(const std::string& bytes) { return std::string(Parse(bytes).status().message()); }
std::string HeaderError(const std::string& header, size_t data_bytes = 0) { return Error(File(header, data_bytes)); }

const char kTwo[] =
    R"({"__metadata__":{"format":"pt"},"b":{"dtype":"BF16","shape":[2,2],"data_offsets":[4,12]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}  )";

void Write(const fs::path& path, const std::string& bytes) { std::ofstream(path, std::ios::binary) << bytes; }

TEST(Safetensors, ReadsTensorsInTheOrderOfTheirOffsets) {
  const std::string bytes = File(kTwo, 12);
  const auto tensors = Parse(bytes);
  ASSERT_TRUE(tensors.ok()) << tensors.status();
  ASSERT_EQ(tensors->size(), 2u);
  EXPECT_EQ((*tensors)[0].name, "a");
  EXPECT_EQ((*tensors)[1].name, "b");
  EXPECT_EQ((*tensors)[1].dtype, "BF16");
  EXPECT_THAT((*tensors)[1].shape, ElementsAre(2, 2));
  EXPECT_EQ((*tensors)[1].bytes.data(), reinterpret_cast<const std::byte*>(bytes.data()) + bytes.size() - 8);
}

TEST(Safetensors, AcceptsScalarsEmptyTensorsAndNoTensors) {
  EXPECT_TRUE(
      Parse(
          File(
              R"({"s":{"dtype":"F32","shape":[],"data_offsets":[0,4]},"z":{"dtype":"F32","shape":[0,5],"data_offsets":[0,0]}})",
              4))
          .ok());
  EXPECT_THAT(Parse(File("{}", 0)).value(), IsEmpty());
  EXPECT_TRUE(Parse(File(R"({"f":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}})", 1)).ok());
}

TEST(Safetensors, RefusesAFileCutAnywhere) {
  const std::string whole = File(kTwo, 12);
  for (size_t cut = 0; cut < whole.size(); ++cut) {
    const auto tensors = Parse(whole.substr(0, cut));
    ASSERT_FALSE(tensors.ok()) << cut;
    EXPECT_EQ(tensors.status().code(), absl::StatusCode::kDataLoss) << cut << ": " << tensors.status();
  }
}

TEST(Safetensors, RefusesHeadersThatLieAboutTheirSize) {
  EXPECT_THAT(Error(U64(uint64_t{1} << 63) + "{}"),
              HasSubstr("says its header has 9,223,372,036,854,775,808 bytes; at most 16,777,216 are read"));
  EXPECT_THAT(Error(U64(100) + "{}"),
              HasSubstr("the header needs 100 bytes, but the file ends 2 bytes after its start"));
  EXPECT_THAT(Error(U64(0) + "{}"), HasSubstr("does not begin with '{'"));
  EXPECT_THAT(HeaderError(" {}"), HasSubstr("does not begin with '{'"));
}

// The shapes of huggingface/safetensors' attacks/ and their relatives.
TEST(Safetensors, RefusesTensorsThatDoNotTileTheData) {
  const auto two = [](const char* a, const char* b) {
    return absl::StrCat(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":)", a,
                        R"(},"b":{"dtype":"F32","shape":[1],"data_offsets":)", b, "}}");
  };
  EXPECT_EQ(
      HeaderError(two("[0,4]", "[0,4]"), 4),
      "model.safetensors: tensor b: begins at byte 0 of the data, but the tensors before it end at 4 (an overlap)");
  EXPECT_EQ(HeaderError(two("[0,4]", "[5,9]"), 9),
            "model.safetensors: tensor b: begins at byte 5 of the data, but the tensors before it end at 4 (a hole)");
  EXPECT_THAT(HeaderError(two("[4,8]", "[8,12]"), 12),
              HasSubstr("tensor a: begins at byte 4 of the data, but the tensors before it end at 0 (a hole)"));
  EXPECT_EQ(HeaderError(two("[0,4]", "[4,8]"), 9), "model.safetensors: 1 bytes behind the last tensor belong to none");
  EXPECT_THAT(HeaderError(two("[0,4]", "[4,8]"), 7),
              HasSubstr("tensor b: ends at byte 8 of the data, but the file has only 7"));
  EXPECT_THAT(HeaderError(two("[4,0]", "[0,4]"), 4), HasSubstr("run backwards"));
}

TEST(Safetensors, RefusesShapesThatDoNotMatchOrOverflow) {
  const auto one = [](const char* dtype, const char* shape, const char* offsets) {
    return absl::StrCat(R"({"t":{"dtype":")", dtype, R"(","shape":)", shape, R"(,"data_offsets":)", offsets, "}}");
  };
  EXPECT_EQ(HeaderError(one("F32", "[2]", "[0,4]"), 4),
            "model.safetensors: tensor t: its shape and dtype need 8 bytes, but its data_offsets hold 4");
  EXPECT_THAT(HeaderError(one("F32", "[4294967296,4294967296]", "[0,0]")),
              HasSubstr("no whole number of bytes, or one over 64 bits"));
  EXPECT_THAT(HeaderError(one("F64", "[4611686018427387904]", "[0,0]")),
              HasSubstr("no whole number of bytes, or one over 64 bits"));
  EXPECT_THAT(HeaderError(one("F4", "[1]", "[0,1]"), 1), HasSubstr("no whole number of bytes"));
  EXPECT_THAT(HeaderError(one("F32", "[18446744073709551615]", "[0,0]")),
              HasSubstr("tensor t has a shape over 63 bits"));
  EXPECT_THAT(HeaderError(one("F32", "[-1]", "[0,4]")), HasSubstr("tensor t has a malformed shape"));
  EXPECT_THAT(HeaderError(one("F32", "[1.5]", "[0,4]")), HasSubstr("tensor t has a malformed shape"));
  EXPECT_THAT(HeaderError(one("F32", "[1,1,1,1,1,1,1,1,1]", "[0,4]")), HasSubstr("more than 8 dimensions"));
  EXPECT_THAT(HeaderError(one("F32", "[[1]]", "[0,4]")), HasSubstr("malformed shape"));
  EXPECT_THAT(HeaderError(one("F32", "[1]", "[0]")), HasSubstr("must have two data_offsets"));
  EXPECT_THAT(HeaderError(one("F32", "[1]", "[0,4,8]")), HasSubstr("must have two data_offsets"));
  EXPECT_THAT(HeaderError(one("F31", "[1]", "[0,4]")), HasSubstr("unknown dtype 'F31'"));
}

TEST(Safetensors, RefusesHeadersOfAnyOtherForm) {
  const std::string entry = R"({"dtype":"F32","shape":[1],"data_offsets":[0,4]})";
  EXPECT_EQ(HeaderError(absl::StrCat(R"({"t":)", entry, R"(,"t":)", entry, "}"), 4),
            "model.safetensors: tensor t appears twice");
  EXPECT_THAT(HeaderError(R"({"t":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}})", 4),
              HasSubstr("has the field dtype twice"));
  EXPECT_THAT(HeaderError(R"({"t":{"shape":[1],"data_offsets":[0,4]}})", 4), HasSubstr("tensor t has no dtype"));
  EXPECT_THAT(HeaderError(R"({"t":{"dtype":"F32","data_offsets":[0,4]}})", 4), HasSubstr("tensor t has no shape"));
  EXPECT_THAT(HeaderError(R"({"t":{"dtype":"F32","shape":[1]}})", 4), HasSubstr("tensor t has no data_offsets"));
  EXPECT_THAT(HeaderError(R"({"t":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":1}})", 4),
              HasSubstr("unknown field 'x'"));
  EXPECT_THAT(HeaderError(R"({"t":5})"), HasSubstr("must be an object of objects"));
  EXPECT_THAT(HeaderError(R"({"t":{"dtype":{"a":{}}}})"), HasSubstr("holds an object where none belongs"));
  EXPECT_THAT(HeaderError(R"({"__metadata__":{"a":1}})"), HasSubstr("__metadata__ must map strings to strings"));
  EXPECT_THAT(HeaderError(R"({"__metadata__":"x"})"), HasSubstr("__metadata__ must be an object"));
  EXPECT_THAT(HeaderError(R"({"__metadata__":{"a":{}}})"), HasSubstr("holds an object where none belongs"));
  EXPECT_THAT(HeaderError(R"({"__metadata__":{"a":"b","a":"c"}})"), HasSubstr("the key 'a' twice"));
  EXPECT_THAT(HeaderError("{\"t\xff\":{}}"), HasSubstr("not valid JSON at byte"));
  EXPECT_THAT(HeaderError("{} x"), HasSubstr("not valid JSON at byte"));
  EXPECT_THAT(HeaderError(std::string("{}\0", 3)), HasSubstr("not valid JSON at byte"));
}

TEST(Safetensors, RefusesAMillionBracketsWithoutNestingItself) {
  EXPECT_THAT(HeaderError(R"({"t":{"shape":)" + std::string(1000000, '[')), HasSubstr("malformed shape"));
  EXPECT_THAT(HeaderError(R"({"t":)" + std::string(1000000, '[')), HasSubstr("must be an object of objects"));
}

// --- Shards ---

std::string One(const std::string& name) {
  return File(absl::StrCat(R"({")", name, R"(":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})"), 4);
}

std::string IndexError(const fs::path& folder, const nlohmann::json& weight_map) {
  Write(folder / "model.safetensors.index.json",
        nlohmann::json{{"metadata", {{"total_size", 8}}}, {"weight_map", weight_map}}.dump());
  return std::string(SafetensorsFile::OpenFolder(folder).status().message());
}

TEST(SafetensorsShards, AreReadAsOneModel) {
  const fs::path folder = dovetail::test::TempFolder();
  Write(folder / "model-1.safetensors", One("a"));
  Write(folder / "model-2.safetensors", One("b"));
  EXPECT_EQ(IndexError(folder, {{"a", "model-1.safetensors"}, {"b", "model-2.safetensors"}}), "");
  const auto file = SafetensorsFile::OpenFolder(folder).value();
  ASSERT_EQ(file->tensors().size(), 2u);
  EXPECT_EQ(file->shard_name(file->Find("b")->shard), "model-2.safetensors");
  EXPECT_EQ(file->Find("c"), nullptr);
}

TEST(SafetensorsShards, AnIndexMayNotLeaveItsFolder) {
  const fs::path folder = dovetail::test::TempFolder();
  Write(folder / "m.safetensors", One("a"));
  for (const char* path : {"../m.safetensors", "/etc/passwd", "x/m.safetensors", "..", ".", "", "..\\m.safetensors"}) {
    EXPECT_THAT(IndexError(folder, {{"a", path}}),
                HasSubstr("weight_map['a'] must be the plain name of a file in the same folder"))
        << path;
  }
  EXPECT_THAT(IndexError(folder, {{"a", 1}}), HasSubstr("must be the plain name"));
  EXPECT_THAT(IndexError(folder, 5), HasSubstr("has no weight_map object"));
}

TEST(SafetensorsShards, MustHoldWhatTheIndexSays) {
  const fs::path folder = dovetail::test::TempFolder();
  Write(folder / "m1.safetensors", One("a"));
  Write(folder / "m2.safetensors", One("a"));
  EXPECT_THAT(IndexError(folder, {{"b", "m1.safetensors"}}),
              HasSubstr("says that tensor b is in m1.safetensors, which does not hold it"));
  EXPECT_THAT(IndexError(folder, {{"a", "m1.safetensors"}, {"b", "m2.safetensors"}}),
              HasSubstr("m2.safetensors: tensor a is also in m1.safetensors"));
  EXPECT_EQ(IndexError(folder, {{"a", "m3.safetensors"}}),
            "model.safetensors.index.json: m3.safetensors: no such file");
  EXPECT_THAT(std::string(SafetensorsFile::OpenFolder(dovetail::test::TempFolder()).status().message()),
              HasSubstr("has neither model.safetensors nor model.safetensors.index.json"));
}

TEST(Safetensors, OpensARealFile) {
  DOVETAIL_DATA_OR_SKIP(const auto path, "models/stories260K/hf");
  const auto file = SafetensorsFile::OpenFolder(path);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_THAT((*file)->Find("model.embed_tokens.weight")->shape, ElementsAre(512, 64));
}

}  // namespace
}  // namespace dovetail::model
