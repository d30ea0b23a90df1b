#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "model/tokenizer/tokenizer_gguf.h"
#include "model/tokenizer/tokenizer_json.h"
#include "nlohmann/json.hpp"
#include "tests/model/tokenizer_test_models.h"
#include "tests/support/test_data.h"

// What malformed and malicious tokenizers get for an answer.

namespace dovetail::model::test {
namespace {

using nlohmann::json;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

std::string Message(const absl::Status& status) { return std::string(status.message()); }

// What Create says about `data` after `spoil`.
std::string Refusal(TokenizerData data, const std::function<void(TokenizerData&)>& spoil) {
  spoil(data);
  const auto tokenizer = Tokenizer::Create(data);
  EXPECT_EQ(tokenizer.status().code(), absl::StatusCode::kInvalidArgument);
  return Message(tokenizer.status());
}

TEST(TokenizerCreate, RefusesVocabulariesThatDoNotFitTogether) {
  const TokenizerData spm = TinySpmData();
  const TokenizerData bytes = TinyByteLevelData();
  EXPECT_THAT(Refusal(spm, [](auto& d) { d.tokens[5] = "<0x-1>"; }),
              AllOf(HasSubstr("tokens[5]"), HasSubstr("<0x-1>")));
  EXPECT_THAT(Refusal(spm, [](auto& d) { d.tokens[5] = "<0x100>"; }), HasSubstr("<0x00>..<0xFF>"));
  EXPECT_THAT(Refusal(spm, [](auto& d) { d.tokens[13] = "<0x0b>"; }), HasSubstr("the same byte"));
  EXPECT_THAT(Refusal(spm, [](auto& d) { d.tokens[270] = d.tokens[260]; }), HasSubstr("twice"));
  EXPECT_THAT(Refusal(spm, [](auto& d) { d.tokens[270].clear(); }), HasSubstr("empty token"));
  EXPECT_THAT(Refusal(spm, [](auto& d) { d.tokens[270] = std::string(1 << 20, 'x'); }), HasSubstr("limit of 4096"));
  EXPECT_THAT(Refusal(spm, [](auto& d) { d.scores.pop_back(); }), HasSubstr("scores"));
  EXPECT_THAT(Refusal(spm, [](auto& d) { d.scores.clear(); }), HasSubstr("scores"));
  EXPECT_THAT(Refusal(spm, [](auto& d) { d.scores[7] = NAN; }), HasSubstr("scores[7]"));
  EXPECT_THAT(Refusal(spm, [](auto& d) { d.types.pop_back(); }), HasSubstr("token types"));
  EXPECT_THAT(Refusal(spm, [](auto& d) { d.types[9] = static_cast<TokenType>(77); }), HasSubstr("token types[9]: 77"));
  EXPECT_THAT(Refusal(spm, [](auto& d) { d.special.bos = -1; }), HasSubstr("bos token"));
  EXPECT_THAT(Refusal(spm, [](auto& d) { d.special.unk = 1 << 20; }), HasSubstr("unknown token"));
  EXPECT_THAT(Refusal(spm, [](auto& d) { d.prefix_ids = {99999}; }), HasSubstr("outside the vocabulary"));
  EXPECT_THAT(Refusal(spm, [](auto& d) { d.special.unk.reset(), d.types[100] = TokenType::kUnused; }),
              HasSubstr("byte 97"));
  EXPECT_THAT(Refusal(bytes, [](auto& d) { d.merges.push_back({'h', 99999}); }), HasSubstr("merges"));
  EXPECT_THAT(Refusal(bytes, [](auto& d) { d.merges.push_back({'x', 'y'}); }), HasSubstr("merges[5]"));
  EXPECT_THAT(Refusal(bytes, [](auto& d) { d.cut_rules.push_back({.id = -7}); }), HasSubstr("added token"));
  EXPECT_THAT(Refusal(bytes, [](auto& d) { d.tokens[261] = std::string(600, '<'); }), HasSubstr("limit of 512"));
  EXPECT_THAT(Refusal(bytes, [](auto& d) { d.pre_tokenizer = PreTokenizer::kNone; }), HasSubstr("pre-tokenizer"));
  EXPECT_THAT(Refusal(bytes, [](auto& d) { d.tokens.clear(), d.types.clear(); }), HasSubstr("empty"));
}

// GGUF fields of the tiny vocabularies.
GgufTokenizerFields Fields(const TokenizerData& data, const std::vector<std::string>& merges) {
  GgufTokenizerFields fields;
  fields.model = data.kind == TokenizerKind::kSpmBpe ? "llama" : "gpt2";
  fields.pre = "gpt-2";
  fields.tokens.assign(data.tokens.begin(), data.tokens.end());
  for (const TokenType type : data.types) fields.token_type.push_back(static_cast<int64_t>(type));
  fields.scores = data.scores;
  fields.merges.assign(merges.begin(), merges.end());
  if (data.special.bos) fields.bos_token_id = *data.special.bos;
  if (data.special.eos) fields.eos_token_id = *data.special.eos;
  if (data.special.unk) fields.unknown_token_id = *data.special.unk;
  return fields;
}

const std::vector<std::string> kTinyMerges = {"h e", "l l", "ll o", "he llo", "Ġ hello"};

TEST(TokenizerFromGguf, ReadsBothKinds) {
  const TokenizerData bytes = TinyByteLevelData();
  auto data = TokenizerDataFromGguf(Fields(bytes, kTinyMerges));
  ASSERT_TRUE(data.ok()) << data.status();
  EXPECT_TRUE(data->prefix_ids.empty());  // gpt-2 adds no bos unless told to
  EXPECT_THAT(*Make(*data)->Encode("hello hello"), ElementsAre(259, 260));
  const TokenizerData spm = TinySpmData();
  data = TokenizerDataFromGguf(Fields(spm, {}));
  ASSERT_TRUE(data.ok()) << data.status();
  EXPECT_THAT(*Make(*data)->Encode("hello"), ElementsAre(1, 290));
}

TEST(TokenizerFromGguf, AddsBosAndEosAsTheFlagsSay) {
  const TokenizerData source = TinySpmData();
  GgufTokenizerFields fields = Fields(source, {});
  fields.add_bos_token = false;
  fields.add_eos_token = true;
  fields.add_space_prefix = false;
  EXPECT_THAT(*Make(*TokenizerDataFromGguf(fields))->Encode("hello"), ElementsAre(289, 2));
}

TEST(TokenizerFromGguf, ATurnEndCalledNormalIsControlAllTheSame) {
  TokenizerData source = TinyByteLevelData();
  source.types[262] = TokenType::kNormal;
  const auto tokenizer = Make(*TokenizerDataFromGguf(Fields(source, kTinyMerges)));
  EXPECT_TRUE(tokenizer->IsSpecial(262));
}

std::string GgufRefusal(const TokenizerData& source, const std::function<void(GgufTokenizerFields&)>& spoil) {
  const std::vector<std::string> none;  // the fields are views
  GgufTokenizerFields fields = Fields(source, source.kind == TokenizerKind::kSpmBpe ? none : kTinyMerges);
  spoil(fields);
  const auto data = TokenizerDataFromGguf(fields);
  EXPECT_FALSE(data.ok());
  return Message(data.status());
}

TEST(TokenizerFromGguf, NamesTheKeyAtFault) {
  const TokenizerData spm = TinySpmData();
  const TokenizerData bytes = TinyByteLevelData();
  const std::string huge(1 << 20, 'x');
  EXPECT_THAT(GgufRefusal(spm, [](auto& f) { f.model = "t5"; }), HasSubstr("tokenizer.ggml.model: \"t5\""));
  EXPECT_THAT(GgufRefusal(spm, [](auto& f) { f.tokens.clear(); }), HasSubstr("tokenizer.ggml.tokens"));
  EXPECT_THAT(GgufRefusal(spm, [](auto& f) { f.scores.clear(); }),
              HasSubstr("tokenizer.ggml.scores: 0 entries for 291"));
  EXPECT_THAT(GgufRefusal(spm, [](auto& f) { f.token_type.clear(); }), HasSubstr("tokenizer.ggml.token_type"));
  EXPECT_THAT(GgufRefusal(spm, [](auto& f) { f.token_type[3] = -6; }), HasSubstr("token_type[3]: -6"));
  EXPECT_THAT(GgufRefusal(spm, [](auto& f) { f.bos_token_id = 291; }), HasSubstr("bos_token_id: 291 is outside"));
  EXPECT_THAT(GgufRefusal(spm, [](auto& f) { f.eos_token_id = -2; }), HasSubstr("eos_token_id: -2"));
  EXPECT_THAT(GgufRefusal(spm, [](auto& f) { f.bos_token_id.reset(); }), HasSubstr("bos_token_id: missing"));
  EXPECT_THAT(GgufRefusal(spm, [&](auto& f) { f.tokens[270] = huge; }), HasSubstr("tokens[270]: 1048576 bytes"));
  EXPECT_THAT(GgufRefusal(bytes, [](auto& f) { f.pre = "default"; }),
              AllOf(HasSubstr("tokenizer.ggml.pre"), HasSubstr("llama-bpe")));
  EXPECT_THAT(GgufRefusal(bytes, [](auto& f) { f.pre.reset(); }), HasSubstr("tokenizer.ggml.pre: missing"));
  EXPECT_THAT(GgufRefusal(bytes, [](auto& f) { f.merges.clear(); }), HasSubstr("tokenizer.ggml.merges"));
  EXPECT_THAT(GgufRefusal(bytes, [](auto& f) { f.merges[1] = "ll"; }), HasSubstr("merges[1]"));
  EXPECT_THAT(GgufRefusal(bytes, [](auto& f) { f.merges[1] = ""; }), HasSubstr("merges[1]"));
  EXPECT_THAT(GgufRefusal(bytes, [](auto& f) { f.merges[2] = "ll zz"; }),
              AllOf(HasSubstr("merges[2]"), HasSubstr("\"zz\"")));
}

json TalesJson() {
  return json::parse(dovetail::test::ReadFile(dovetail::test::ProjectData("tales_tokenizer/tokenizer.json")));
}

TEST(TokenizerFromJson, BothSpellingsOfMergesGiveTheSame) {
  json document = TalesJson();
  const auto pairs = TokenizerDataFromJson(document.dump());
  ASSERT_TRUE(pairs.ok()) << pairs.status();
  for (json& merge : document["model"]["merges"])
    merge = merge[0].get<std::string>() + " " + merge[1].get<std::string>();
  const auto spelled = TokenizerDataFromJson(document.dump());
  ASSERT_TRUE(spelled.ok()) << spelled.status();
  ASSERT_EQ(pairs->merges.size(), 3838u);
  EXPECT_TRUE(std::equal(pairs->merges.begin(), pairs->merges.end(), spelled->merges.begin(), spelled->merges.end(),
                         [](TokenMerge a, TokenMerge b) { return a.left == b.left && a.right == b.right; }));
}

TEST(TokenizerFromJson, TheConfigSaysWhichTokensHaveWhichRole) {
  const std::string document = TalesJson().dump();
  auto data = TokenizerDataFromJson(
      document, R"({"bos_token": {"content": "<|bos|>"}, "eos_token": "<|eos|>", "add_eos_token": true})");
  ASSERT_TRUE(data.ok()) << data.status();
  EXPECT_EQ(data->special.bos, 0);
  EXPECT_EQ(data->special.eos, 1);
  EXPECT_THAT(data->prefix_ids, ElementsAre());
  EXPECT_THAT(data->suffix_ids, ElementsAre(1));
  EXPECT_TRUE(TokenizerDataFromJson(document, R"({"bos_token": null, "add_bos_token": false})").ok());
  EXPECT_THAT(Message(TokenizerDataFromJson(document, R"({"add_bos_token": true})").status()),
              HasSubstr("tokenizer_config.json: add_bos_token"));
  EXPECT_THAT(Message(TokenizerDataFromJson(document, R"({"eos_token": "<|none|>"})").status()),
              HasSubstr("eos_token: \"<|none|>\" is not in"));
  EXPECT_THAT(Message(TokenizerDataFromJson(document, "[]").status()),
              HasSubstr("tokenizer_config.json: not a JSON object"));
}

TEST(TokenizerFromJson, AFalseFlagOverrulesTheTemplate) {
  json document = TalesJson();
  document["post_processor"] = json::parse(R"({"type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<|bos|>"}}, {"Sequence": {"id": "A"}}, {"SpecialToken": {"id": "<|eos|>"}}],
    "special_tokens": {"<|bos|>": {"ids": [0]}, "<|eos|>": {"ids": [1]}}})");
  auto data = TokenizerDataFromJson(document.dump());
  ASSERT_TRUE(data.ok()) << data.status();
  EXPECT_THAT(data->prefix_ids, ElementsAre(0));
  EXPECT_THAT(data->suffix_ids, ElementsAre(1));
  EXPECT_EQ(data->special.bos, 0);
  data = TokenizerDataFromJson(document.dump(), R"({"bos_token": "<|bos|>", "add_bos_token": false})");
  EXPECT_THAT(data->prefix_ids, ElementsAre());
}

// tokenizer.json of the Gemma kind: spaces replaced, then a split at spaces that never happens.
TEST(TokenizerFromJson, GemmasIdleSplitIsUnderstood) {
  const TokenizerData tiny = TinySpmData();
  json document = {
      {"normalizer", {{"type", "Replace"}, {"pattern", {{"String", " "}}}, {"content", "▁"}}},
      {"pre_tokenizer",
       {{"type", "Split"}, {"pattern", {{"String", " "}}}, {"behavior", "MergedWithPrevious"}, {"invert", false}}},
      {"decoder",
       {{"type", "Sequence"},
        {"decoders", json::array({{{"type", "Replace"}, {"pattern", {{"String", "▁"}}}, {"content", " "}},
                                  {{"type", "ByteFallback"}},
                                  {{"type", "Fuse"}}})}}},
      {"model",
       {{"type", "BPE"},
        {"byte_fallback", true},
        {"fuse_unk", true},
        {"unk_token", "<unk>"},
        {"merges", {"h e", "l l", "ll o", "he llo", "▁ hello"}},
        {"vocab", json::object()}}},
      {"added_tokens", json::array({{{"id", 1}, {"content", "<s>"}, {"special", true}}})}};
  for (size_t id = 0; id < tiny.tokens.size(); ++id) document["model"]["vocab"][tiny.tokens[id]] = id;
  const auto data = TokenizerDataFromJson(document.dump());
  ASSERT_TRUE(data.ok()) << data.status();
  const auto tokenizer = Make(*data);
  EXPECT_THAT(*tokenizer->Encode("hello hello"), ElementsAre(289, 290));
  EXPECT_EQ(tokenizer->Decode(std::vector<TokenId>{290, 290}, true), " hello hello");

  // Mistral's newer files: Metaspace, a space in front of the first text unless it has one.
  document["normalizer"] = nullptr;
  document["pre_tokenizer"] = {
      {"type", "Metaspace"}, {"replacement", "▁"}, {"prepend_scheme", "first"}, {"split", false}};
  const auto metaspace = Make(*TokenizerDataFromJson(document.dump()));
  const EncodeOptions options{.add_special = false, .parse_special = true};
  EXPECT_THAT(*metaspace->Encode("hello", options), ElementsAre(290));
  EXPECT_THAT(*metaspace->Encode(" hello", options), ElementsAre(290));
  EXPECT_THAT(*metaspace->Encode("<s>hello", options), ElementsAre(1, 289));
}

std::string JsonRefusal(const std::function<void(json&)>& spoil) {
  json document = TalesJson();
  spoil(document);
  const auto data = TokenizerDataFromJson(document.dump());
  if (!data.ok()) return Message(data.status());
  const auto tokenizer = Tokenizer::Create(*data);
  EXPECT_FALSE(tokenizer.ok());
  return Message(tokenizer.status());
}

TEST(TokenizerFromJson, NamesTheFieldAtFault) {
  EXPECT_THAT(JsonRefusal([](json& d) { d["model"]["type"] = "Unigram"; }),
              HasSubstr("tokenizer.json: model.type: \"Unigram\""));
  EXPECT_THAT(JsonRefusal([](json& d) { d.erase("model"); }), HasSubstr("model: missing"));
  EXPECT_THAT(JsonRefusal([](json& d) { d["model"]["vocab"] = nullptr; }), HasSubstr("model.vocab: not an object"));
  EXPECT_THAT(JsonRefusal([](json& d) { d["model"]["vocab"]["the"] = "7"; }), HasSubstr("\"the\" has no integer id"));
  EXPECT_THAT(JsonRefusal([](json& d) { d["model"]["vocab"]["the"] = json::array({1}); }),
              HasSubstr("\"the\" has no integer id"));
  EXPECT_THAT(JsonRefusal([](json& d) { d["model"]["vocab"]["zzz"] = -1; }), HasSubstr("id -1"));
  EXPECT_THAT(JsonRefusal([](json& d) { d["model"]["vocab"]["zzz"] = 1ll << 40; }), HasSubstr("id 1099511627776"));
  EXPECT_THAT(JsonRefusal([](json& d) { d["model"]["vocab"]["zzz"] = 5; }), HasSubstr("given to both"));
  EXPECT_THAT(JsonRefusal([](json& d) { d["model"]["vocab"][std::string(1 << 20, 'z')] = 4096; }),
              HasSubstr("limit of 4096"));
  EXPECT_THAT(JsonRefusal([](json& d) { d["model"]["merges"] = "a b"; }), HasSubstr("model.merges: not an array"));
  EXPECT_THAT(JsonRefusal([](json& d) { d["model"]["merges"][3] = 5; }), HasSubstr("model.merges: entry 3"));
  EXPECT_THAT(JsonRefusal([](json& d) { d["model"]["merges"][3] = json::array({"a"}); }),
              HasSubstr("entry 3 is not a pair"));
  EXPECT_THAT(JsonRefusal([](json& d) {
                d["model"]["merges"][3] = json::array({"a", json::array()});
              }),
              HasSubstr("entry 3"));
  EXPECT_THAT(JsonRefusal([](json& d) {
                d["model"]["merges"][3] = {"q", "zzz"};
              }),
              HasSubstr("model.merges[3]: token \"zzz\""));
  EXPECT_THAT(JsonRefusal([](json& d) { d["model"]["unk_token"] = "<none>"; }), HasSubstr("model.unk_token"));
  EXPECT_THAT(JsonRefusal([](json& d) { d["model"]["dropout"] = 0.1; }), HasSubstr("model.dropout"));
  EXPECT_THAT(JsonRefusal([](json& d) { d["model"]["end_of_word_suffix"] = "</w>"; }), HasSubstr("end_of_word_suffix"));
  EXPECT_THAT(JsonRefusal([](json& d) { d["added_tokens"][0]["id"] = 9; }), HasSubstr("given to both"));
  EXPECT_THAT(JsonRefusal([](json& d) { d["added_tokens"][0].erase("content"); }), HasSubstr("added_tokens[0]"));
  EXPECT_THAT(JsonRefusal([](json& d) {
                d["normalizer"] = {{"type", "Lowercase"}};
              }),
              HasSubstr("normalizer: Lowercase"));
  EXPECT_THAT(JsonRefusal([](json& d) {
                d["pre_tokenizer"] = {{"type", "Whitespace"}};
              }),
              HasSubstr("pre_tokenizer: Whitespace"));
  EXPECT_THAT(JsonRefusal([](json& d) { d["pre_tokenizer"]["add_prefix_space"] = true; }),
              HasSubstr("add_prefix_space"));
  EXPECT_THAT(JsonRefusal([](json& d) { d["decoder"] = {{"type", "CTC"}}; }), HasSubstr("decoder: CTC"));
  EXPECT_THAT(JsonRefusal([](json& d) {
                d["post_processor"] = {{"type", "RobertaProcessing"}};
              }),
              HasSubstr("post_processor: RobertaProcessing"));
}

// The expression is one that takes exponential time in a backtracking engine; it is compared, never run.
TEST(TokenizerFromJson, RefusesAnUnknownPatternWithoutRunningIt) {
  const std::string message = JsonRefusal([](json& d) {
    d["pre_tokenizer"] = {
        {"type", "Sequence"},
        {"pretokenizers",
         json::array(
             {{{"type", "Split"}, {"pattern", {{"Regex", "(a+)+$"}}}, {"behavior", "Isolated"}, {"invert", false}},
              {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}}})}};
  });
  EXPECT_THAT(message, AllOf(HasSubstr("\"(a+)+$\""), HasSubstr("llama3")));
}

