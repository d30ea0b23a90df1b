#include "proto/token_layout.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <utility>

#include "absl/strings/str_join.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dovetail::proto {
namespace {

using ::testing::HasSubstr;
using Bytes = std::vector<uint8_t>;

TensorShape Shape(std::vector<Axis> axes, int64_t element_bytes = 2) {
  TensorShape shape;
  shape.axes.assign(axes.begin(), axes.end());
  shape.element_bytes = element_bytes;
  return shape;
}

TensorShape SpatioTemporal(int64_t t, int64_t s, int64_t c) { return Shape({{"T", t}, {"S", s}, {"C", c}}); }

Layout Even(const TensorShape& shape, std::string_view axis, int ranks, const Layout::EvenCut& cut = {}) {
  auto layout = Layout::Even(shape, axis, ranks, cut);
  EXPECT_TRUE(layout.ok()) << layout.status();
  return *std::move(layout);
}

Switch Between(const Layout& from, const Layout& to) {
  auto result = Switch::Between(from, to);
  EXPECT_TRUE(result.ok()) << result.status();
  return *std::move(result);
}

// The bytes that a rank holds of a tensor, element by element: what a Region's runs are compared with.
Bytes PartOf(const Bytes& tensor, const Layout& layout, int rank) {
  const TensorShape& shape = layout.shape();
  Bytes part;
  if (layout.range(rank).empty()) return part;
  const int64_t elements = shape.Bytes() / shape.element_bytes;
  for (int64_t element = 0; element < elements; ++element) {
    int64_t rest = element, at = 0;
    for (int axis = static_cast<int>(shape.axes.size()) - 1; axis >= 0; --axis) {
      if (axis == layout.axis()) at = rest % shape.axes[axis].size;
      rest /= shape.axes[axis].size;
    }
    if (layout.axis() >= 0 && (at < layout.range(rank).begin || at >= layout.range(rank).end)) continue;
    const auto begin = tensor.begin() + element * shape.element_bytes;
    part.insert(part.end(), begin, begin + shape.element_bytes);
  }
  return part;
}

std::vector<Bytes> PartsOf(const Bytes& tensor, const Layout& layout) {
  std::vector<Bytes> parts;
  for (int rank = 0; rank < layout.ranks(); ++rank) parts.push_back(PartOf(tensor, layout, rank));
  return parts;
}

// Where each byte of a region lies.
std::vector<int64_t> PlacesOf(const Region& region) {
  std::vector<int64_t> places;
  for (int64_t run = 0; run < region.runs; ++run)
    for (int64_t byte = 0; byte < region.run_bytes; ++byte) places.push_back(region.offset + run * region.step + byte);
  return places;
}

// Does what the transfers say; every byte of the destinations must be written once.
std::vector<Bytes> Perform(const Switch& change, const std::vector<Bytes>& before) {
  if (change.identity()) return before;
  std::vector<Bytes> after, writes;
  for (int rank = 0; rank < change.ranks(); ++rank) {
    after.emplace_back(change.to().PartBytes(rank), 0xEE);
    writes.emplace_back(change.to().PartBytes(rank), 0);
  }
  const auto move = [&](const Transfer& transfer) {
    const std::vector<int64_t> from = PlacesOf(transfer.from), to = PlacesOf(transfer.to);
    ASSERT_EQ(from.size(), to.size());
    for (size_t i = 0; i < from.size(); ++i) {
      after[transfer.destination].at(to[i]) = before[transfer.source].at(from[i]);
      ++writes[transfer.destination][to[i]];
    }
  };
  for (int rank = 0; rank < change.ranks(); ++rank) {
    if (const Transfer* kept = change.KeptBy(rank)) {
      EXPECT_EQ(kept->source, rank);
      EXPECT_EQ(kept->destination, rank);
      move(*kept);
    }
    for (const Transfer& transfer : change.ReceivedBy(rank)) {
      EXPECT_EQ(transfer.destination, rank);
      EXPECT_NE(transfer.source, rank);
      move(transfer);
    }
  }
  for (const Bytes& counts : writes)
    EXPECT_TRUE(std::all_of(counts.begin(), counts.end(), [](uint8_t count) { return count == 1; }))
        << "a byte is written by no transfer, or by several";
  return after;
}

Bytes RandomTensor(const TensorShape& shape, std::mt19937_64& random) {
  Bytes tensor(shape.Bytes());
  for (uint8_t& byte : tensor) byte = static_cast<uint8_t>(random());
  return tensor;
}

int64_t Below(std::mt19937_64& random, int64_t limit) { return static_cast<int64_t>(random() % limit); }

// Even or uneven, with replicas and with ranks that hold nothing, in any order of ranks.
Layout RandomLayout(const TensorShape& shape, int ranks, std::mt19937_64& random) {
  const Axis& axis = shape.axes[Below(random, shape.axes.size())];
  if (random() % 6 == 0) return *Layout::Replicated(shape, ranks);
  if (random() % 3 == 0)
    return Even(shape, axis.name, ranks,
                {1 + Below(random, 4), random() % 2 == 0 ? FewPieces::kReplicate : FewPieces::kLeaveEmpty});
  const int64_t groups = 1 + Below(random, std::min<int64_t>(ranks, axis.size));
  std::vector<int64_t> bounds{0, axis.size};
  while (static_cast<int64_t>(bounds.size()) <= groups) {
    const int64_t bound = 1 + Below(random, axis.size);
    if (std::find(bounds.begin(), bounds.end(), bound) == bounds.end()) bounds.push_back(bound);
    if (static_cast<int64_t>(bounds.size()) > axis.size) break;
  }
  std::sort(bounds.begin(), bounds.end());
  std::vector<AxisRange> ranges;
  for (size_t i = 0; i + 1 < bounds.size(); ++i) ranges.push_back({bounds[i], bounds[i + 1]});
  const size_t distinct = ranges.size();
  while (static_cast<int>(ranges.size()) < ranks)
    ranges.push_back(random() % 2 == 0 ? AxisRange{} : ranges[random() % distinct]);
  std::shuffle(ranges.begin(), ranges.end(), random);
  auto layout = Layout::Of(shape, axis.name, ranges);
  EXPECT_TRUE(layout.ok()) << layout.status();
  return *std::move(layout);
}

uint64_t Seed() {
  if (const char* seed = std::getenv("DOVETAIL_SEED")) return std::strtoull(seed, nullptr, 10);
  return std::random_device{}();
}

TEST(Switch, OfAnyLayoutIntoAnyOtherMovesEveryByteOnceAndBackAgain) {
  const uint64_t seed = Seed();
  std::mt19937_64 random(seed);
  for (int round = 0; round < 600; ++round) {
    TensorShape shape;
    shape.element_bytes = 1 + Below(random, 4);
    const char* names[] = {"A", "B", "C", "D"};
    for (int64_t axis = 0, axes = 1 + Below(random, 4); axis < axes; ++axis)
      shape.axes.push_back({names[axis], 1 + Below(random, 9)});
    const int ranks = 1 + static_cast<int>(Below(random, 7));
    const Layout from = RandomLayout(shape, ranks, random), to = RandomLayout(shape, ranks, random);
    SCOPED_TRACE(absl::StrCat("DOVETAIL_SEED=", seed, " round ", round, " ", shape.DebugString(), " from ",
                              from.DebugString(), " to ", to.DebugString()));
    const Bytes tensor = RandomTensor(shape, random);
    const std::vector<Bytes> before = PartsOf(tensor, from), after = PartsOf(tensor, to);
    const Switch there = Between(from, to), back = Between(to, from);
    ASSERT_EQ(Perform(there, before), after);
    ASSERT_EQ(Perform(back, after), before);
    int64_t sent = 0, received = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      ASSERT_EQ(static_cast<int64_t>(before[rank].size()), from.PartBytes(rank));
      ASSERT_EQ(there.bytes_received(rank) + there.bytes_kept(rank), to.PartBytes(rank));
      for (const Transfer& transfer : there.SentBy(rank)) ASSERT_EQ(transfer.source, rank);
      sent += there.bytes_sent(rank);
      received += there.bytes_received(rank);
    }
    ASSERT_EQ(sent, there.bytes());
    ASSERT_EQ(received, there.bytes());
    ASSERT_EQ(there.identity(), from == to);
    if (HasFailure()) return;
  }
}

