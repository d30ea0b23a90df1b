#include "scheduler/core/prefill_volume.h"

#include <gtest/gtest.h>

#include "proto/token_layout.h"
#include "scheduler/core/prefill_table.h"

namespace dovetail::scheduler {
namespace {

constexpr int64_t kMiB = 1 << 20;

proto::SoftmaxSpec Softmax(int query_heads, int kv_heads, int dim) {
  return {.query_heads = query_heads, .kv_heads = kv_heads, .key_dim = dim, .value_dim = dim, .scale = 1};
}

// N = 128K in bf16: MiB that a rank receives for a layer.
TEST(PrefillVolume, FormulasGiveTheWorkedNumbers) {
  struct Case {
    proto::SoftmaxSpec spec;
    int64_t hidden, ranks, ring, heads, pass_q, tensor_parallel;  // pass-q: of one subtree for each earlier rank
  };
  const std::vector<Case> cases = {
      {Softmax(32, 8, 128), 4096, 4, 384, 480, 1560, 3072},     // Llama-3.1-8B
      {Softmax(32, 8, 128), 4096, 8, 448, 280, 1820, 3584},     //
      {Softmax(32, 32, 128), 4096, 4, 1536, 768, 1560, 3072},   // Llama-2-7B
      {Softmax(64, 8, 128), 8192, 4, 384, 864, 3120, 6144},     // Llama-3.1-70B
      {Softmax(64, 8, 128), 8192, 8, 448, 504, 3640, 7168},     //
      {Softmax(128, 8, 128), 16384, 8, 448, 952, 7280, 14336},  // Llama-3.1-405B
      {Softmax(64, 4, 128), 4096, 4, 192, 816, 3120, 3072},     // Qwen3-235B
      {Softmax(16, 2, 256), 2048, 4, 192, 480, 1548, 1536},     // Qwen3-Next: KV heads replicated
  };
  for (const Case& c : cases) {
    const PromptShape shape{.new_tokens = 131072, .ranks = c.ranks};
    EXPECT_EQ(RingBytes(c.spec, shape), c.ring * kMiB);
    EXPECT_EQ(SwitchBytes(c.spec, shape), c.heads * kMiB);
    EXPECT_EQ(PassQBytes(c.spec, shape), c.pass_q * kMiB);
    EXPECT_EQ(TensorParallelBytes(c.hidden, 2, shape), c.tensor_parallel * kMiB);
  }
  const PromptShape shape{.new_tokens = 131072, .ranks = 4};
  const proto::LinearSpec lightning{.heads = 64, .key_dim = 128, .value_dim = 128};
  EXPECT_EQ(ChainBytes(lightning, shape), 4 * kMiB);
  EXPECT_EQ(StateGatherBytes(lightning, shape), 12 * kMiB);
  EXPECT_EQ(StateScanBytes(lightning, shape), 8 * kMiB);
  // q, k, v and o are 1536 MiB; the states are of 16 heads of 32,768 tokens before, and 48 heads of its own tokens: 64
  // snapshots and the block before the last, of the first rank 3 more.
  EXPECT_EQ(LinearSwitchBytes(lightning, shape), 1536 * kMiB + 48 * (64 + 1 + 3) * 64 * 1024);
  const proto::LinearSpec gated_delta{.heads = 32, .key_dim = 128, .value_dim = 128, .delta = true};
  EXPECT_EQ(ChainBytes(gated_delta, shape), 2 * kMiB);
  proto::LinearSpec convolved = gated_delta;  // the inputs of three tokens go with the state, in bf16
  convolved.conv_width = 4;
  EXPECT_EQ(ChainBytes(convolved, shape), 2 * kMiB + 32 * 3 * (2 * 128 + 128) * 2);
  convolved.state = DType::kBF16;
  EXPECT_EQ(ChainBytes(convolved, shape), kMiB + 32 * 3 * (2 * 128 + 128) * 2);
  EXPECT_EQ(StateGatherBytes(gated_delta, shape), 12 * kMiB);
}

// By what a rank gets in each op (proto/linear_switch.h), which is what compute workers count.
TEST(PrefillVolume, ASwitchOfLinearLayersCountsGatesAndStates) {
  proto::LinearSpec spec{.heads = 5, .key_dim = 16, .value_dim = 24, .delta = true, .token_decay = true};
  spec.token_rate = true;
  spec.conv_width = 4;
  const int64_t row = (2 * 16 + 24) * 2 + 2 * 4, output = 24 * 2;  // of a token and head
  const int64_t state = 16 * 24 * 4 + 3 * (2 * 16 + 24) * 2;
  // Rank 1 of 2 has 3 heads: rows of the other's 1024 tokens, outputs of its own for 2 heads, and their states at 1536,
  // 1984 and 2048.
  EXPECT_EQ(LinearSwitchBytes(spec, {.new_tokens = 2048, .ranks = 2}), 1024 * (3 * row + 2 * output) + 2 * 3 * state);
  // And the state before the group, of its 3 heads.
  EXPECT_EQ(LinearSwitchBytes(spec, {.new_tokens = 2048, .earlier_tokens = 4096, .ranks = 2}),
            1024 * (3 * row + 2 * output) + (2 * 3 + 3) * state);
  EXPECT_EQ(LinearSwitchBytes(spec, {.new_tokens = 2048, .ranks = 6}), 0) << "there are five heads";
}

TEST(PrefillVolume, OneRankReceivesNothing) {
  const PromptShape alone{.new_tokens = 1000, .earlier_tokens = 500, .ranks = 1};
  const proto::LinearSpec linear{.heads = 2, .key_dim = 8, .value_dim = 8};
  EXPECT_EQ(RingBytes(Softmax(4, 2, 8), alone), 0);
  EXPECT_EQ(SwitchBytes(Softmax(4, 2, 8), alone), 0);
  EXPECT_EQ(PassQBytes(Softmax(4, 2, 8), alone), 0);
  EXPECT_EQ(ChainBytes(linear, alone), 0);
  EXPECT_EQ(StateGatherBytes(linear, alone), 0);
  EXPECT_EQ(StateScanBytes(linear, alone), 0);
  EXPECT_EQ(LinearSwitchBytes(linear, alone), 0);
  EXPECT_EQ(TensorParallelBytes(64, 2, alone), 0);
}

// q, k and v from tokens to heads and o back, by the primitive that would move them.
TEST(PrefillVolume, AHeadSwitchIsWhatTheLayoutsSay) {
  constexpr int kTokens = 512, kRanks = 4, kDim = 16;
  const auto received = [&](int heads) {
    const proto::TensorShape shape{{{"tokens", kTokens}, {"heads", heads}, {"dim", kDim}}, 2};
    const auto by_tokens = *proto::Layout::Even(shape, "tokens", kRanks);
    const auto by_heads = *proto::Layout::Even(shape, "heads", kRanks);
    return proto::Switch::Between(by_tokens, by_heads)->bytes_received(0);
  };
  const int64_t moved = received(16) + 2 * received(8) + received(16);
  EXPECT_EQ(SwitchBytes(Softmax(16, 8, kDim), {.new_tokens = kTokens, .ranks = kRanks}), moved);
}

PrefillTableInput Llama(int ranks, double bytes_per_s) {
  PrefillTableInput input;
  input.attention = *proto::AttentionTable::Build(std::vector<proto::AttentionSpec>(32, Softmax(32, 8, 128)));
  input.hidden = 4096;
  input.new_tokens = 131072;
  input.ranks = ranks;
  input.token_s = 16e9 / 600e12;
  input.flop_s = 1 / 594e12;
  input.plane_flop_s = 1 / 304e12;
  input.link_byte_s = 1 / bytes_per_s;
  input.link_latency_s = 5e-6;
  return input;
}

const PrefillTableRow& RowOf(const std::vector<PrefillTableRow>& rows, const std::string& softmax) {
  for (const PrefillTableRow& row : rows)
    if (row.softmax == softmax) return row;
  ADD_FAILURE() << softmax;
  return rows[0];
}

TEST(PrefillTable, ASlowLinkSeparatesExchangesByTheirBytes) {
  const auto fast = MakePrefillTable(Llama(8, 450e9));
  PrefillTableInput in_one_group = Llama(8, 450e9);
  in_one_group.max_step_tokens = static_cast<int>(in_one_group.new_tokens);
  EXPECT_GT(RowOf(MakePrefillTable(in_one_group), "switch").efficiency, 0.95);
  EXPECT_TRUE(RowOf(fast, "switch").built);
  EXPECT_TRUE(RowOf(fast, "plane").built);
  EXPECT_EQ(BytesOf(RowOf(fast, "plane").traffic), RowOf(fast, "plane").total_bytes);
  const auto slow = MakePrefillTable(Llama(8, 3.125e9));
  EXPECT_EQ(RowOf(slow, "tensor-parallel").bound, PrefillBound::kLink);
  in_one_group.link_byte_s = 1 / 3.125e9;
  const auto slow_group = MakePrefillTable(in_one_group);
  EXPECT_LT(RowOf(slow_group, "switch").seconds, RowOf(slow_group, "gather-direct").seconds)
      << "280 MiB a layer, not 448";
  EXPECT_LT(RowOf(slow, "gather-direct").seconds, RowOf(slow, "tensor-parallel").seconds);
  for (size_t i = 1; i < slow.size(); ++i) EXPECT_GE(slow[i].seconds, slow[i - 1].seconds);
}

// Each rank gets the same K and V of the others; what lies before the group is asked of the attention workers.
TEST(PrefillTable, ARingMovesWhatAGatherDoesAmongTheRanksOfAGroup) {
  PrefillTableInput input = Llama(8, 450e9);
  const auto several = MakePrefillTable(input);
  EXPECT_GT(RowOf(several, "ring").traffic.asked_bytes, 0);
  input.max_step_tokens = static_cast<int>(input.new_tokens);
  const auto one_group = MakePrefillTable(input);
  EXPECT_TRUE(RowOf(one_group, "ring").built);
  EXPECT_EQ(RowOf(one_group, "ring").traffic.ring_bytes, RowOf(one_group, "gather-direct").traffic.direct_bytes);
  EXPECT_EQ(RowOf(one_group, "ring").traffic.asked_bytes, 0);
  EXPECT_GT(RowOf(one_group, "ring").traffic.ring_bytes, 0);
}

// In one group, and with as many KV heads for each rank.
TEST(PrefillTable, ASwitchThatIsBuiltMovesWhatTheFormulaSays) {
  for (const int ranks : {2, 4, 8}) {
    PrefillTableInput input = Llama(ranks, 450e9);
    input.max_step_tokens = static_cast<int>(input.new_tokens);
    const PrefillTableRow row = RowOf(MakePrefillTable(input), "switch");
    EXPECT_TRUE(row.built);
    const PromptShape shape{.new_tokens = input.new_tokens, .ranks = ranks};
    EXPECT_EQ(row.rank_bytes, 32 * SwitchBytes(Softmax(32, 8, 128), shape));
    EXPECT_EQ(row.traffic.switch_bytes, ranks * row.rank_bytes);
    EXPECT_EQ(row.total_bytes, row.traffic.switch_bytes);
  }
}

// In one group. The last rank gets partials of all tokens before it, the first one queries of all after it.
TEST(PrefillTable, QueriesToRanksMoveWhatTheFormulaSays) {
  for (const int ranks : {2, 4, 8}) {
    PrefillTableInput input = Llama(ranks, 450e9);
    input.max_step_tokens = static_cast<int>(input.new_tokens);
    const PrefillTableRow row = RowOf(MakePrefillTable(input), "pass-q");
    EXPECT_TRUE(row.built);
    const PromptShape shape{.new_tokens = input.new_tokens, .ranks = ranks};
    EXPECT_EQ(row.rank_bytes, 32 * PassQBytes(Softmax(32, 8, 128), shape));
    const int64_t pairs = int64_t{ranks} * (ranks - 1) / 2, rows = input.new_tokens / ranks * 32;
    EXPECT_EQ(row.traffic.pass_q_bytes, 32 * pairs * rows * (128 * 2 + 130 * 4)) << "each asks all before it";
    EXPECT_EQ(row.total_bytes, row.traffic.pass_q_bytes);
  }
}

TEST(PrefillTable, MoreRanksThanHeadsCannotSwitch) {
  const auto rows = MakePrefillTable(Llama(64, 450e9));
  EXPECT_EQ(rows.back().softmax, "switch");
  EXPECT_FALSE(rows.back().possible);
  EXPECT_EQ(rows.back().why_not, "more ranks than the 32 query heads");
}

TEST(PrefillTable, HybridsCombineBothKindsOfLayer) {
  PrefillTableInput input = Llama(4, 50e9);
  const proto::LinearSpec linear{
      .heads = 32, .key_dim = 128, .value_dim = 128, .delta = true, .token_decay = true, .token_rate = true};
  input.attention = *proto::AttentionTable::Build({linear, linear, linear, Softmax(16, 2, 256)},
                                                  std::vector<proto::LinearConstants>(4));
  const auto rows = MakePrefillTable(input);
  EXPECT_EQ(rows.size(), 7u + (4 * 4 - 3) + 1) << "seven are built, three of which are of two direct exchanges";
  input.ranks = 2;
  EXPECT_EQ(MakePrefillTable(input).size(), 8u + (4 * 4 - 4) + 1)
      << "with as many KV heads as ranks the switch is, too";
  for (const PrefillTableRow& row : rows)
    if (row.softmax == "ring" && row.linear == "state-gather") {
      EXPECT_EQ(row.rank_bytes, (192 + 3 * 12) * kMiB);
    }
}

// Each group hands the state on between its ranks, three times where there are four.
TEST(PrefillTable, AChainThatIsBuiltCountsWhatTheFormulaSaysForEachGroup) {
  PrefillTableInput input = Llama(4, 50e9);
  input.new_tokens = 3 * 4 * input.max_step_tokens;
  const proto::LinearSpec linear{.heads = 32, .key_dim = 128, .value_dim = 128, .token_decay = true};
  input.attention = *proto::AttentionTable::Build({linear, linear}, std::vector<proto::LinearConstants>(2));
  const PromptShape shape{.new_tokens = input.new_tokens, .ranks = 4};
  int chains = 0;
  for (const PrefillTableRow& row : MakePrefillTable(input)) {
    if (row.linear != "chain") continue;
    ++chains;
    EXPECT_TRUE(row.built);
    EXPECT_EQ(row.traffic.chain_bytes, 2 * 3 * 3 * ChainBytes(linear, shape));
  }
  EXPECT_EQ(chains, 1);
}

}  // namespace
}  // namespace dovetail::scheduler
