#include "tests/golden/golden.h"

#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "tests/support/test_data.h"

namespace dovetail::test {
namespace fs = std::filesystem;

std::vector<TokenId> Golden::Tokens(size_t count) const {
  std::vector<TokenId> tokens = prompt;
  tokens.insert(tokens.end(), greedy.begin(), greedy.end());
  tokens.resize(count);
  return tokens;
}

fs::path GoldenFolder(const std::string& group, const std::string& model) {
  if (group == kOurs) return ProjectData(absl::StrCat("goldens/", model));
  static std::map<std::string, fs::path> unpacked;
  auto found = unpacked.find(group);
  if (found == unpacked.end()) {
    const auto archive = TestData(absl::StrCat("goldens/goldens_", group, ".tar.gz"));
    if (!archive) return {};
    found = unpacked.emplace(group, Unpack(*archive) / group).first;
  }
  return found->second / model;
}

Golden ReadGolden(const fs::path& folder) {
  Golden golden{.folder = folder, .prompt = {}, .greedy = {}, .short_len = 0, .tensors = {}};
  const auto json = nlohmann::json::parse(ReadFile(folder / "golden.json"));
  golden.prompt = json["prompt_ids"].get<std::vector<TokenId>>();
  golden.greedy = json["greedy_ids"].get<std::vector<TokenId>>();
  golden.short_len = json["short_len"];
  auto tensors = ReadSafetensors(folder / "golden.safetensors");
  EXPECT_TRUE(tensors.ok()) << tensors.status();
  if (tensors.ok()) golden.tensors = *std::move(tensors);
  return golden;
}

}  // namespace dovetail::test
