#include "tests/model/tokenizer_test_models.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <random>
#include <sstream>

#include "base/check.h"
#include "model/formats/gguf.h"
#include "model/tokenizer/byte_level.h"
#include "model/tokenizer/tokenizer_gguf.h"
#include "model/tokenizer/tokenizer_json.h"
#include "tests/support/test_data.h"

namespace dovetail::model::test {
namespace {

using dovetail::test::ReadFile;

// The path itself, or that of its unpacked copy.
std::filesystem::path Unpacked(const std::filesystem::path& path) {
  if (path.extension() != ".gz") return path;
  const std::filesystem::path copy = dovetail::test::TempFolder() / path.stem();
  const std::string command = "gzip -dc '" + path.string() + "' > '" + copy.string() + "'";
  EXPECT_EQ(std::system(command.c_str()), 0) << command;
  return copy;
}

std::unique_ptr<const Tokenizer> MakeOrFail(absl::StatusOr<TokenizerData> data, const std::string& name) {
  EXPECT_TRUE(data.ok()) << name << ": " << data.status();
  return data.ok() ? Make(*std::move(data)) : nullptr;
}

template <typename T>
T ValueOf(const absl::StatusOr<std::optional<T>>& value) {
  EXPECT_TRUE(value.ok()) << value.status();
  return value.ok() ? value->value_or(T{}) : T{};
}

template <typename T>
std::optional<T> OptionalOf(const absl::StatusOr<std::optional<T>>& value) {
  EXPECT_TRUE(value.ok()) << value.status();
  return value.ok() ? *value : std::nullopt;
}

GgufTokenizerFields FieldsOf(const GgufFile& file) {
  GgufTokenizerFields fields;
  fields.model = ValueOf(file.String("tokenizer.ggml.model"));
  fields.pre = OptionalOf(file.String("tokenizer.ggml.pre"));
  fields.tokens = ValueOf(file.Strings("tokenizer.ggml.tokens"));
  fields.scores = ValueOf(file.Floats("tokenizer.ggml.scores"));
  fields.token_type = ValueOf(file.Ints("tokenizer.ggml.token_type"));
  fields.merges = ValueOf(file.Strings("tokenizer.ggml.merges"));
  fields.bos_token_id = OptionalOf(file.Int("tokenizer.ggml.bos_token_id"));
  fields.eos_token_id = OptionalOf(file.Int("tokenizer.ggml.eos_token_id"));
  fields.unknown_token_id = OptionalOf(file.Int("tokenizer.ggml.unknown_token_id"));
  fields.padding_token_id = OptionalOf(file.Int("tokenizer.ggml.padding_token_id"));
  fields.eot_token_id = OptionalOf(file.Int("tokenizer.ggml.eot_token_id"));
  fields.add_bos_token = OptionalOf(file.Bool("tokenizer.ggml.add_bos_token"));
  fields.add_eos_token = OptionalOf(file.Bool("tokenizer.ggml.add_eos_token"));
  fields.add_space_prefix = OptionalOf(file.Bool("tokenizer.ggml.add_space_prefix"));
  return fields;
}

}  // namespace

TokenizerData TinyByteLevelData() {
  TokenizerData data;
  data.kind = TokenizerKind::kByteLevelBpe;
  data.pre_tokenizer = PreTokenizer::kGpt2;
  for (int byte = 0; byte < 256; ++byte)
    data.tokens.push_back(SpellingOfBytes(std::string(1, static_cast<char>(byte))));
  for (const char* word : {"he", "ll", "llo", "hello", " hello"}) data.tokens.push_back(SpellingOfBytes(word));
  data.types.assign(data.tokens.size(), TokenType::kNormal);
  data.merges = {{'h', 'e'}, {'l', 'l'}, {257, 'o'}, {256, 258}, {' ', 259}};
  for (const char* special : {"<|bos|>", "<|end|>", "<tool>"}) data.tokens.emplace_back(special);
  data.types.insert(data.types.end(), {TokenType::kControl, TokenType::kControl, TokenType::kUserDefined});
  data.special.bos = 261;
  data.special.eos = 262;
  data.prefix_ids = {261};
  return data;
}

TokenizerData TinySpmData() {
  TokenizerData data;
  data.kind = TokenizerKind::kSpmBpe;
  data.byte_fallback = true;
  data.space_prefix = SpacePrefix::kEveryText;
  data.strip_first_space = true;
  data.tokens = {"<unk>", "<s>", "</s>"};
  data.types = {TokenType::kUnknown, TokenType::kControl, TokenType::kControl};
  for (int byte = 0; byte < 256; ++byte) {
    char spelling[8];
    std::snprintf(spelling, sizeof(spelling), "<0x%02X>", byte);
    data.tokens.emplace_back(spelling);
  }
  data.types.resize(data.tokens.size(), TokenType::kByte);
  data.tokens.emplace_back(kSpmSpace);
  for (char letter = 'a'; letter <= 'z'; ++letter) data.tokens.emplace_back(1, letter);
  for (const char* word : {"he", "ll", "llo", "hello"}) data.tokens.emplace_back(word);
  data.tokens.push_back(std::string(kSpmSpace) + "hello");
  data.types.resize(data.tokens.size(), TokenType::kNormal);
  for (size_t id = 0; id < data.tokens.size(); ++id) data.scores.push_back(-static_cast<float>(id));
  data.special = {.bos = 1, .eos = 2, .unk = 0};
  data.prefix_ids = {1};
  return data;
}

std::unique_ptr<const Tokenizer> Make(TokenizerData data) {
  auto tokenizer = Tokenizer::Create(data);
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
  return tokenizer.ok() ? *std::move(tokenizer) : nullptr;
}

TokenizerData TalesData() {
  const auto folder = dovetail::test::ProjectData("tales_tokenizer");
  auto data = TokenizerDataFromJson(ReadFile(folder / "tokenizer.json"), ReadFile(folder / "tokenizer_config.json"));
  DT_CHECK(data.ok(), data.status().ToString());
  return *std::move(data);
}

std::unique_ptr<const Tokenizer> FromJsonFile(const std::filesystem::path& path, bool with_config) {
  const std::string json = ReadFile(Unpacked(path));
  if (!with_config) return MakeOrFail(TokenizerDataFromJson(json), path);
  return MakeOrFail(TokenizerDataFromJson(json, ReadFile(path.parent_path() / "tokenizer_config.json")), path);
}

std::unique_ptr<const Tokenizer> FromGgufFile(const std::filesystem::path& path) {
  const auto file = GgufFile::Open(Unpacked(path));
  EXPECT_TRUE(file.ok()) << file.status();
  if (!file.ok()) return nullptr;
  return MakeOrFail(TokenizerDataFromGguf(FieldsOf(**file)), path);
}

std::vector<Vector> ReadVectors(const std::filesystem::path& folder, const std::string& name) {
  constexpr std::string_view kSeparator = "\n__ggml_vocab_test__\n";
  const std::string texts = ReadFile(folder / (name + ".inp"));
  std::istringstream lines(ReadFile(folder / (name + ".out")));
  std::vector<Vector> vectors;
  std::string line;
  for (size_t at = 0; at <= texts.size();) {
    if (!std::getline(lines, line)) line.clear();  // the last text is empty, and so is its line
    const size_t end = std::min(texts.find(kSeparator, at), texts.size());
    Vector vector{texts.substr(at, end - at), {}};
    std::istringstream ids(line);
    for (TokenId id; ids >> id;) vector.ids.push_back(id);
    vectors.push_back(std::move(vector));
    at = end + kSeparator.size();
  }
  return vectors;
}

std::vector<std::string> OddTexts(uint64_t seed, int count) {
  static constexpr const char* kParts[] = {
      "hello",  " hello",  "he",      "l",      " ",     "  ",   "\n",       "\r\n",       "\t",
      "'s",     "'LL",     "1",       "2345",   "½",     "٣",    "é",        "e\u0301",    "\u0323",
      "漢字",   "カナ",    "한국어",  "ไทย",    "हिन्दी", "🚀",    "👩\u200d🚀", "\u00a0",     "\u3000",
      "\u180e", "<|end|>", "<|bos|>", "<tool>", "</s>",  "<s>",  "<unk>",    "▁",          "Ġ",
      "!?",     "://",     "_",       "ABC",    "ǅ",     "\x01", "\x7f",     "\U000e0001", "<0x0A>"};
  std::mt19937_64 random(seed);
  std::vector<std::string> texts;
  for (int i = 0; i < count; ++i) {
    std::string text;
    for (uint64_t n = random() % 24; n > 0; --n) text += kParts[random() % std::size(kParts)];
    texts.push_back(std::move(text));
  }
  return texts;
}

}  // namespace dovetail::model::test