TEST(Switch, OfAnEvenCutMovesFMOverPByARankAndAGatherFM) {
  for (const int p : {1, 2, 4, 8}) {
    const TensorShape shape = SpatioTemporal(16, 24, 6);
    const int64_t m = shape.Bytes();
    const Layout by_time = Even(shape, "T", p), by_space = Even(shape, "S", p);
    const Layout all = *Layout::Replicated(shape, p);
    const Switch change = Between(by_time, by_space), gather = Between(by_time, all), split = Between(all, by_space);
    for (int rank = 0; rank < p; ++rank) {
      EXPECT_EQ(change.bytes_sent(rank), (p - 1) * m / p / p);
      EXPECT_EQ(change.bytes_received(rank), (p - 1) * m / p / p);
      EXPECT_EQ(change.bytes_kept(rank), m / p / p);
      EXPECT_EQ(gather.bytes_received(rank), (p - 1) * m / p);
      EXPECT_EQ(gather.bytes_sent(rank), (p - 1) * m / p);
      EXPECT_EQ(split.bytes_sent(rank) + split.bytes_received(rank), 0);
      EXPECT_EQ(split.bytes_kept(rank), m / p);
    }
    EXPECT_EQ(change.bytes(), (p - 1) * m / p);
    EXPECT_EQ(split.bytes(), 0);
  }
}

