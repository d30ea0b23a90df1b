#include "compute_worker/cuda/launch_list.h"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <set>

#include "kernels/cuda/runtime/record_words.h"
#include "tests/compute_worker/launch_fixture.h"

namespace dovetail::compute {
namespace {

using testing::DenseLayer;

std::vector<uint64_t> KeyOf(const LaunchRecord& record) {
  std::vector<uint64_t> key;
  AppendKey(record, key);
  return key;
}

template <size_t kind = 0, typename Visit>
void ForEachKind(const Visit& visit) {
  if constexpr (kind < std::variant_size_v<LaunchRecord>) {
    visit(std::variant_alternative_t<kind, LaunchRecord>{});
    ForEachKind<kind + 1>(visit);
  }
}

// Every byte belongs to a field: PlainRecord has no padding. So no field can be left out of a key.
TEST(LaunchKey, DiffersWheneverAnyFieldOfARecordDoes) {
  ForEachKind([](const auto& record) {
    using Record = std::decay_t<decltype(record)>;
    static_assert(kernels::cuda::PlainRecord<Record>);
    const std::vector<uint64_t> key = KeyOf(record);
    EXPECT_EQ(KeyOf(Record(record)), key);
    for (size_t byte = 0; byte < sizeof(Record); ++byte) {
      std::array<std::byte, sizeof(Record)> bytes;
      std::memcpy(bytes.data(), &record, sizeof(Record));
      bytes[byte] ^= std::byte{1};
      EXPECT_NE(KeyOf(std::bit_cast<Record>(bytes)), key) << testing::NameOf(record) << ", byte " << byte;
    }
  });
}

// Several kinds are of one size.
TEST(LaunchKey, DiffersBetweenKindsOfTheSameBytes) {
  std::set<std::vector<uint64_t>> keys;
  ForEachKind([&](const auto& record) {
    using Record = std::decay_t<decltype(record)>;
    keys.insert(KeyOf(std::bit_cast<Record>(std::array<std::byte, sizeof(Record)>{})));
  });
  EXPECT_EQ(keys.size(), std::variant_size_v<LaunchRecord>);
}

TEST(LaunchKey, TellsFloatsByTheirBits) {
  NormRecord norm;
  norm.eps = 1e-5f;
  const std::vector<uint64_t> key = KeyOf(norm);
  norm.eps = std::nextafter(1e-5f, 1.0f);
  EXPECT_NE(KeyOf(norm), key);
  norm.eps = 1e-5f;
  EXPECT_EQ(KeyOf(norm), key);
}

TEST(LaunchProgram, GivesTheLaunchesAndTheKeyOfEachStep) {
  const auto list = DenseLayer().Lowered();
  ASSERT_TRUE(list.ok()) << list.status();
  const LaunchProgram program(*list, 6);
  size_t launches = 0;
  for (size_t step = 0; step < 6; ++step) {
    std::vector<uint64_t> key;
    for (const Launch& launch : program.StepLaunches(step)) {
      EXPECT_EQ(launch.step, static_cast<int>(step));
      AppendKey(launch.record, key);
    }
    EXPECT_TRUE(std::equal(key.begin(), key.end(), program.StepKey(step).begin(), program.StepKey(step).end()));
    launches += program.StepLaunches(step).size();
  }
  EXPECT_EQ(launches, list->size());
  EXPECT_TRUE(program.StepLaunches(2).empty()) << "k and v come with q";
  EXPECT_TRUE(program.StepLaunches(3).empty()) << "attention is elsewhere";
}

TEST(Places, BeginWhereTheRowsBeforeEnd) {
  EXPECT_EQ(ByteOf({.tensor = Tensor::kX}, 7), 0);
  EXPECT_EQ(ByteOf({.tensor = Tensor::kX, .at = 6}, 7), 6);
  EXPECT_EQ(ByteOf({.tensor = Tensor::kX, .at = 6, .row = 10}, 7), 76);
  EXPECT_EQ(ByteOf({.tensor = Tensor::kX, .align = 4, .row = 10}, 7), 72);
}

}  // namespace
}  // namespace dovetail::compute
