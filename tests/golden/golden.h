#pragma once
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "tests/golden/budgets.h"
#include "tests/golden/reference.h"

// One checkpoint with what transformers says of it: the "goldens" of models.md. Tests only; for one thread.

namespace dovetail::test {

struct Golden {
  std::filesystem::path folder;           // the checkpoint
  std::vector<TokenId> prompt, greedy;    // a long prompt, and the tokens that follow
  int short_len = 0;                      // the first tokens of the prompt that make the short one
  std::map<std::string, Matrix> tensors;  // golden.safetensors

  std::vector<TokenId> Tokens(size_t count) const;  // the prompt and what follows, cut to `count`
};

// Where `model` of `group` lies: in the project for kOurs, unpacked from goldens/goldens_GROUP.tar.gz (once a process)
// otherwise. Empty where that archive is missing: skip the test.
std::filesystem::path GoldenFolder(const std::string& group, const std::string& model);

// Fails the test if the files cannot be read.
Golden ReadGolden(const std::filesystem::path& folder);

}  // namespace dovetail::test