TEST(Switch, FromTimeToSpaceSendsStridedRowsThatArriveAsOneRun) {
  const TensorShape shape = SpatioTemporal(4, 6, 5);  // elements of 2 bytes: rows of 10
  const Switch change = Between(Even(shape, "T", 2), Even(shape, "S", 2));
  ASSERT_EQ(change.SentBy(0).size(), 1u);
  const Transfer& sent = change.SentBy(0)[0];
  EXPECT_EQ(sent.destination, 1);
  EXPECT_EQ(sent.from, (Region{/*offset=*/3 * 10, /*runs=*/2, /*run_bytes=*/3 * 10, /*step=*/6 * 10}));
  EXPECT_EQ(sent.to, (Region{0, 1, 2 * 3 * 10, 0}));
  ASSERT_NE(change.KeptBy(1), nullptr);
  EXPECT_EQ(change.KeptBy(1)->from, (Region{3 * 10, 2, 3 * 10, 6 * 10}));
  EXPECT_EQ(change.KeptBy(1)->to, (Region{2 * 3 * 10, 1, 2 * 3 * 10, 0}));
}

TEST(Switch, IntoTheSameLayoutIsEmptyHoweverItWasMade) {
  const TensorShape shape = SpatioTemporal(4, 6, 2);
  const std::vector<AxisRange> halves{{0, 2}, {2, 4}};
  const Switch same = Between(Even(shape, "T", 2), *Layout::Of(shape, "T", halves));
  EXPECT_TRUE(same.identity());
  EXPECT_EQ(same.bytes(), 0);
  EXPECT_TRUE(same.SentBy(0).empty());
  EXPECT_TRUE(same.ReceivedBy(1).empty());
  EXPECT_EQ(same.KeptBy(0), nullptr);
  EXPECT_EQ(same.bytes_kept(1), shape.Bytes() / 2);
  EXPECT_TRUE(Between(Even(shape, "T", 1), Even(shape, "S", 1)).identity()) << "one rank holds all of either";
}

TEST(Switch, HandsTokensOverIntoHeadsOfOtherRanksUnevenlyAndBack) {
  // Ranks 0..2 computed 200 tokens in uneven ranges; ranks 2..4 keep 5 heads, as 1, 2 and 2.
  const TensorShape shape = Shape({{"tokens", 200}, {"heads", 5}, {"dim", 4}});
  const std::vector<AxisRange> tokens{{0, 64}, {64, 192}, {192, 200}, {}, {}};
  const std::vector<AxisRange> heads{{}, {}, {3, 5}, {0, 1}, {1, 3}};
  const auto by_tokens = Layout::Of(shape, "tokens", tokens, 64);
  ASSERT_TRUE(by_tokens.ok()) << by_tokens.status();
  const auto by_heads = Layout::Of(shape, "heads", heads);
  ASSERT_TRUE(by_heads.ok()) << by_heads.status();
  std::mt19937_64 random(7);
  const Bytes tensor = RandomTensor(shape, random);
  const Switch there = Between(*by_tokens, *by_heads), back = Between(*by_heads, *by_tokens);
  EXPECT_EQ(Perform(there, PartsOf(tensor, *by_tokens)), PartsOf(tensor, *by_heads));
  EXPECT_EQ(Perform(back, PartsOf(tensor, *by_heads)), PartsOf(tensor, *by_tokens));
  const int64_t row = 4 * 2;
  EXPECT_EQ(there.bytes_sent(0), 64 * 5 * row);
  EXPECT_EQ(there.bytes_sent(2), 8 * 3 * row) << "of its 8 tokens it keeps two heads";
  EXPECT_EQ(there.bytes_received(4), 200 * 2 * row);
  EXPECT_EQ(there.bytes(), (200 * 5 - 8 * 2) * row);
  EXPECT_EQ(back.bytes(), there.bytes());
}

