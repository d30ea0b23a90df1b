#include "kernels/cuda/attention/cuda_attention.h"

#include <cmath>
#include <numeric>
#include <random>

#include "gtest/gtest.h"
#include "kernels/paged_attention.h"
#include "kernels/reference/paged_attention.h"
#include "tests/kernels/oracle.h"
#include "tests/kernels_cuda/cuda_fixture.h"

namespace dovetail::kernels::cuda {
namespace {

using kernels::testing::RandomFloats;
using testing::As;

struct SequenceSpec {
  int q_rows = 1;
  int64_t first_position = 0;
  int64_t token_begin = 0;
  int64_t token_end = -1;  // -1: all up to the last row
  bool partial = false;
  bool sinks = false;
};

struct Case {
  int group = 1, kv_heads = 1, key_dim = 64, value_dim = 64;
  KvType type = KvType::kBF16;
  WireType wire = WireType::kBF16;
  int window = 0;
  float key_scale = 1, value_scale = 1;
};

// The worst that the rounding of weights and outputs does to |v| <= 1 (bf16: 2^-9 of a weight and of the output).
double BudgetOf(const Case& c) {
  const double o = c.wire == WireType::kBF16 ? 2.2e-3 : 5e-4;
  return o + (c.type == KvType::kBF16 ? 2.5e-3 : 5e-4);
}

class CudaAttentionTest : public testing::CudaTest {
 protected:
  // One sequence's data: blocks for the device, and the same numbers in f32 blocks for the reference.
  struct Sequence {
    SequenceSpec spec;
    std::vector<float> q;
    std::vector<std::byte> blocks;  // [head][segment]
    std::vector<float> reference_memory;
    std::vector<std::byte*> reference_blocks;
    std::unique_ptr<Buffer> device_blocks, device_table, device_sinks;
    std::vector<float> sinks;
    int first_segment = 0, segments = 0;
    int64_t token_end = 0;
  };

  Sequence Make(const Case& c, SequenceSpec spec, uint64_t seed) {
    Sequence s;
    s.spec = spec;
    s.token_end = spec.token_end >= 0 ? spec.token_end : spec.first_position + spec.q_rows;
    const int heads = c.kv_heads * c.group;
    s.q = RandomFloats(static_cast<size_t>(spec.q_rows) * heads * c.key_dim, seed * 5 + 1, -2, 2);
    const CudaKvLayout layout{c.key_dim, c.value_dim, c.type};
    const KvBlockLayout plain{c.key_dim, c.value_dim, DType::kF32};
    s.first_segment = static_cast<int>(spec.token_begin / kSegmentTokens);
    s.segments = static_cast<int>((s.token_end + kSegmentTokens - 1) / kSegmentTokens) - s.first_segment;
    s.segments = std::max(s.segments, 0);
    const size_t count = static_cast<size_t>(c.kv_heads) * s.segments;
    s.blocks.assign(count * layout.bytes(), std::byte{0xff});  // NaN where nothing was written
    s.reference_memory.resize(count * plain.bytes() / 4);
    std::mt19937_64 random(seed);
    std::uniform_real_distribution<float> k(-2, 2), v(-1, 1);
    for (size_t b = 0; b < count; ++b) {
      std::byte* block = s.blocks.data() + b * layout.bytes();
      auto* reference = reinterpret_cast<std::byte*>(s.reference_memory.data()) + b * plain.bytes();
      s.reference_blocks.push_back(reference);
      const int64_t token0 = (s.first_segment + static_cast<int64_t>(b % s.segments)) * kSegmentTokens;
      for (int t = 0; t < kSegmentTokens && token0 + t < s.token_end; ++t) {
        for (int i = 0; i < c.key_dim; ++i) {
          const float x = testing::StoreKv(c.type, k(random), block + layout.key_offset(t, i)) * c.key_scale;
          KvBlockLayout::StoreElement(DType::kF32, x, reference + plain.key_offset(t, i));
        }
        for (int i = c.key_dim; i < layout.key_row_bytes() / layout.element_bytes(); ++i) {
          testing::StoreKv(c.type, 0, block + layout.key_offset(t, i));
        }
        for (int i = 0; i < c.value_dim; ++i) {
          const float x = testing::StoreKv(c.type, v(random), block + layout.value_offset(t, i)) * c.value_scale;
          KvBlockLayout::StoreElement(DType::kF32, x, reference + plain.value_offset(t, i));
        }
      }
    }
    s.device_blocks = Upload(s.blocks);
    // Blocks are told apart by their pointers only: in no order.
    std::vector<size_t> order(count);
    std::iota(order.begin(), order.end(), size_t{0});
    std::vector<const std::byte*> table;
    for (size_t b = 0; b < count; ++b) table.push_back(s.device_blocks->data() + b * layout.bytes());
    s.device_table = Upload(table);
    if (spec.sinks) {
      s.sinks = RandomFloats(heads, seed * 5 + 2, -3, 3);
      s.device_sinks = Upload(s.sinks);
    }
    return s;
  }

