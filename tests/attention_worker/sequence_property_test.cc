#include <gtest/gtest.h>

#include <cstdlib>
#include <random>

#include "tests/attention_worker/sequence_fixture.h"
#include "tests/attention_worker/sequence_model.h"

#ifndef DOVETAIL_SEED_COUNT
#define DOVETAIL_SEED_COUNT 200
#endif

namespace dovetail::attention::testing {
namespace {

// DOVETAIL_SEED=n runs that seed alone.
TEST(SequenceTableProperty, RandomOperationsKeepEveryTokenReadableAndEveryBlockAccountedFor) {
  const char* given = std::getenv("DOVETAIL_SEED");
  const uint64_t first = given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device{}();
  const int seeds = given != nullptr ? 1 : DOVETAIL_SEED_COUNT;
  for (int i = 0; i < seeds; ++i) {
    const uint64_t seed = first + static_cast<uint64_t>(i);
    // Small pools are full and evict all the time; large ones hit.
    ModelledTable table(MixedTable(), seed % 3 == 0 ? 30 : seed % 3 == 1 ? 90 : 400, seed);
    for (int step = 0; step < 300; ++step) {
      table.RandomOperation();
      ASSERT_FALSE(::testing::Test::HasFailure())
          << "DOVETAIL_SEED=" << seed << ", operation " << step << ": " << table.history();
    }
    table.ReleaseAll();
    ASSERT_FALSE(::testing::Test::HasFailure()) << "DOVETAIL_SEED=" << seed << ", at the end";
  }
}

}  // namespace
}  // namespace dovetail::attention::testing