TEST(TokenizerFromJson, RefusesWhatIsNotJsonOrTooDeep) {
  for (const std::string& text :
       {std::string(), std::string("{\"model\": "), std::string("\xFF\xFE"), std::string("[]"), std::string("7")}) {
    EXPECT_EQ(TokenizerDataFromJson(text).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
  EXPECT_THAT(Message(TokenizerDataFromJson(std::string(100000, '[') + std::string(100000, ']')).status()),
              HasSubstr("32 levels"));
  std::string open(2000000, '[');
  EXPECT_FALSE(TokenizerDataFromJson(open).ok());
}

TEST(TokenizerFromJson, AKeyThatComesTwiceIsFound) {
  std::string text = TalesJson().dump();
  const std::string key = "\"vocab\":{";
  text.insert(text.find(key) + key.size(), "\"!\":77,");
  const auto data = TokenizerDataFromJson(text);
  EXPECT_FALSE(data.ok());
}

TEST(TokenizerFromJson, EveryTruncationIsRefused) {
  const std::string text = TalesJson().dump();
  for (size_t size = 0; size < text.size(); size += 997)
    EXPECT_FALSE(TokenizerDataFromJson(text.substr(0, size)).ok()) << size;
}

}  // namespace
}  // namespace dovetail::model::test
