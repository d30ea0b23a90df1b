#include "kernels/merge_partials.h"

#include <cmath>

#include "gmock/gmock.h"
#include "tests/kernels/attention_fixture.h"

namespace dovetail::kernels::testing {
namespace {

using ::testing::HasSubstr;

// What one shard that holds everything gives when each row is computed alone, on one thread: the
// bits everything else must match.
std::vector<std::byte> OneByOne(const OpsTable& table, const TestSequence& sequence, const float* sinks) {
  ThreadPool pool({.threads = 1});
  const OpContext context{&pool, &table};
  TestShard shard(sequence, 0, sequence.kv_heads(), 0, sequence.length());
  const size_t row_bytes =
      static_cast<size_t>(sequence.heads()) * sequence.shape().value_dim * SizeOf(sequence.shape().dtype);
  std::vector<std::byte> out(row_bytes * sequence.length());
  for (int64_t p = 0; p < sequence.length(); ++p) {
    shard.Append(context, p, p + 1);
    AttentionItem item = shard.Item(p, 1);
    item.o = out.data() + p * row_bytes;
    item.sinks = sinks;
    RunAttention(context, sequence.shape(), {&item, 1});
  }
  return out;
}

struct Split {
  std::vector<int> heads;       // boundaries of KV heads, 0 .. kv_heads
  std::vector<int64_t> tokens;  // boundaries of tokens, 0 .. length; a single range is not sharded
};

// A random way to cut heads and, on segment boundaries, tokens.
Split RandomSplit(const TestSequence& sequence, std::mt19937_64& random) {
  Split split;
  split.heads = {0};
  for (int h = 1; h < sequence.kv_heads(); ++h) {
    if (random() % 2 == 0) split.heads.push_back(h);
  }
  split.heads.push_back(sequence.kv_heads());
  split.tokens = {0};
  for (int64_t t = kSegmentTokens; t < sequence.length(); t += kSegmentTokens) {
    if (random() % 3 == 0) split.tokens.push_back(t);
  }
  split.tokens.push_back(sequence.length());
  return split;
}

// Computes rows [position, position + rows) of one sequence over the shards of a split and merges
// them, as the two sides of the wire do.
class ShardedRun {
 public:
  ShardedRun(const OpContext& context, const TestSequence& sequence, const Split& split, const float* sinks)
      : context_(context), sequence_(sequence), split_(split), sinks_(sinks) {
    for (size_t h = 0; h + 1 < split.heads.size(); ++h) {
      for (size_t t = 0; t + 1 < split.tokens.size(); ++t) {
        shards_.push_back(std::make_unique<TestShard>(sequence, split.heads[h], split.heads[h + 1], split.tokens[t],
                                                      split.tokens[t + 1]));
      }
    }
  }

  void Chunk(int64_t position, int rows, bool q_first, std::byte* out) {
    const AttentionShape& shape = sequence_.shape();
    std::vector<AttentionItem> items;
    std::vector<Guarded<float>> o, ml;
    o.reserve(shards_.size());
    ml.reserve(shards_.size());
    for (auto& shard : shards_) {
      AttentionItem item = shard->Item(position, rows);
      const int64_t nodes = PartialNodes(position, rows, shape.window, item.token_begin, item.token_end);
      o.emplace_back(nodes * shard->query_heads() * shape.value_dim);
      ml.emplace_back(nodes * shard->query_heads() * 2);
      item.partial_o = o.back().data();
      item.partial_ml = ml.back().data();
      items.push_back(item);
    }
    Scratch scratch(ScratchBytesFor(context_, shape, items));
    auto op = PagedAttention::Begin(context_, shape, items, scratch.span());
    ASSERT_TRUE(op.ok()) << op.status();
    if (q_first) op->AttendComplete();
    for (auto& shard : shards_) shard->Append(context_, position, position + rows);
    op->AttendRest();
    op->Finish();
    for (size_t i = 0; i < o.size(); ++i) ASSERT_TRUE(o[i].Intact() && ml[i].Intact());
    Merge(items, position, rows, out);
  }

