#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>

#include "gtest/gtest.h"
#include "kernels/cuda/attention/cuda_attention.h"
#include "kernels/paged_attention.h"
#include "kernels/reference/paged_attention.h"
#include "tests/kernels/oracle.h"
#include "tests/kernels_cuda/cuda_fixture.h"

// Sequences of random queries, keys and values, attended on a GPU and by the reference in double.

namespace dovetail::kernels::cuda::testing {

using kernels::testing::RandomFloats;

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
  CudaAttention::Kernel kernel = CudaAttention::Kernel::kFaster;
  int checks_every = 1;  // rows
};

// The worst that the rounding of weights and outputs does to |v| <= 1 (bf16: 2^-9 of a weight and of the output).
inline double BudgetOf(const Case& c) {
  const double o = c.wire == WireType::kBF16 ? 2.2e-3 : 5e-4;
  return o + (c.type == KvType::kBF16 ? 2.5e-3 : 5e-4);
}

class AttentionTest : public CudaTest {
 protected:
  // One sequence's data: blocks for the device, and the same numbers in f32 blocks for the reference.
  struct Sequence {
    SequenceSpec spec;
    std::vector<float> q;
    std::vector<std::byte> blocks;  // [head][segment]
    std::vector<float> reference_memory;
    std::vector<std::byte*> reference_blocks;
    std::unique_ptr<Buffer> device_table, device_sinks;
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
          const float x = StoreKv(c.type, k(random), block + layout.key_offset(t, i)) * c.key_scale;
          KvBlockLayout::StoreElement(DType::kF32, x, reference + plain.key_offset(t, i));
        }
        for (int i = c.key_dim; i < layout.key_row_bytes() / layout.element_bytes(); ++i) {
          StoreKv(c.type, 0, block + layout.key_offset(t, i));
        }
        for (int i = 0; i < c.value_dim; ++i) {
          const float x = StoreKv(c.type, v(random), block + layout.value_offset(t, i)) * c.value_scale;
          KvBlockLayout::StoreElement(DType::kF32, x, reference + plain.value_offset(t, i));
        }
      }
    }
    if (spec.sinks) {
      s.sinks = RandomFloats(heads, seed * 5 + 2, -3, 3);
      s.device_sinks = Upload(s.sinks);
    }
    return s;
  }

  // The blocks of all sequences in one arena, in no order: they are told apart by their pointers only.
  std::unique_ptr<Buffer> PlaceBlocks(const Case& c, std::vector<Sequence>& sequences, uint64_t seed) {
    const size_t bytes = CudaKvLayout{c.key_dim, c.value_dim, c.type}.bytes();
    size_t count = 0;
    for (const Sequence& s : sequences) count += s.blocks.size() / bytes;
    std::vector<size_t> places(count);
    std::iota(places.begin(), places.end(), size_t{0});
    std::shuffle(places.begin(), places.end(), std::mt19937_64(seed));
    constexpr size_t kLead = CudaKvLayout::kArenaLead;
    std::vector<std::byte> memory(kLead + count * bytes, std::byte{0xff});
    auto next = places.begin();
    std::vector<std::vector<size_t>> of_sequence;
    for (const Sequence& s : sequences) {
      std::vector<size_t>& mine = of_sequence.emplace_back(next, next + static_cast<int64_t>(s.blocks.size() / bytes));
      next += static_cast<int64_t>(mine.size());
      for (size_t b = 0; b < mine.size(); ++b)
        std::memcpy(memory.data() + kLead + mine[b] * bytes, s.blocks.data() + b * bytes, bytes);
    }
    std::unique_ptr<Buffer> arena = Upload(memory);
    for (size_t i = 0; i < sequences.size(); ++i) {
      std::vector<const std::byte*> table;
      for (const size_t place : of_sequence[i]) table.push_back(arena->data() + kLead + place * bytes);
      sequences[i].device_table = Upload(table);
    }
    return arena;
  }

  // Runs all sequences in one call, three times, and compares rows with the reference. Leaves the numbers of tiles.
  void Check(const Case& c, const std::vector<SequenceSpec>& specs, uint64_t seed) {
    const int heads = c.kv_heads * c.group;
    std::vector<Sequence> sequences;
    std::vector<float> q;
    std::vector<CudaAttentionItem> items;
    int64_t o_elements = 0;
    int32_t nodes = 0;
    for (size_t i = 0; i < specs.size(); ++i) sequences.push_back(Make(c, specs[i], seed * 100 + i));
    const std::unique_ptr<Buffer> arena = PlaceBlocks(c, sequences, seed);
    for (Sequence& s : sequences) {
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
    const std::vector<std::byte> wire_q = ToWireBytes(c.wire, q);
    q = FromWireBytes(c.wire, wire_q);
    const auto device_q = Upload(wire_q);
    const auto o = Empty(o_elements * BytesOf(c.wire) + 64);
    const auto partial_o = Empty(static_cast<size_t>(nodes) * heads * c.value_dim * 4 + 64);
    const auto partial_ml = Empty(static_cast<size_t>(nodes) * heads * 2 * 4 + 64);
    CudaAttentionShape shape{.group = c.group,
                             .window = c.window,
                             .layout = {c.key_dim, c.value_dim, c.type},
                             .q_type = c.wire,
                             .o_type = c.wire,
                             .scale = 1 / std::sqrt(static_cast<float>(c.key_dim)),
                             .key_scale = c.key_scale,
                             .value_scale = c.value_scale,
                             .arena = arena->data(),
                             .arena_bytes = arena->size_bytes()};
    CudaAttention attention(device(), c.kernel);
    absl::Status status = attention.Plan(stream(), shape, items);
    ASSERT_TRUE(status.ok()) << status;
    const CudaAttentionRun run{
        .q = device_q->data(), .o = o->data(), .partial_o = As<float>(partial_o), .partial_ml = As<float>(partial_ml)};
    status = attention.Run(stream(), shape, run);
    ASSERT_TRUE(status.ok()) << status;
    const std::vector<std::byte> o_bytes = Download<std::byte>(*o);
    const std::vector<float> po = Download<float>(*partial_o), pml = Download<float>(*partial_ml);
    spans_ = attention.plan().spans.size();
    tiles_ = attention.prefill_plan().tiles.size();
    pieces_ = attention.prefill_plan().pieces;
    for (int again = 0; again < 2; ++again) {
      ASSERT_TRUE(attention.Run(stream(), shape, run).ok());
      ASSERT_EQ(Download<std::byte>(*o), o_bytes) << "one plan, other bits";
    }
    for (size_t i = o_elements * BytesOf(c.wire); i < o_bytes.size(); ++i) {
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
        const bool checks = row % c.checks_every == 0 || row + 3 > s.spec.q_rows;
        for (int head = 0; checks && head < heads; ++head) {
          const std::vector<double> want =
              reference::AttentionRow(plain, reference, row, head, s.spec.sinks ? &s.sinks[head] : nullptr);
          for (int d = 0; d < c.value_dim; ++d) {
            double got = 0;
            if (!s.spec.partial) {
              got = FromWire(c.wire,
                             o_bytes.data() + (items[i].o_offset + row * items[i].o_row_step + head * c.value_dim + d) *
                                                  BytesOf(c.wire));
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
            ASSERT_LE(error, BudgetOf(c)) << "seed " << seed << " sequence " << i << " row " << row << " head " << head
                                          << " dim " << d << ": " << got << " for " << want[d];
            worst = std::max(worst, error);
          }
        }
        node += row_nodes;
      }
    }
    std::printf(
        "  worst %.2e of %.2e: group %d, heads %d, dims %d/%d, type %d, wire %d, window %d, spans %zu, tiles %zu\n",
        worst, BudgetOf(c), c.group, c.kv_heads, c.key_dim, c.value_dim, static_cast<int>(c.type),
        static_cast<int>(c.wire), c.window, spans_, tiles_);
  }

  // Of the last Check: what the kernel for few rows attended, and the one for many, and in how many pieces of tiles.
  size_t spans_ = 0, tiles_ = 0;
  int pieces_ = 0;
};

}  // namespace dovetail::kernels::cuda::testing
