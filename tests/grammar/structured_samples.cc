// Texts under JSON schemas. Reads lines {"schema": ..., "seed": N}; writes for each a line {"error": "..."} or
// {"texts": [...], "complete": [...], "cut": [...], "ended": [...], "ms": N}. Every token that the mask leaves is as
// likely as any other, which is wilder than any temperature; after kLongest tokens a text ends where it is. Each text
// is cut at a random token ("cut"), and goes on from there, by another matcher, to its end ("ended"; null: not within
// kLongest tokens more).
#include <chrono>
#include <iostream>
#include <random>
#include <string>

#include "grammar/grammar_engine.h"
#include "server/openai/json.h"
#include "server/openai/json_schema.h"

namespace {

using namespace dovetail;
using server::Json;

constexpr int kTexts = 4;
constexpr int kLongest = 400;
constexpr TokenId kEnd = 0;

// Bytes, and pieces of several characters, some of which reach from one part of a JSON text into the next.
std::vector<std::string> Tokens() {
  std::vector<std::string> tokens = {""};
  for (int byte = 0; byte < 256; ++byte) tokens.emplace_back(1, static_cast<char>(byte));
  for (const char* piece :
       {"{\"",   "\":", "\",",  "\", \"",   "\"}",      "}}",  "[[", "]]", "],",   "true", "false", "null",    "\\u",
        "\\ud8", "\\n", "00",   "12",       "-1",       "0.5", "e+", "e9", " ",    "  ",   "\n\n",  "\r\n",    "\t",
        "abc",   "é",   "日本", "\xf0\x9f", "\x98\x80", "a\"", "1,", "1}", "\"\"", "[]",   "{}",    "\x00\x01"})
    tokens.emplace_back(piece);
  return tokens;
}

enum class Taste { kAny, kClosing };  // half of the choices close what is open, so that most texts end; or all

TokenId Draw(const std::vector<uint32_t>& mask, const std::vector<std::string>& tokens, Taste taste,
             std::mt19937_64& random) {
  std::vector<TokenId> all, closing;
  for (TokenId id = 0; id < static_cast<TokenId>(tokens.size()); ++id) {
    if ((mask[id / 32] >> (id % 32) & 1) == 0) continue;
    all.push_back(id);
    if (id == kEnd || (!tokens[id].empty() && std::string("\"}],:").find(tokens[id][0]) != std::string::npos))
      closing.push_back(id);
  }
  const bool closes = !closing.empty() && (taste == Taste::kClosing || random() % 2 == 0);
  const auto& from = closes ? closing : all;
  return from.empty() ? -1 : from[random() % from.size()];
}

std::string Hex(const std::string& text) {
  std::string hex;
  for (const char c : text) {
    hex += "0123456789abcdef"[static_cast<uint8_t>(c) >> 4];
    hex += "0123456789abcdef"[static_cast<uint8_t>(c) & 15];
  }
  return hex;
}

// A text as it grows under a grammar.
struct Text {
  Text(std::shared_ptr<const grammar::Compiled> grammar, const std::vector<std::string>& all)
      : matcher(std::move(grammar), std::vector<TokenId>{kEnd}), tokens(all) {}

  std::string Take(TokenId token) {
    if (!matcher.Accept(token)) return "a token of the mask is refused after: " + text;
    text += tokens[token];
    taken.push_back(token);
    return "";
  }
  // At most kLongest more; returns what is wrong.
  std::string Grow(Taste taste, std::mt19937_64& random) {
    std::vector<uint32_t> mask((tokens.size() + 31) / 32);
    for (int n = 0; n < kLongest && !matcher.ended(); ++n) {
      if (const absl::Status filled = matcher.FillMask(mask); !filled.ok()) return std::string(filled.message());
      const TokenId token = Draw(mask, tokens, taste, random);
      if (token < 0) return "dead end after: " + text;
      if (std::string wrong = Take(token); !wrong.empty()) return wrong;
    }
    return "";
  }

  grammar::Matcher matcher;
  const std::vector<std::string>& tokens;
  std::string text;
  std::vector<TokenId> taken;
};

Json SamplesOf(const Json& line, grammar::GrammarEngine& engine, const std::vector<std::string>& tokens) {
  const auto begin = std::chrono::steady_clock::now();
  const auto schema = server::EnforceableSchema(line["schema"], "schema");
  if (!schema.ok()) return {{"error", std::string(schema.status().message())}};
  const auto grammar = engine.Compile(grammar::SourceOf(grammar::Kind::kJsonSchema, server::Dump(*schema)));
  if (!grammar.ok()) return {{"error", "compiling: " + std::string(grammar.status().message())}};
  Json out;
  out["ms"] = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
  std::mt19937_64 random(line["seed"].get<uint64_t>());
  for (int i = 0; i < kTexts; ++i) {
    Text text(*grammar, tokens), again(*grammar, tokens);
    std::string wrong = text.Grow(Taste::kAny, random);
    const size_t cut = random() % (text.taken.size() + 1);
    for (size_t n = 0; n < cut && wrong.empty() && text.taken[n] != kEnd; ++n) wrong = again.Take(text.taken[n]);
    const std::string beginning = again.text;
    if (wrong.empty()) wrong = again.Grow(Taste::kClosing, random);
    if (!wrong.empty()) return {{"error", wrong}};
    out["texts"].push_back(Hex(text.text));
    out["complete"].push_back(text.matcher.ended());
    out["cut"].push_back(Hex(beginning));
    out["ended"].push_back(again.matcher.ended() ? Json(Hex(again.text)) : Json());
  }
  return out;
}

}  // namespace

int main() {
  const std::vector<std::string> tokens = Tokens();
  grammar::GrammarEngine engine([&]() -> absl::StatusOr<std::vector<std::string>> { return tokens; },
                                static_cast<int>(tokens.size()));
  for (std::string line; std::getline(std::cin, line);)
    std::cout << server::Dump(SamplesOf(Json::parse(line), engine, tokens)) << std::endl;
}