TEST(Switch, TakesWhatSeveralHoldFromEachOfThemInTurnAndFromItselfFirst) {
  const TensorShape shape = Shape({{"tokens", 8}, {"heads", 2}});
  const Layout by_heads = Even(shape, "heads", 4, {1, FewPieces::kReplicate});  // 0, 0, 1, 1
  const Switch gather = Between(by_heads, *Layout::Replicated(shape, 4));
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(gather.bytes_kept(rank), 8 * 2);
    EXPECT_EQ(gather.bytes_received(rank), 8 * 2);
    EXPECT_EQ(gather.bytes_sent(rank), 8 * 2) << "the replicas share the sending";
  }
}

TEST(Layout, DealsPiecesOutWithNoRankMoreThanOneAhead) {
  const TensorShape shape = Shape({{"tokens", 1000}});
  for (int ranks = 1; ranks <= 16; ++ranks) {
    const Layout layout = Even(shape, "tokens", ranks, {64, FewPieces::kRefuse});
    int64_t least = 1000, most = 0, end = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      const AxisRange range = layout.range(rank);
      EXPECT_EQ(range.begin, end);
      EXPECT_TRUE(range.begin % 64 == 0);
      end = range.end;
      const int64_t pieces = (range.size() + 63) / 64;
      least = std::min(least, pieces);
      most = std::max(most, pieces);
    }
    EXPECT_EQ(end, 1000);
    EXPECT_LE(most - least, 1);
    EXPECT_GE(least, 1);
  }
}

TEST(Layout, WithFewerPiecesThanRanksRefusesLeavesEmptyOrReplicates) {
  const TensorShape shape = Shape({{"tokens", 130}, {"heads", 2}});
  EXPECT_THAT(std::string(Layout::Even(shape, "heads", 3).status().message()),
              HasSubstr("heads of 2 has 2 pieces of 1, fewer than 3 ranks"));
  EXPECT_THAT(std::string(Layout::Even(shape, "tokens", 4, {64, FewPieces::kRefuse}).status().message()),
              HasSubstr("tokens of 130 has 3 pieces of 64, fewer than 4 ranks"));
  const Layout empty = Even(shape, "tokens", 4, {64, FewPieces::kLeaveEmpty});
  EXPECT_EQ(empty.DebugString(), "tokens: 0..64, 64..128, 128..130, -");
  EXPECT_EQ(empty.PartBytes(3), 0);
  EXPECT_EQ(empty.PartBytes(2), 2 * 2 * 2);
  EXPECT_EQ(Even(shape, "heads", 4, {1, FewPieces::kReplicate}).DebugString(), "heads: 0..1, 0..1, 1..2, 1..2");
}

TEST(CutHeads, GivesEachRankTheKvHeadsThatItsQueryHeadsRead) {
  for (const auto& [query_heads, kv_heads] :
       std::vector<std::pair<int, int>>{{8, 8}, {8, 2}, {12, 3}, {6, 1}, {5, 5}}) {
    const TensorShape query = Shape({{"tokens", 3}, {"heads", query_heads}, {"dim", 4}});
    const TensorShape kv = Shape({{"tokens", 3}, {"heads", kv_heads}, {"dim", 4}});
    const int group = query_heads / kv_heads;
    for (int ranks = 1; ranks <= query_heads; ++ranks) {
      SCOPED_TRACE(absl::StrCat(query_heads, " query heads, ", kv_heads, " KV heads, ", ranks, " ranks"));
      const auto cut = CutHeads(query, kv, "heads", ranks);
      if (!cut.ok()) {
        EXPECT_THAT(std::string(cut.status().message()), HasSubstr("without one")) << cut.status();
        EXPECT_GT(ranks, kv_heads);
        EXPECT_NE(ranks % kv_heads, 0);
        continue;
      }
      for (int rank = 0; rank < ranks; ++rank) {
        const AxisRange q = cut->query.axis() < 0 ? AxisRange{0, query_heads} : cut->query.range(rank);
        const AxisRange k = cut->key_value.axis() < 0 ? AxisRange{0, kv_heads} : cut->key_value.range(rank);
        ASSERT_FALSE(q.empty());
        EXPECT_EQ(k.begin, q.begin / group);
        EXPECT_EQ(k.end, (q.end - 1) / group + 1);
      }
    }
  }
  const TensorShape four = Shape({{"heads", 4}}), three = Shape({{"heads", 3}}), two = Shape({{"heads", 2}});
  EXPECT_THAT(std::string(CutHeads(four, three, "heads", 2).status().message()), HasSubstr("no multiple of 3"));
  EXPECT_THAT(std::string(CutHeads(four, two, "heads", 5).status().message()), HasSubstr("at most 4 ranks"));
}

