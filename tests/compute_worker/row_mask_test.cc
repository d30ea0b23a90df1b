#include "compute_worker/cpu/row_mask.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

namespace dovetail::compute {
namespace {

TEST(MaskRow, SetsWhatMayNotFollowAndNothingElse) {
  std::mt19937 random(7);
  for (const size_t vocab : {1u, 31u, 32u, 33u, 64u, 1000u}) {
    for (int kind = 0; kind < 3; ++kind) {  // words of both kinds of bits, of ones, of zeroes
      std::vector<uint32_t> mask((vocab + 31) / 32);
      for (uint32_t& word : mask) {
        const uint32_t choice = random() % 3;
        word = kind == 1 ? ~0u : kind == 2 ? 0u : choice == 0 ? 0u : choice == 1 ? ~0u : random();
      }
      std::vector<float> logits(vocab + 1);
      for (size_t i = 0; i <= vocab; ++i) logits[i] = static_cast<float>(i) - 3;
      MaskRow(mask, {logits.data(), vocab});
      for (size_t i = 0; i < vocab; ++i) {
        if (mask[i / 32] >> (i % 32) & 1)
          EXPECT_EQ(logits[i], static_cast<float>(i) - 3) << vocab;
        else
          EXPECT_TRUE(std::isinf(logits[i]) && logits[i] < 0) << vocab << ' ' << i;
      }
      EXPECT_EQ(logits[vocab], static_cast<float>(vocab) - 3);  // behind the row
    }
  }
}

}  // namespace
}  // namespace dovetail::compute
