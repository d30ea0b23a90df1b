#include "examples/spatio_temporal/gpu/padded_rows.h"

#include <cstdlib>
#include <cstring>
#include <random>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dovetail::spatio_temporal {
namespace {

using ::testing::HasSubstr;

constexpr std::byte kGap{0xee};

// A part of a tensor of `heads` heads, 16 bytes of each row's head's 48 being a gap, with as much again behind a row.
struct Part {
  std::vector<std::byte> memory;
  PaddedRows rows;
  Part(int64_t count, int64_t heads) : memory(count * 2 * heads * 48, kGap) {
    rows = {memory.data(), heads * 32, 2 * heads * 48, 32, 48};
  }
  std::byte& At(int64_t dense) {
    const int64_t row = dense / rows.row_bytes, in_row = dense % rows.row_bytes;
    return memory[row * rows.row_step + in_row / 32 * 48 + in_row % 32];
  }
};

void Do(const kernels::cuda::CopyRunsLaunch& copy) {
  for (int row = 0; row < copy.rows; ++row)
    for (int run = 0; run < copy.runs; ++run)
      std::memcpy(static_cast<std::byte*>(copy.to) + row * copy.to_row_step + run * copy.to_run_step,
                  static_cast<const std::byte*>(copy.from) + row * copy.from_row_step + run * copy.from_run_step,
                  copy.run_bytes);
}

int64_t PartHeads(const proto::Layout& layout, int rank) {
  return layout.axis() == 2 ? layout.range(rank).size() : layout.shape().axes[2].size;
}
int64_t PartRows(const proto::Layout& layout, int rank) {
  return layout.PartBytes(rank) / 32 / PartHeads(layout, rank);
}

// All transfers of a switch in pieces of frames: what was at a place of the tensor before is there after, once, and
// gaps are as they were.
void CheckSwitch(const proto::Layout& from, const proto::Layout& to, const proto::Layout& frames,
                 std::mt19937& random) {
  const auto plan = proto::Switch::Between(from, to);
  ASSERT_TRUE(plan.ok());
  std::vector<Part> before, after;
  std::vector<std::vector<std::byte>> expected;
  for (int rank = 0; rank < from.ranks(); ++rank) {
    before.emplace_back(PartRows(from, rank), PartHeads(from, rank));
    for (int64_t i = 0; i < from.PartBytes(rank); ++i) before[rank].At(i) = static_cast<std::byte>(random());
    after.emplace_back(PartRows(to, rank), PartHeads(to, rank));
  }
  std::vector<Part> naive = after;
  for (size_t i = 0; i < naive.size(); ++i) naive[i].rows.data = naive[i].memory.data();
  for (size_t i = 0; i < after.size(); ++i) after[i].rows.data = after[i].memory.data();
  for (size_t i = 0; i < before.size(); ++i) before[i].rows.data = before[i].memory.data();
  int64_t moved = 0;
  const auto check = [&](const proto::Transfer& transfer) {
    for (int64_t i = 0; i < transfer.bytes(); ++i) {
      const auto at = [i](const proto::Region& r) { return r.offset + i / r.run_bytes * r.step + i % r.run_bytes; };
      naive[transfer.destination].At(at(transfer.to)) = before[transfer.source].At(at(transfer.from));
    }
    const bool there = frames == from;
    const int64_t count = frames.range(there ? transfer.source : transfer.destination).size();
    for (int64_t begin = 0; begin < count;) {
      const int64_t end = std::min<int64_t>(count, begin + 1 + random() % 3);
      const auto some = FramesOf(transfer, count, begin, end);
      ASSERT_TRUE(some.ok()) << some.status();
      const auto copies = CopiesOf(*some, before[transfer.source].rows, after[transfer.destination].rows);
      ASSERT_TRUE(copies.ok()) << copies.status();
      for (const auto& copy : *copies) {
        Do(copy);
        moved += BytesOf(copy);
      }
      begin = end;
    }
  };
  for (int rank = 0; rank < from.ranks(); ++rank) {
    for (const proto::Transfer& transfer : plan->SentBy(rank)) check(transfer);
    if (plan->KeptBy(rank) != nullptr) check(*plan->KeptBy(rank));
  }
  EXPECT_EQ(moved, from.shape().Bytes());
  for (size_t i = 0; i < after.size(); ++i) EXPECT_EQ(after[i].memory, naive[i].memory) << "rank " << i;
}

TEST(PaddedRows, SwitchesMoveEveryByteOnceAndLeaveGapsAlone) {
  const char* const given = std::getenv("DOVETAIL_SEED");
  const unsigned seed = given != nullptr ? static_cast<unsigned>(std::strtoul(given, nullptr, 10)) : 1;
  std::mt19937 random(seed);
  for (int round = 0; round < 60; ++round) {
    proto::TensorShape shape;
    const int64_t t = 2 + random() % 7, s = 2 + random() % 9, heads = 2 + random() % 5;
    shape.axes = {{"T", t}, {"S", s}, {"heads", heads}, {"dim", 16}};
    shape.element_bytes = 2;
    for (const char* axis : {"S", "heads"}) {
      const int64_t most = std::min({t, axis[0] == 'S' ? s : heads, int64_t{4}});
      const int ranks = 2 + static_cast<int>(random() % (most - 1));
      SCOPED_TRACE(absl::StrCat("DOVETAIL_SEED=", seed, " round ", round, " ", shape.DebugString(), " by ", axis));
      const auto frames = proto::Layout::Even(shape, "T", ranks), other = proto::Layout::Even(shape, axis, ranks);
      ASSERT_TRUE(frames.ok() && other.ok());
      CheckSwitch(*frames, *other, *frames, random);
      CheckSwitch(*other, *frames, *frames, random);
    }
  }
}

TEST(PaddedRows, WithoutGapsARunOfRowsIsOneCopy) {
  std::vector<std::byte> a(6400), b(6400);
  const PaddedRows from{a.data(), 64, 64, 64, 64}, to{b.data(), 64, 64, 64, 64};
  proto::Transfer transfer;
  transfer.from = {128, 3, 640, 1280};
  transfer.to = {0, 1, 1920, 0};
  const auto copies = CopiesOf(transfer, from, to);
  ASSERT_TRUE(copies.ok()) << copies.status();
  ASSERT_EQ(copies->size(), 3u);
  EXPECT_TRUE(IsContiguous((*copies)[1]));
  EXPECT_EQ(BytesOf((*copies)[1]), 640);
  EXPECT_EQ((*copies)[1].from, a.data() + 128 + 1280);
  EXPECT_EQ((*copies)[1].to, b.data() + 640);
}

TEST(PaddedRows, SaysWhatIsNotMadeOfRows) {
  std::vector<std::byte> a(6400);
  const PaddedRows rows{a.data(), 64, 64, 64, 64}, halves{a.data(), 64, 96, 32, 48};
  proto::Transfer transfer;
  transfer.from = transfer.to = {0, 1, 96, 0};
  EXPECT_THAT(std::string(CopiesOf(transfer, rows, rows).status().message()), HasSubstr("96 bytes from 0 on"));
  transfer.from = transfer.to = {0, 1, 128, 0};
  EXPECT_THAT(std::string(CopiesOf(transfer, rows, halves).status().message()), HasSubstr("2 rows of 1 runs of 64"));
  EXPECT_THAT(std::string(FramesOf(transfer, 3, 0, 1).status().message()), HasSubstr("3 equal shares"));
  EXPECT_THAT(std::string(FramesOf(transfer, 2, 1, 3).status().message()), HasSubstr("frames 1..3 of 2"));
}

}  // namespace
}  // namespace dovetail::spatio_temporal
