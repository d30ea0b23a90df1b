#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "model/formats/gguf.h"
#include "tests/model/gguf_builder.h"

// Files made by hand, each wrong in one way: every one is refused with a code and a text that names what is wrong, and
// costs no memory.

namespace dovetail::model {
namespace {

using test::GgufBuilder;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

constexpr uint64_t kHuge = ~uint64_t{0};

template <typename T>
std::string Raw(T value) {
  return GgufBuilder::Raw(value);
}

struct Case {
  const char* what;
  std::string bytes;
  Code code;
  const char* text;
};

std::string Key(uint32_t type, const std::string& value, const std::string& key = "k") {
  return GgufBuilder().Key(key, type, value).Build();
}

std::string Array(uint32_t element, uint64_t count, const std::string& elements = "") {
  return Key(9, Raw(element) + Raw(count) + elements);
}

std::string Header(const std::string& magic, uint32_t version, uint64_t tensors, uint64_t keys) {
  return magic + Raw(version) + Raw(tensors) + Raw(keys);
}

std::string Tensor(const std::vector<uint64_t>& dims, uint32_t type, uint64_t offset = 0,
                   const std::string& data = std::string(64, '\0')) {
  return GgufBuilder().Info("t", dims, type, offset, data).Build();
}

std::vector<Case> HeaderCases() {
  GgufBuilder more_tensors, more_keys;
  more_tensors.tensor_count = 5;
  more_keys.key_count = 5;
  more_tensors.Tensor("t", {1}, std::vector<float>{1});
  more_keys.U32("k", 1);
  return {
      {"empty", "", Code::kDataLoss, "the magic needs 4 bytes"},
      {"wrong magic", Header("GGML", 3, 0, 0), Code::kInvalidArgument, "does not begin with 'GGUF'"},
      {"magic in another case", Header("gguf", 3, 0, 0), Code::kInvalidArgument, "does not begin with 'GGUF'"},
      {"a zip file", std::string("PK\3\4") + std::string(60, '\0'), Code::kInvalidArgument,
       "does not begin with 'GGUF'"},
      {"version 0", Header("GGUF", 0, 0, 0), Code::kUnimplemented, "is GGUF version 0; versions 2 and 3 are read"},
      {"version 1", Header("GGUF", 1, 0, 0), Code::kUnimplemented, "is GGUF version 1"},
      {"version 4", Header("GGUF", 4, 0, 0), Code::kUnimplemented, "is GGUF version 4"},
      {"big-endian", Header("GGUF", 3u << 24, 0, 0), Code::kUnimplemented, "is big-endian"},
      {"2^64 - 1 tensors", Header("GGUF", 3, kHuge, 0), Code::kInvalidArgument,
       "18,446,744,073,709,551,615 tensors; at most 65,536"},
      {"2^64 - 1 keys", Header("GGUF", 3, 0, kHuge), Code::kInvalidArgument, "metadata keys; at most 65,536 are read"},
      {"65,537 tensors", Header("GGUF", 3, 65537, 0), Code::kInvalidArgument, "65,537 tensors"},
      {"65,537 keys", Header("GGUF", 3, 0, 65537), Code::kInvalidArgument, "65,537 metadata keys"},
      {"fewer keys than said", more_keys.Build(), Code::kDataLoss, "metadata key 2 of 5 needs 8 bytes"},
      {"fewer tensors than said", more_tensors.Build(), Code::kInvalidArgument, "the name of tensor 2 of 5 is empty"},
  };
}

std::vector<Case> KeyCases() {
  const std::string twice = GgufBuilder().U32("same", 1).U32("same", 2).Build();
  const std::string long_key = Header("GGUF", 3, 0, 1) + Raw(kHuge) + "abc";
  const std::string past_end = Header("GGUF", 3, 0, 1) + Raw<uint64_t>(100) + "abc";
  return {
      {"empty key", Key(4, Raw<uint32_t>(1), ""), Code::kInvalidArgument, "metadata key 1 of 1 is empty"},
      {"duplicate key", twice, Code::kInvalidArgument, "metadata key 'same' appears twice"},
      {"key of 2^64 - 1 bytes", long_key, Code::kInvalidArgument,
       "metadata key 1 of 1 says it is 18,446,744,073,709,551,615 bytes long"},
      {"key past the end", past_end, Code::kDataLoss,
       "metadata key 1 of 1 needs 100 bytes, but the file ends 3 bytes after its start"},
      {"unknown value type", Key(13, ""), Code::kInvalidArgument, "metadata key 'k' has the unknown value type 13"},
      {"value type 2^32 - 1", Key(~0u, ""), Code::kInvalidArgument, "unknown value type 4294967295"},
      {"half a u32", Key(4, "ab"), Code::kDataLoss, "metadata key 'k': the value needs 4 bytes, but the file ends 2"},
      {"half a f64", Key(12, "abcdefg"), Code::kDataLoss, "needs 8 bytes, but the file ends 7"},
      {"no bool", Key(7, ""), Code::kDataLoss, "needs 1 bytes, but the file ends 0"},
      {"a bool of 2", Key(7, "\2"), Code::kInvalidArgument, "metadata key 'k' holds a bool of value 2"},
      {"string past the end", Key(8, Raw<uint64_t>(5) + "abcd"), Code::kDataLoss,
       "the string needs 5 bytes, but the file ends 4"},
      {"string over 1 MiB", Key(8, Raw<uint64_t>((1 << 20) + 1) + std::string((1 << 20) + 1, 'x')),
       Code::kInvalidArgument, "says it is 1,048,577 bytes long"},
      {"string of 2^63 bytes", Key(8, Raw<uint64_t>(uint64_t{1} << 63)), Code::kInvalidArgument,
       "bytes long; at most 1,048,576 are read"},
      {"a key with control bytes", Key(13, "", "a\n\x1b[31m"), Code::kInvalidArgument, "'a\\n\\x1b[31m'"},
  };
}

std::vector<Case> ArrayCases() {
  const std::string inner = Raw<uint32_t>(4) + Raw<uint64_t>(1) + Raw<uint32_t>(7);
  return {
      {"array of arrays", Array(9, 1, inner), Code::kInvalidArgument, "is an array of arrays, which is not read"},
      {"array of unknown elements", Array(99, 1), Code::kInvalidArgument,
       "the array element has the unknown value type 99"},
      {"array over 2^30", Array(0, (uint64_t{1} << 30) + 1), Code::kInvalidArgument,
       "an array of 1,073,741,825 elements"},
      {"array of 2^64 - 1", Array(12, kHuge), Code::kInvalidArgument, "at most 1,073,741,824 are read"},
      {"count times size overflows", Array(10, (uint64_t{1} << 61) + 1), Code::kInvalidArgument,
       "at most 1,073,741,824 are read"},
      {"array past the end", Array(4, 3, std::string(11, '\0')), Code::kDataLoss,
       "an array of 3 elements needs 12 bytes, but the file ends 11"},
      {"a gigabyte of nothing", Array(12, uint64_t{1} << 30), Code::kDataLoss,
       "needs 8,589,934,592 bytes, but the file ends 0"},
      {"a billion strings", Array(8, uint64_t{1} << 30), Code::kDataLoss, "strings needs 8,589,934,592 bytes"},
      {"string in an array past the end", Array(8, 1, Raw<uint64_t>(3) + "ab"), Code::kDataLoss,
       "string 0 needs 3 bytes, but the file ends 2"},
      {"string in an array of 2^64 - 1", Array(8, 1, Raw(kHuge)), Code::kInvalidArgument,
       "string 0 says it is 18,446,744,073,709,551,615"},
      {"second string's length is cut", Array(8, 2, Raw<uint64_t>(4) + "abcd" + "1234"), Code::kDataLoss,
       "the length of metadata key 'k': string 1"},
      {"bool array with a 9", Array(7, 2, "\1\x9"), Code::kInvalidArgument, "holds a bool of value 9"},
  };
}

std::vector<Case> AlignmentCases() {
  const auto aligned = [](uint32_t value) { return GgufBuilder().U32("general.alignment", value).Build(); };
  return {
      {"alignment 0", aligned(0), Code::kInvalidArgument, "general.alignment is 0; it must be a power of two"},
      {"alignment 33", aligned(33), Code::kInvalidArgument, "general.alignment is 33"},
      {"alignment 2^31", aligned(1u << 31), Code::kInvalidArgument, "general.alignment is 2147483648"},
      {"alignment of another type", GgufBuilder().U64("general.alignment", 32).Build(), Code::kInvalidArgument,
       "general.alignment is not a u32"},
      {"alignment as a string", GgufBuilder().Text("general.alignment", "32").Build(), Code::kInvalidArgument,
       "general.alignment is not a u32"},
  };
}

std::vector<Case> TensorCases() {
  const std::vector<float> one = {1};
  const std::string name64 = GgufBuilder().Tensor(std::string(64, 'n'), {1}, one).Build();
  const std::string no_name = GgufBuilder().Tensor("", {1}, one).Build();
  const std::string twice = GgufBuilder().Tensor("t", {1}, one).Tensor("t", {1}, one).Build();
  const std::string overlap =
      GgufBuilder().Tensor("a", {8}, std::vector<float>(8)).Info("b", {8}, 0, 0, std::string(32, '\0')).Build();
  const std::string hole =
      GgufBuilder().Tensor("a", {8}, std::vector<float>(8)).Info("b", {8}, 0, 64, std::string(64, '\0')).Build();
  const uint64_t big = uint64_t{1} << 32;
  return {
      {"name of 64 bytes", name64, Code::kInvalidArgument, "the name has 64 bytes; at most 63 are allowed"},
      {"empty name", no_name, Code::kInvalidArgument, "the name of tensor 1 of 1 is empty"},
      {"duplicate name", twice, Code::kInvalidArgument, "tensor t appears twice"},
      {"no dimensions", Tensor({}, 0), Code::kInvalidArgument, "tensor t has 0 dimensions"},
      {"five dimensions", Tensor({1, 1, 1, 1, 1}, 0), Code::kInvalidArgument,
       "tensor t has 5 dimensions; 1 to 4 are allowed"},
      {"a dimension of 0", Tensor({0}, 0), Code::kInvalidArgument, "tensor t: dimension 0 is 0; it must be at least 1"},
      {"a negative dimension", Tensor({4, kHuge}, 0), Code::kInvalidArgument, "tensor t: dimension 1 is -1"},
      {"elements overflow", Tensor({big, big}, 0), Code::kInvalidArgument,
       "the product of its dimensions does not fit 63 bits"},
      {"elements overflow in the fourth dimension", Tensor({1u << 16, 1u << 16, 1u << 16, 1u << 16}, 0),
       Code::kInvalidArgument, "does not fit 63 bits"},
      {"bytes overflow", Tensor({(uint64_t{1} << 62)}, 0), Code::kInvalidArgument,
       "are more bytes than a file can have"},
      {"bytes overflow a u64 in blocks", Tensor({uint64_t{1} << 62}, 8), Code::kInvalidArgument,
       "are more bytes than a file can have"},
      {"larger than the file", Tensor({1u << 20}, 0), Code::kDataLoss,
       "tensor t: 1,048,576 elements of F32 need 4,194,304 bytes, but the file ends 64 bytes after its start"},
      {"unknown type", Tensor({1}, 4000), Code::kUnimplemented, "tensor t is stored as type 4000"},
      {"a type that is not read", Tensor({256}, 16), Code::kUnimplemented, "tensor t is stored as IQ2_XXS"},
      {"a removed type", Tensor({32}, 4), Code::kUnimplemented, "tensor t is stored as Q4_2"},
      {"row of no whole blocks", Tensor({33}, 8), Code::kInvalidArgument,
       "rows of 33 elements are not whole blocks of 32 (Q8_0)"},
      {"row of no whole super-blocks", Tensor({128, 2}, 12), Code::kInvalidArgument,
       "rows of 128 elements are not whole blocks of 256 (Q4_K)"},
      {"offset is not 0", Tensor({1}, 0, 32), Code::kInvalidArgument,
       "tensor t: begins at offset 32 of the data, but the tensors before it end at 0"},
      {"offset 2^64 - 32", Tensor({1}, 0, kHuge - 31), Code::kInvalidArgument,
       "begins at offset 18,446,744,073,709,551,584"},
      {"unaligned offset", Tensor({1}, 0, 1), Code::kInvalidArgument, "begins at offset 1 of the data"},
      {"overlap", overlap, Code::kInvalidArgument,
       "tensor b: begins at offset 0 of the data, but the tensors before it end at 32"},
      {"hole", hole, Code::kInvalidArgument,
       "tensor b: begins at offset 64 of the data, but the tensors before it end at 32"},
      {"no data at all", Tensor({1}, 0, 0, ""), Code::kDataLoss,
       "need 4 bytes, but the file ends 0 bytes after its start"},
      {"data cut by one byte", Tensor({16}, 0, 0, std::string(64, '\0')).substr(0, 96 + 63 - 32), Code::kDataLoss,
       "but the file ends"},
  };
}

std::vector<Case> AllCases() {
  std::vector<Case> all;
  for (const auto& cases : {HeaderCases(), KeyCases(), ArrayCases(), AlignmentCases(), TensorCases()})
    all.insert(all.end(), cases.begin(), cases.end());
  return all;
}

TEST(MalformedGguf, EachIsRefusedWithACodeAndATextThatNamesTheFault) {
  const std::vector<Case> cases = AllCases();
  EXPECT_GE(cases.size(), 60u);
  for (const Case& wrong : cases) {
    const auto file =
        GgufFile::FromBytes("model.gguf", std::as_bytes(std::span(wrong.bytes.data(), wrong.bytes.size())));
    ASSERT_FALSE(file.ok()) << wrong.what;
    EXPECT_EQ(file.status().code(), wrong.code) << wrong.what << ": " << file.status();
    EXPECT_THAT(std::string(file.status().message()), HasSubstr(wrong.text)) << wrong.what;
    EXPECT_THAT(std::string(file.status().message()), ::testing::StartsWith("model.gguf: ")) << wrong.what;
  }
}

// VmHWM in KiB: the most memory that this process ever held.
long PeakMemoryKib() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("VmHWM:", 0) == 0) return std::stol(line.substr(6));
  }
  return 0;
}

TEST(MalformedGguf, CostsLessThan16MiBHoweverMuchItClaims) {
  const std::vector<Case> cases = AllCases();
  const long before = PeakMemoryKib();
  for (int round = 0; round < 10; ++round) {
    for (const Case& wrong : cases) {
      EXPECT_FALSE(
          GgufFile::FromBytes("model.gguf", std::as_bytes(std::span(wrong.bytes.data(), wrong.bytes.size()))).ok());
    }
  }
  EXPECT_LT(PeakMemoryKib() - before, 16 * 1024);
}

}  // namespace
}  // namespace dovetail::model