  // Runs all sequences in one call, twice, and compares every row with the reference.
  void Check(const Case& c, const std::vector<SequenceSpec>& specs, uint64_t seed) {
    const int heads = c.kv_heads * c.group;
    std::vector<Sequence> sequences;
    std::vector<float> q;
    std::vector<CudaAttentionItem> items;
    int64_t o_elements = 0;
    int32_t nodes = 0;
    for (size_t i = 0; i < specs.size(); ++i) {
      sequences.push_back(Make(c, specs[i], seed * 100 + i));
      Sequence& s = sequences.back();
      CudaAttentionItem item{.q_rows = s.spec.q_rows,
                             .kv_heads = c.kv_heads,
                             .first_position = s.spec.first_position,
                             .token_begin = s.spec.token_begin,
                             .token_end = s.token_end,
                             .q_offset = static_cast<int64_t>(q.size()),
                             .q_row_step = int64_t{heads} * c.key_dim,
                             .o_offset = o_elements,
                             .o_row_step = int64_t{heads} * c.value_dim,
                             .blocks = As<const std::byte* const>(s.device_table),
                             .head_step = s.segments,
                             .first_segment = s.first_segment,
                             .sinks = s.spec.sinks ? As<const float>(s.device_sinks) : nullptr,
                             .partial = s.spec.partial,
                             .first_node = nodes};
      if (s.spec.partial) {
        nodes += static_cast<int32_t>(
            PartialNodes(s.spec.first_position, s.spec.q_rows, c.window, s.spec.token_begin, s.token_end));
      } else {
        o_elements += int64_t{s.spec.q_rows} * heads * c.value_dim;
      }
      q.insert(q.end(), s.q.begin(), s.q.end());
      items.push_back(item);
    }
    const std::vector<std::byte> wire_q = testing::ToWireBytes(c.wire, q);
    q = testing::FromWireBytes(c.wire, wire_q);
    const auto device_q = Upload(wire_q);
    const auto o = Empty(o_elements * testing::BytesOf(c.wire) + 64);
    const auto partial_o = Empty(static_cast<size_t>(nodes) * heads * c.value_dim * 4 + 64);
    const auto partial_ml = Empty(static_cast<size_t>(nodes) * heads * 2 * 4 + 64);
    CudaAttentionShape shape{.group = c.group,
                             .window = c.window,
                             .layout = {c.key_dim, c.value_dim, c.type},
                             .q_type = c.wire,
                             .o_type = c.wire,
                             .scale = 1 / std::sqrt(static_cast<float>(c.key_dim)),
                             .key_scale = c.key_scale,
                             .value_scale = c.value_scale};
    CudaAttention attention(device());
    absl::Status status = attention.Plan(stream(), shape, items);
    ASSERT_TRUE(status.ok()) << status;
    const CudaAttentionRun run{
        .q = device_q->data(), .o = o->data(), .partial_o = As<float>(partial_o), .partial_ml = As<float>(partial_ml)};
    status = attention.Run(stream(), shape, run);
    ASSERT_TRUE(status.ok()) << status;
    const std::vector<std::byte> o_bytes = Download<std::byte>(*o);
    const std::vector<float> po = Download<float>(*partial_o), pml = Download<float>(*partial_ml);
    for (int again = 0; again < 2; ++again) {
      ASSERT_TRUE(attention.Run(stream(), shape, run).ok());
      ASSERT_EQ(Download<std::byte>(*o), o_bytes) << "one plan, other bits";
    }
    for (size_t i = o_elements * testing::BytesOf(c.wire); i < o_bytes.size(); ++i) {
      ASSERT_EQ(o_bytes[i], std::byte{0xff}) << "wrote behind o";
    }

    AttentionShape plain{.group = c.group,
                         .key_dim = c.key_dim,
                         .value_dim = c.value_dim,
                         .scale = shape.scale,
                         .window = c.window,
                         .dtype = DType::kF32};
    double worst = 0;
    for (size_t i = 0; i < sequences.size(); ++i) {
      Sequence& s = sequences[i];
      AttentionItem reference{.q = q.data() + items[i].q_offset,
                              .q_rows = s.spec.q_rows,
                              .kv_heads = c.kv_heads,
                              .first_position = s.spec.first_position,
                              .token_begin = s.spec.token_begin,
                              .token_end = s.token_end,
                              .blocks = {.blocks = s.reference_blocks.data(),
                                         .head_step = s.segments,
                                         .first_segment = s.first_segment,
                                         .segments = s.segments}};
      int64_t node = items[i].first_node;
      for (int row = 0; row < s.spec.q_rows; ++row) {
        const int64_t position = s.spec.first_position + row;
        const int row_nodes = CountSubtrees(VisibleSegments(position, c.window, s.spec.token_begin, s.token_end));
        for (int head = 0; head < heads; ++head) {
          const std::vector<double> want =
              reference::AttentionRow(plain, reference, row, head, s.spec.sinks ? &s.sinks[head] : nullptr);
          for (int d = 0; d < c.value_dim; ++d) {
            double got = 0;
            if (!s.spec.partial) {
              got = testing::FromWire(
                  c.wire, o_bytes.data() + (items[i].o_offset + row * items[i].o_row_step + head * c.value_dim + d) *
                                               testing::BytesOf(c.wire));
            } else {
              if (row_nodes == 0) continue;
              const int64_t at = node * heads + head;
              got = po[at * c.value_dim + d] / pml[at * 2 + 1];
              for (int n = 1; n < row_nodes; ++n) {
                const int64_t rest = (node + n) * heads + head;
                ASSERT_EQ(po[rest * c.value_dim + d], 0.0f);
                ASSERT_EQ(pml[rest * 2], -INFINITY);
                ASSERT_EQ(pml[rest * 2 + 1], 0.0f);
              }
            }
            const double error = std::abs(got - want[d]) / c.value_scale;
            ASSERT_LE(error, BudgetOf(c)) << "sequence " << i << " row " << row << " head " << head << " dim " << d
                                          << ": " << got << " for " << want[d];
            worst = std::max(worst, error);
          }
        }
        node += row_nodes;
      }
    }
    std::printf("  worst %.2e of %.2e: group %d, heads %d, dims %d/%d, type %d, wire %d, window %d, tiles %d\n", worst,
                BudgetOf(c), c.group, c.kv_heads, c.key_dim, c.value_dim, static_cast<int>(c.type),
                static_cast<int>(c.wire), c.window, attention.plan().tiles);
  }
};

TEST_F(CudaAttentionTest, OneTokenOfOneSequence) { Check({}, {{.first_position = 0}}, 1); }

TEST_F(CudaAttentionTest, RaggedDecodeAgreesWithTheReferenceInEveryType) {
  for (const KvType type : {KvType::kBF16, KvType::kF16, KvType::kE4M3}) {
    for (const int dim : {64, 128}) {
      Check({.group = 4, .kv_heads = 2, .key_dim = dim, .value_dim = dim, .type = type},
            {{.first_position = 0},
             {.first_position = 62},
             {.first_position = 63},
             {.first_position = 64},
             {.first_position = 700},
             {.first_position = 129},
             {.first_position = 1}},
            2 + dim);
    }
  }
}

TEST_F(CudaAttentionTest, HeadDimensionsOfMultiplesOfEight) {
  for (const KvType type : {KvType::kBF16, KvType::kE4M3}) {
    for (const auto& [key, value] : {std::pair{8, 8},
                                     {24, 40},
                                     {80, 80},
                                     {96, 96},
                                     {112, 112},
                                     {128, 64},
                                     {192, 128},
                                     {256, 256},
                                     {72, 200},
                                     {248, 16}}) {
      Check({.group = 3, .kv_heads = 2, .key_dim = key, .value_dim = value, .type = type},
            {{.first_position = 300}, {.first_position = 17}}, 77 + key);
    }
  }
}

TEST_F(CudaAttentionTest, EveryGroupSizeAndManyRows) {
  for (const int group : {1, 2, 3, 5, 7, 8, 9, 16, 17, 24}) {
    for (const int rows : {1, 2, 4, 7, 16}) {
      Check({.group = group, .kv_heads = 1, .key_dim = 64, .value_dim = 64},
            {{.q_rows = rows, .first_position = 150},
             {.q_rows = 1, .first_position = 64},
             {.q_rows = rows, .first_position = 60}},
            1000 + group * 20 + rows);
    }
  }
}

TEST_F(CudaAttentionTest, PrefillChunks) {
  Check({.group = 4, .kv_heads = 2, .key_dim = 64, .value_dim = 64},
        {{.q_rows = 200}, {.q_rows = 130, .first_position = 100}}, 5);
  Check({.group = 1, .kv_heads = 2, .key_dim = 128, .value_dim = 128, .type = KvType::kE4M3},
        {{.q_rows = 300}, {.q_rows = 1, .first_position = 500}}, 6);
}

TEST_F(CudaAttentionTest, WindowsAndSinks) {
  for (const int window : {1, 5, 64, 65, 200}) {
    Check({.group = 4, .kv_heads = 2, .key_dim = 64, .value_dim = 64, .window = window},
          {{.q_rows = 3, .first_position = 400, .sinks = true}, {.first_position = 3, .sinks = true}, {.q_rows = 90}},
          9 + window);
  }
}

TEST_F(CudaAttentionTest, LongContextsAreSplitOverThreadBlocks) {
  Check({.group = 4, .kv_heads = 1, .key_dim = 128, .value_dim = 128}, {{.first_position = 20000}}, 11);
  Check({.group = 2,
         .kv_heads = 1,
         .key_dim = 64,
         .value_dim = 64,
         .type = KvType::kE4M3,
         .key_scale = 0.5f,
         .value_scale = 2},
        {{.q_rows = 4, .first_position = 9000, .sinks = true}, {.first_position = 100}}, 12);
}

TEST_F(CudaAttentionTest, BlocksGoThroughTheRingManyTimes) {
  Check({.group = 1, .kv_heads = 1, .key_dim = 128, .value_dim = 128}, {{.first_position = 250000}}, 21);
  Check({.group = 2, .kv_heads = 1, .key_dim = 8, .value_dim = 8, .type = KvType::kE4M3},
        {{.first_position = 400000}, {.q_rows = 17, .first_position = 30000}}, 22);
}

TEST_F(CudaAttentionTest, ShardsReturnPartials) {
  Check({.group = 4, .kv_heads = 2, .key_dim = 64, .value_dim = 64},
        {{.q_rows = 2, .first_position = 1000, .token_begin = 128, .token_end = 640, .partial = true},
         {.q_rows = 3, .first_position = 500, .token_begin = 448, .partial = true},
         {.q_rows = 1, .first_position = 100},
         {.q_rows = 5, .first_position = 126, .token_begin = 128, .partial = true}},
        13);
  Check({.group = 1, .kv_heads = 3, .key_dim = 64, .value_dim = 64, .window = 100},
        {{.q_rows = 4, .first_position = 600, .token_begin = 64, .token_end = 512, .partial = true},
         {.q_rows = 9, .first_position = 508, .token_begin = 192, .token_end = 448, .partial = true}},
        14);
}

TEST_F(CudaAttentionTest, ShardsThatSeeNothing) {
  Check({.group = 2, .kv_heads = 2, .key_dim = 64, .value_dim = 64, .window = 10},
        {{.q_rows = 2, .first_position = 1000, .token_begin = 0, .token_end = 640}, {.first_position = 5}}, 15);
}

TEST_F(CudaAttentionTest, WireTypesOfQueriesAndOutputs) {
  for (const WireType wire : {WireType::kF32, WireType::kF16, WireType::kBF16}) {
    for (const KvType type : {KvType::kBF16, KvType::kF16, KvType::kE4M3}) {
      Case c{.group = 4, .kv_heads = 1, .key_dim = 64, .value_dim = 64, .type = type, .wire = wire};
      if (wire != WireType::kBF16 && type == KvType::kBF16) continue;  // queries would be rounded: another budget
      Check(c, {{.first_position = 333}}, 16);
    }
  }
}

TEST_F(CudaAttentionTest, ManySequencesOfRandomLengths) {
  std::mt19937_64 random(17);
  std::vector<SequenceSpec> specs;
  for (int i = 0; i < 150; ++i) specs.push_back({.first_position = static_cast<int64_t>(random() % 300)});
  Check({.group = 3, .kv_heads = 3, .key_dim = 64, .value_dim = 64}, specs, 18);
}

TEST_F(CudaAttentionTest, RefusesWhatItCannotDo) {
  CudaAttention attention(device());
  CudaAttentionShape shape{.layout = {64, 64, KvType::kBF16}, .scale = 0.125f};
  CudaAttentionItem item{.q_rows = 1,
                         .kv_heads = 1,
                         .first_position = 0,
                         .token_end = 1,
                         .blocks = reinterpret_cast<const std::byte* const*>(16)};
  CudaAttentionShape odd = shape;
  odd.layout.key_dim = 60;
  EXPECT_EQ(attention.Plan(stream(), odd, {&item, 1}).code(), absl::StatusCode::kInvalidArgument);
  CudaAttentionItem bad = item;
  bad.q_offset = 4;
  const absl::Status status = attention.Plan(stream(), shape, {&bad, 1});
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("attention item 0: q offset 4"), std::string::npos) << status;
  bad = item;
  bad.token_begin = 32;
  EXPECT_EQ(attention.Plan(stream(), shape, {&bad, 1}).code(), absl::StatusCode::kInvalidArgument);
  bad = item;
  bad.q_rows = 0;
  EXPECT_EQ(attention.Plan(stream(), shape, {&bad, 1}).code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace dovetail::kernels::cuda
