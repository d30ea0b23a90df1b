#pragma once
#include <cstdlib>
#include <filesystem>
#include <vector>

#include "base/ids.h"
#include "nlohmann/json.hpp"
#include "tests/support/test_data.h"

// What tests of SmolLM2-135M-Instruct share: the file that the quickstart serves, and what transformers said.

namespace dovetail::test {

// Where scripts/fetch_model puts it.
inline std::filesystem::path FetchedSmolLm2() {
  const char* cache = std::getenv("XDG_CACHE_HOME");
  const char* home = std::getenv("HOME");
  const std::filesystem::path base = cache != nullptr && *cache != '\0'
                                         ? std::filesystem::path(cache)
                                         : std::filesystem::path(home == nullptr ? "" : home) / ".cache";
  return base / "dovetail" / "smollm2-135m-instruct.gguf";
}

struct SmolLm2Case {
  std::vector<TokenId> prompt, greedy;
  std::vector<double> margins;  // of each greedy token, in logits
};

inline std::vector<SmolLm2Case> ReadSmolLm2Cases(const std::filesystem::path& folder) {
  std::vector<SmolLm2Case> cases;
  for (const auto& json : nlohmann::json::parse(ReadFile(folder / "golden.json")))
    cases.push_back({json["prompt_ids"].get<std::vector<TokenId>>(), json["greedy_ids"].get<std::vector<TokenId>>(),
                     json["margins"].get<std::vector<double>>()});
  return cases;
}

}  // namespace dovetail::test
