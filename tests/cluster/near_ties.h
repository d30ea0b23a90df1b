#pragma once
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "tests/cluster/test_engine.h"

namespace dovetail::test {

// Several times the error of a GPU's logit, over the logits' root mean square.
inline constexpr double kNearTie = 0.15;

// `reference` gives each token the highest logit after the tokens before it, or one that is lower by kNearTie at most.
inline void ExpectChoicesOf(engine::Engine& reference, std::vector<TokenId> prompt,
                            const std::vector<TokenId>& tokens) {
  prompt.insert(prompt.end(), tokens.begin(), tokens.end() - 1);
  requests::GenerationRequest request = GreedyRequest(prompt, 1);
  request.logits_last = static_cast<int>(tokens.size());
  const auto theirs = Generate(reference, request);
  ASSERT_TRUE(theirs.ok()) << theirs.status();
  const std::vector<float>& logits = (*theirs)->prompt_logits();
  const size_t vocab = logits.size() / tokens.size();
  for (size_t i = 0; i < tokens.size(); ++i) {
    const auto row = logits.begin() + static_cast<std::ptrdiff_t>(i * vocab);
    double squares = 0;
    for (size_t v = 0; v < vocab; ++v) squares += double{row[v]} * row[v];
    const double rms = std::sqrt(squares / static_cast<double>(vocab));
    EXPECT_GE(row[tokens[i]], *std::max_element(row, row + static_cast<std::ptrdiff_t>(vocab)) - kNearTie * rms) << i;
  }
}

}  // namespace dovetail::test