TEST(Layout, SaysWhatIsWrongWithRangesByRankAndPlace) {
  const TensorShape shape = Shape({{"tokens", 256}});
  const auto refusal = [&](std::vector<AxisRange> ranges, int64_t granularity = 1) {
    const auto layout = Layout::Of(shape, "tokens", ranges, granularity);
    EXPECT_EQ(layout.status().code(), absl::StatusCode::kInvalidArgument);
    return std::string(layout.status().message());
  };
  EXPECT_THAT(refusal({{0, 64}, {128, 256}}), HasSubstr("no rank holds tokens 64..128"));
  EXPECT_THAT(refusal({{0, 64}, {64, 200}}), HasSubstr("no rank holds tokens 200..256"));
  EXPECT_THAT(refusal({{}, {}}), HasSubstr("no rank holds tokens 0..256"));
  EXPECT_THAT(refusal({{64, 256}, {0, 65}}), HasSubstr("ranks 1 and 0 hold tokens 0..65 and 64..256"));
  EXPECT_THAT(refusal({{0, 128}, {0, 256}}), HasSubstr("do not overlap"));
  EXPECT_THAT(refusal({{0, 300}}), HasSubstr("rank 0 holds tokens 0..300, which is no range of 0..256"));
  EXPECT_THAT(refusal({{-1, 256}}), HasSubstr("rank 0"));
  EXPECT_THAT(refusal({{0, 100}, {100, 256}}, 64), HasSubstr("multiples of 64"));
  EXPECT_THAT(refusal({{0, 256}}, 0), HasSubstr("granularity 0"));
  EXPECT_THAT(refusal({}), HasSubstr("0 ranks"));
  EXPECT_THAT(refusal(std::vector<AxisRange>(kMaxLayoutRanks + 1, AxisRange{0, 256})), HasSubstr("257 ranks"));
  EXPECT_THAT(std::string(Layout::Even(shape, "heads", 1).status().message()), HasSubstr("no axis heads"));
}

TEST(TensorShape, RefusesWhatIsNoTensorAndWhatDoesNotFitANumber) {
  const auto refusal = [](const TensorShape& shape) { return std::string(shape.Validate().message()); };
  EXPECT_THAT(refusal(Shape({})), HasSubstr("0 axes"));
  EXPECT_THAT(refusal(Shape({{"T", 1}}, 0)), HasSubstr("elements of 0 bytes"));
  EXPECT_THAT(refusal(Shape({{"T", 0}})), HasSubstr("axis T has size 0"));
  EXPECT_THAT(refusal(Shape({{"T", 2}, {"T", 3}})), HasSubstr("two axes are called T"));
  EXPECT_THAT(refusal(Shape({{"", 2}})), HasSubstr("axis 0 has no name"));
  const int64_t huge = int64_t{1} << 40;
  EXPECT_THAT(refusal(Shape({{"A", huge}, {"B", huge}, {"C", huge}})), HasSubstr("larger than"));
  EXPECT_THAT(refusal(Shape({{"A", huge}}, huge)), HasSubstr("larger than"));
  EXPECT_TRUE(Shape({{"A", int64_t{1} << 49}}).Validate().ok());
}

TEST(Switch, RefusesUnlikeTensorsAndUnlikeRanks) {
  const TensorShape shape = SpatioTemporal(4, 4, 2), other = SpatioTemporal(4, 4, 3);
  EXPECT_THAT(std::string(Switch::Between(Even(shape, "T", 2), Even(other, "S", 2)).status().message()),
              HasSubstr("from [T 4, S 4, C 2] of 2 bytes to [T 4, S 4, C 3] of 2 bytes"));
  EXPECT_THAT(std::string(Switch::Between(Even(shape, "T", 2), Even(shape, "S", 4)).status().message()),
              HasSubstr("from 2 ranks to 4"));
}

TEST(Switch, HasAFingerprintThatTellsItFromOthers) {
  const TensorShape shape = SpatioTemporal(4, 4, 2);
  const Layout t = Even(shape, "T", 2), s = Even(shape, "S", 2);
  const std::vector<AxisRange> uneven{{0, 1}, {1, 4}};
  EXPECT_EQ(Between(t, s).fingerprint(), Between(t, s).fingerprint());
  EXPECT_NE(Between(t, s).fingerprint(), Between(s, t).fingerprint());
  EXPECT_NE(Between(t, s).fingerprint(), Between(t, *Layout::Of(shape, "S", uneven)).fingerprint());
  const TensorShape wider = SpatioTemporal(4, 4, 3);
  EXPECT_NE(Between(t, s).fingerprint(), Between(Even(wider, "T", 2), Even(wider, "S", 2)).fingerprint());
}

}  // namespace
}  // namespace dovetail::proto
