#pragma once
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "model/tokenizer/tokenizer.h"

// Tokenizers for tests: tiny ones made here, ours from tests/data, and those in files.

namespace dovetail::model::test {

// The 256 byte tokens as ids 0..255, then "he", "ll", "llo", "hello", " hello", then <|bos|>, <|end|> (control) and
// <tool> (user-defined).
TokenizerData TinyByteLevelData();

// <unk>, <s>, </s>, the 256 byte tokens from id 3, then " ", "a".."z", "he", "ll", "llo", "hello", " hello"; scores
// like a trained model's.
TokenizerData TinySpmData();

// Fails the test if the data is refused.
std::unique_ptr<const Tokenizer> Make(TokenizerData data);

// tests/data/tales_tokenizer, a byte-level tokenizer of 4096 tokens.
TokenizerData TalesData();

// A tokenizer.json (gunzipped if it ends in .gz), alone or with the tokenizer_config.json of its folder.
std::unique_ptr<const Tokenizer> FromJsonFile(const std::filesystem::path& path, bool with_config);

// The tokenizer in a GGUF file (gunzipped if it ends in .gz).
std::unique_ptr<const Tokenizer> FromGgufFile(const std::filesystem::path& path);

// llama.cpp's vectors: `<name>.inp` and `<name>.out`.
struct Vector {
  std::string text;
  std::vector<TokenId> ids;
};
std::vector<Vector> ReadVectors(const std::filesystem::path& folder, const std::string& name);

// `count` pieces of text with much in it that tokenizers get wrong; equal for equal seeds.
std::vector<std::string> OddTexts(uint64_t seed, int count);

}  // namespace dovetail::model::test