 private:
  void Merge(const std::vector<AttentionItem>& items, int64_t position, int rows, std::byte* out) {
    const AttentionShape& shape = sequence_.shape();
    const size_t token_shards = split_.tokens.size() - 1;
    std::vector<std::vector<ShardPartials>> partials(split_.heads.size() - 1);
    std::vector<MergeItem> merges;
    for (size_t h = 0; h < partials.size(); ++h) {
      for (size_t t = 0; t < token_shards; ++t) {
        const AttentionItem& item = items[h * token_shards + t];
        partials[h].push_back({item.token_begin, item.token_end, item.partial_o, item.partial_ml});
      }
      // Shards that begin after the rows hold nothing yet: they are not in the step.
      std::erase_if(partials[h], [&](const ShardPartials& p) { return p.token_begin >= position + rows; });
      const int first_head = split_.heads[h] * shape.group;
      merges.push_back({.shards = partials[h],
                        .q_rows = rows,
                        .heads = (split_.heads[h + 1] - split_.heads[h]) * shape.group,
                        .value_dim = shape.value_dim,
                        .window = shape.window,
                        .first_position = position,
                        .sinks = sinks_ != nullptr ? sinks_ + first_head : nullptr,
                        .dtype = shape.dtype,
                        .o = out + static_cast<size_t>(first_head) * shape.value_dim * SizeOf(shape.dtype),
                        .o_row_step = int64_t{sequence_.heads()} * shape.value_dim});
    }
    ASSERT_TRUE(MergeShardPartials(context_, merges).ok());
  }

