#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"
#include "nlohmann/json.hpp"

namespace dovetail::model {

// tokenizer.json with its two large tables taken out of the tree while parsing: a vocabulary of 256k tokens would
// otherwise need several hundred bytes an entry.
struct ParsedTokenizerJson {
  nlohmann::json rest;                                      // model.vocab and model.merges are empty in it
  std::vector<std::pair<std::string, int64_t>> vocabulary;  // in file order; a key that comes twice is here twice
  std::vector<std::pair<std::string, std::string>> merges;
};

// kInvalidArgument for what is not JSON, deeper than 32 levels, or not of the expected shape; `name` begins the
// messages.
// Threads: pure.
absl::StatusOr<ParsedTokenizerJson> ParseTokenizerJson(std::string_view name, std::string_view text);

// A whole small JSON document as a tree, with the same limit on depth.
absl::StatusOr<nlohmann::json> ParseConfigJson(std::string_view name, std::string_view text);

}  // namespace dovetail::model
