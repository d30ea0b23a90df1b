#include "kernels/paged_attention.h"

#include <cmath>

#include "gmock/gmock.h"
#include "kernels/reference/paged_attention.h"
#include "tests/kernels/attention_fixture.h"

namespace dovetail::kernels::testing {
namespace {

using ::testing::HasSubstr;

// The largest absolute error over all rows and heads of one item against the reference.
double WorstError(const OpContext& context, const AttentionShape& shape, int kv_heads, int64_t position, int rows,
                  const float* sinks, uint64_t seed) {
  const TestSequence sequence(shape, kv_heads, position + rows, seed);
  TestShard shard(sequence, 0, kv_heads, 0, sequence.length());
  shard.Append(context, 0, sequence.length());
  AttentionItem item = shard.Item(position, rows);
  const size_t element = SizeOf(shape.dtype);
  Guarded<std::byte> out(static_cast<size_t>(rows) * sequence.heads() * shape.value_dim * element);
  item.o = out.data();
  item.sinks = sinks;
  RunAttention(context, shape, {&item, 1});
  EXPECT_TRUE(out.Intact());
  double worst = 0;
  for (int row = 0; row<rows; row += rows> 8 ? 7 : 1) {
    for (int head = 0; head < sequence.heads(); ++head) {
      const auto expected = reference::AttentionRow(shape, item, row, head, sinks != nullptr ? sinks + head : nullptr);
      for (int i = 0; i < shape.value_dim; ++i) {
        const size_t at = (static_cast<size_t>(row) * sequence.heads() + head) * shape.value_dim + i;
        const double error = std::abs(KvBlockLayout::LoadElement(shape.dtype, out.data() + at * element) - expected[i]);
        if (!(error <= worst)) worst = error;  // NaN sticks
      }
    }
  }
  return worst;
}

struct Type {
  std::string_view name;
  DType dtype;
  KvStorage storage = KvStorage::kAsSent;
};
constexpr Type kTypes[] = {{"f32", DType::kF32},
                           {"f16", DType::kF16},
                           {"bf16", DType::kBF16},
                           {"e4m3", DType::kBF16, KvStorage::kE4M3},
                           {"int8", DType::kBF16, KvStorage::kInt8}};

struct Case {
  int group, key_dim, value_dim, window, kv_heads;
  int64_t position;
  int rows;
};

constexpr Case kCases[] = {
    {1, 8, 8, 0, 2, 0, 1},       {2, 16, 8, 0, 1, 63, 1},   {3, 64, 64, 0, 3, 64, 1},    {3, 64, 64, 0, 3, 200, 1},
    {4, 128, 128, 0, 2, 777, 1}, {8, 96, 96, 0, 1, 130, 5}, {1, 64, 128, 0, 2, 0, 130},  {7, 64, 64, 0, 2, 100, 33},
    {2, 256, 256, 0, 1, 50, 70}, {5, 10, 6, 0, 1, 90, 3},   {3, 64, 64, 128, 2, 500, 1}, {3, 64, 64, 100, 2, 150, 90},
    {1, 2, 2, 1, 1, 70, 4},      {71, 64, 64, 0, 1, 65, 2}, {6, 192, 128, 0, 1, 300, 1}, {4, 72, 40, 17, 1, 0, 100},
    {1, 64, 64, 0, 1, 2000, 1},
};

TEST(PagedAttention, AgreesWithTheReferenceOverRaggedShapesTypesAndIsas) {
  ThreadPool pool({.threads = 2});
  for (const Isa isa : TestableIsas()) {
    const OpContext context{&pool, &SelectOps(isa)};
    for (const Type& type : kTypes) {
      double worst = 0;
      for (const Case& c : kCases) {
        const AttentionShape shape{.group = c.group,
                                   .key_dim = c.key_dim,
                                   .value_dim = c.value_dim,
                                   .scale = 1.0f / std::sqrt(static_cast<float>(c.key_dim)),
                                   .window = c.window,
                                   .dtype = type.dtype,
                                   .storage = type.storage};
        const double error = WorstError(context, shape, c.kv_heads, c.position, c.rows, nullptr, 17);
        EXPECT_LE(error, Budget("paged_attention", type.name))
            << Name(isa) << " " << type.name << " dk " << c.key_dim << " dv " << c.value_dim << " group " << c.group
            << " position " << c.position << " rows " << c.rows << " window " << c.window;
        worst = std::max(worst, error);
      }
      RecordProperty(std::string(Name(isa)) + "_" + std::string(type.name), std::to_string(worst));
      printf("paged_attention %s %s: worst error %.3g\n", std::string(Name(isa)).c_str(),
             std::string(type.name).c_str(), worst);
    }
  }
}

// Items of decodes, of a prompt, and of token shards, whose partials lie below each other row by row.
TEST(PagedAttention, GivesRowsOfManyItemsTheBitsOfEachAlone) {
  constexpr int kItems = 24, kHeads = 2;
  const AttentionShape shape{
      .group = 3, .key_dim = 64, .value_dim = 48, .scale = 0.125f, .window = 0, .dtype = DType::kBF16};
  for (const Isa isa : TestableIsas()) {
    ThreadPool many({.threads = 3}), one({.threads = 1});
    const OpContext context{&many, &SelectOps(isa)}, single{&one, &SelectOps(isa)};
    std::vector<std::unique_ptr<TestSequence>> sequences;
    std::vector<std::unique_ptr<TestShard>> shards;
    std::vector<AttentionItem> items;
    std::vector<std::vector<float>> o(kItems), ml(kItems), o_alone(kItems), ml_alone(kItems);
    for (int i = 0; i < kItems; ++i) {
      const int rows = i % 5 == 3 ? 20 : 1;
      const int64_t position = 50 + i * 41;
      sequences.push_back(std::make_unique<TestSequence>(shape, kHeads, position + rows, i));
      const int64_t begin = i % 2 == 0 ? 0 : 64;
      shards.push_back(std::make_unique<TestShard>(*sequences.back(), 0, kHeads, begin, position + rows));
      shards.back()->Append(context, begin, position + rows);
      items.push_back(shards.back()->Item(position, rows));
      const int64_t nodes = PartialNodes(position, rows, 0, begin, position + rows) * kHeads * shape.group;
      o[i].resize(nodes * shape.value_dim);
      ml[i].resize(nodes * 2);
      o_alone[i] = o[i];
      ml_alone[i] = ml[i];
      AttentionItem alone = items.back();
      alone.partial_o = o_alone[i].data();
      alone.partial_ml = ml_alone[i].data();
      RunAttention(single, shape, {&alone, 1});
      items.back().partial_o = o[i].data();
      items.back().partial_ml = ml[i].data();
    }
    RunAttention(context, shape, items);
    for (int i = 0; i < kItems; ++i) {
      EXPECT_EQ(o[i], o_alone[i]) << Name(isa) << " item " << i;
      EXPECT_EQ(ml[i], ml_alone[i]) << Name(isa) << " item " << i;
    }
  }
}

TEST(PagedAttention, CountsASinkOnceInTheDenominator) {
  ThreadPool pool({.threads = 1});
  const float sinks[] = {0.5f, -3.0f, 20.0f, 1.0f};
  const AttentionShape shape{.group = 2, .key_dim = 64, .value_dim = 64, .scale = 0.125f, .dtype = DType::kF32};
  for (const Isa isa : TestableIsas()) {
    EXPECT_LE(WorstError({&pool, &SelectOps(isa)}, shape, 2, 150, 3, sinks, 5), Budget("paged_attention", "f32"));
  }
}

TEST(PagedAttention, SurvivesScoresFarApart) {
  ThreadPool pool({.threads = 1});
  const AttentionShape shape{.group = 1, .key_dim = 64, .value_dim = 32, .scale = 40.0f, .dtype = DType::kF32};
  // Scores reach +-3000: all but the largest weights are exactly 0. The error is that of the score,
  // times the scale.
  for (const Isa isa : TestableIsas()) {
    EXPECT_LE(WorstError({&pool, &SelectOps(isa)}, shape, 2, 300, 2, nullptr, 6), 3e-3);
  }
}

TEST(PagedAttention, RefusesWhatItCannotDoAndSaysWhy) {
  ThreadPool pool({.threads = 1});
  const OpContext context{&pool, &SelectOps(Isa::kAvx2)};
  AttentionShape shape{.group = 1, .key_dim = 8, .value_dim = 8, .scale = 1, .dtype = DType::kF32};
  const TestSequence sequence(shape, 1, 70, 1);
  TestShard shard(sequence, 0, 1, 0, 70);
  shard.Append(context, 0, 70);
  float out[8];
  AttentionItem good = shard.Item(69, 1);
  good.o = out;
  Scratch scratch(ScratchBytesFor(context, shape, {&good, 1}));
  const auto message = [&](const AttentionShape& s, const AttentionItem& item, std::span<std::byte> memory) {
    const auto op = PagedAttention::Begin(context, s, {&item, 1}, memory);
    return std::string(op.status().message());
  };
  EXPECT_EQ(message(shape, good, scratch.span()), "");
  AttentionShape odd = shape;
  odd.key_dim = 7;
  EXPECT_THAT(message(odd, good, scratch.span()), HasSubstr("must be even and lie in 2..256"));
  AttentionItem item = good;
  item.token_begin = 32;
  EXPECT_THAT(message(shape, item, scratch.span()), HasSubstr("token_begin 32 is not a multiple of 64"));
  item = good;
  item.o = nullptr;
  EXPECT_THAT(message(shape, item, scratch.span()), HasSubstr("give either o, or partial_o and partial_ml"));
  item = good;
  item.blocks.segments = 1;
  EXPECT_THAT(message(shape, item, scratch.span()), HasSubstr("sees segments 0..1, its block table names 0..0"));
  item = good;
  item.first_position = kMaxPositions;
  EXPECT_THAT(message(shape, item, scratch.span()), HasSubstr("leave 0..1073741823"));
  EXPECT_THAT(message(shape, good, scratch.span().first(64)), HasSubstr("size it with PagedAttentionScratchBytes"));
}

}  // namespace
}  // namespace dovetail::kernels::testing