  OpContext context_;
  const TestSequence& sequence_;
  Split split_;
  const float* sinks_;
  std::vector<std::unique_ptr<TestShard>> shards_;
};

void CheckRandomCase(const OpsTable& table, uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto pick = [&](std::initializer_list<int> choices) { return choices.begin()[random() % choices.size()]; };
  AttentionShape shape{.group = pick({1, 2, 3, 4, 7}),
                       .key_dim = pick({8, 16, 64, 72}),
                       .value_dim = pick({8, 32, 64, 80}),
                       .scale = 0.2f,
                       .window = pick({0, 0, 1, 63, 64, 65, 130, 300}),
                       .dtype = static_cast<DType>(random() % 3)};
  const int kv_heads = pick({1, 2, 3});
  const int64_t length = 1 + static_cast<int64_t>(random() % 700);
  const bool with_sinks = random() % 3 == 0;
  const std::vector<float> sinks = RandomFloats(kv_heads * shape.group, seed, -2, 4);
  const TestSequence sequence(shape, kv_heads, length, seed);
  const std::vector<std::byte> expected = OneByOne(table, sequence, with_sinks ? sinks.data() : nullptr);

  ThreadPool pool({.threads = static_cast<int>(1 + random() % 4)});
  const OpContext context{&pool, &table};
  const Split split = RandomSplit(sequence, random);
  ShardedRun run(context, sequence, split, with_sinks ? sinks.data() : nullptr);
  Guarded<std::byte> out(expected.size());
  const size_t row_bytes = expected.size() / length;
  for (int64_t position = 0; position < length;) {
    const int rows = static_cast<int>(std::min<int64_t>(length - position, pick({1, 1, 2, 5, 17, 64, 128, 200})));
    run.Chunk(position, rows, random() % 2 == 0, out.data() + position * row_bytes);
    position += rows;
  }
  ASSERT_TRUE(out.Intact());
  for (int64_t p = 0; p < length; ++p) {
    ASSERT_EQ(std::memcmp(out.data() + p * row_bytes, expected.data() + p * row_bytes, row_bytes), 0)
        << "row " << p << " of " << length << ", group " << shape.group << ", window " << shape.window << ", dk "
        << shape.key_dim << ", dv " << shape.value_dim << ", " << split.tokens.size() - 1 << " token shards, threads "
        << pool.threads();
  }
}

TEST(Attention, HasTheSameBitsForEveryShardingChunkingAndThreadCount) {
  for (const Isa isa : TestableIsas()) {
    for (uint64_t seed = 1; seed <= 60; ++seed) {
      SCOPED_TRACE(::testing::Message() << Name(isa) << ", seed " << seed);
      CheckRandomCase(SelectOps(isa), seed);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(Attention, HasTheSameBitsWhenALongSequenceIsCutIntoChunksForMoreThreads) {
  for (const Isa isa : TestableIsas()) {
    const OpsTable& table = SelectOps(isa);
    const AttentionShape shape{.group = 3, .key_dim = 64, .value_dim = 64, .scale = 0.125f, .dtype = DType::kBF16};
    const TestSequence sequence(shape, 2, 5000, 9);
    std::vector<std::vector<std::byte>> outputs;
    for (const int threads : {1, 2, 3, 4}) {
      ThreadPool pool({.threads = threads});
      const OpContext context{&pool, &table};
      TestShard shard(sequence, 0, 2, 0, 5000);
      shard.Append(context, 0, 5000);
      for (const bool q_first : {false, true}) {
        AttentionItem item = shard.Item(4998, 2);
        std::vector<std::byte> out(2 * 6 * 64 * 2);
        item.o = out.data();
        Scratch scratch(ScratchBytesFor(context, shape, {&item, 1}));
        auto op = PagedAttention::Begin(context, shape, {&item, 1}, scratch.span());
        ASSERT_TRUE(op.ok());
        if (q_first) op->AttendComplete();
        op->AttendRest();
        op->Finish();
        outputs.push_back(out);
      }
    }
    for (const auto& out : outputs) EXPECT_EQ(out, outputs[0]);
  }
}

TEST(Attention, OfARowDoesNotDependOnTheOtherSequencesOfTheBatch) {
  ThreadPool pool({.threads = 2});
  for (const Isa isa : TestableIsas()) {
    const OpContext context{&pool, &SelectOps(isa)};
    const AttentionShape shape{.group = 2, .key_dim = 32, .value_dim = 32, .scale = 0.2f, .dtype = DType::kF16};
    std::vector<std::unique_ptr<TestSequence>> sequences;
    std::vector<std::unique_ptr<TestShard>> shards;
    std::vector<AttentionItem> items;
    std::vector<std::vector<std::byte>> alone, together;
    for (int i = 0; i < 9; ++i) {
      sequences.push_back(std::make_unique<TestSequence>(shape, 2, 1 + i * 131, i + 1));
      shards.push_back(std::make_unique<TestShard>(*sequences[i], 0, 2, 0, sequences[i]->length()));
      shards[i]->Append(context, 0, sequences[i]->length());
      items.push_back(shards[i]->Item(sequences[i]->length() - 1, 1));
      alone.emplace_back(4 * 32 * 2);
      together.emplace_back(4 * 32 * 2);
      items[i].o = alone[i].data();
      RunAttention(context, shape, {&items[i], 1});
      items[i].o = together[i].data();
    }
    RunAttention(context, shape, items);
    for (int i = 0; i < 9; ++i) EXPECT_EQ(alone[i], together[i]) << "sequence " << i;
  }
}

TEST(MergePartials, WithAPartialThatSawNothingReturnsTheOtherBitForBit) {
  for (const Isa isa : TestableIsas()) {
    const OpsTable& table = SelectOps(isa);
    std::vector<float> some = RandomFloats(PartialFloats(24), 4, -3, 3);
    std::vector<float> nothing(PartialFloats(24), 0.0f);
    nothing[PartialStride(24)] = -INFINITY;
    some[5] = -0.0f;
    const int used = PartialStride(24) + 2;
    for (const bool left : {true, false}) {
      std::vector<float> a = left ? some : nothing;
      const std::vector<float> b = left ? nothing : some;
      table.merge_partials(a.data(), b.data(), PartialStride(24));
      EXPECT_EQ(std::memcmp(a.data(), some.data(), used * sizeof(float)), 0);
    }
  }
}

TEST(MergePartials, BothIsasGiveTheSameBits) {
  if (TestableIsas().size() < 2) GTEST_SKIP() << "this CPU has no AVX-512";
  std::vector<float> a = RandomFloats(PartialFloats(64), 1, -3, 3), b = RandomFloats(PartialFloats(64), 2, -3, 3);
  std::vector<float> c = a;
  SelectOps(Isa::kAvx2).merge_partials(a.data(), b.data(), 64);
  SelectOps(Isa::kAvx512).merge_partials(c.data(), b.data(), 64);
  EXPECT_EQ(std::memcmp(a.data(), c.data(), 66 * sizeof(float)), 0);
}

TEST(MergePartials, RefusesShardsThatLeaveAGap) {
  ThreadPool pool({.threads = 1});
  float o[64], ml[8], out[8];
  const ShardPartials shards[] = {{0, 64, o, ml}, {128, 130, o, ml}};
  const MergeItem item{
      .shards = shards, .q_rows = 1, .heads = 1, .value_dim = 8, .first_position = 129, .dtype = DType::kF32, .o = out};
  const absl::Status status = MergeShardPartials({&pool, &SelectOps(Isa::kAvx2)}, {&item, 1});
  EXPECT_THAT(std::string(status.message()), HasSubstr("shard 1 holds tokens 128..130"));
}

TEST(SegmentTree, FoldingSubtreesGivesTheValueOfTheFullTree) {
  // Ranges whose subtrees grow, then shrink: [1, 2) [2, 4) [4, 8) [8, 12) [12, 13).
  std::vector<SegmentNode> nodes;
  ForEachSubtree({1, 13}, [&](SegmentNode node) { nodes.push_back(node); });
  EXPECT_EQ(nodes, (std::vector<SegmentNode>{{1, 0}, {2, 1}, {4, 2}, {8, 2}, {12, 0}}));
  EXPECT_EQ(CountSubtrees({0, 64}), 1);
  EXPECT_EQ(CountSubtrees({5, 5}), 0);
  EXPECT_TRUE(AreSiblings({4, 2}, {8, 2}) == false && AreSiblings({8, 2}, {12, 2}));
  EXPECT_EQ(JoinLevel({4, 2}, {8, 2}), 4);
  EXPECT_EQ(JoinLevel({8, 2}, {12, 0}), 3);
}

}  // namespace
}  // namespace dovetail::kernels::testing
