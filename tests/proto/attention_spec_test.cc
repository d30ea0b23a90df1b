#include "proto/attention_spec.h"

#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/kv_blocks.h"

namespace dovetail::proto {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

SoftmaxSpec Spec(int window = 0) {
  SoftmaxSpec spec;
  spec.query_heads = 8;
  spec.kv_heads = 2;
  spec.key_dim = spec.value_dim = 64;
  spec.scale = 0.125f;
  spec.window = window;
  return spec;
}

template <typename Change>
std::string With(Change change) {
  SoftmaxSpec spec = Spec();
  change(spec);
  const auto table = AttentionTable::Build({Spec(), spec});
  return table.ok() ? "accepted" : std::string(table.status().message());
}

TEST(AttentionTable, GroupsOpsOfEqualSpecInOrderOfFirstAppearance) {
  const auto table = *AttentionTable::Build({Spec(512), Spec(), Spec(512), Spec(), Spec()});
  EXPECT_EQ(table.op_count(), 5);
  EXPECT_EQ(table.group_count(), 2);
  EXPECT_THAT(table.op_group, ElementsAre(LayerGroup(0), LayerGroup(1), LayerGroup(0), LayerGroup(1), LayerGroup(1)));
  EXPECT_THAT(table.op_index_in_group, ElementsAre(0, 0, 1, 1, 2));
  EXPECT_THAT(table.ops_in_group, ElementsAre(2, 3));
  EXPECT_EQ(table.softmax(LayerGroup(0)).window, 512);
  EXPECT_EQ(table.softmax(LayerGroup(1)).group_size(), 4);
}

TEST(AttentionTable, NamesTheOpAndTheLimit) {
  EXPECT_THAT(With([](SoftmaxSpec& s) { s.kv_heads = 0; }),
              HasSubstr("attention op 1: 8 query and 0 KV heads are outside 1..1024"));
  EXPECT_THAT(With([](SoftmaxSpec& s) { s.query_heads = 1025; }), HasSubstr("outside 1..1024"));
  EXPECT_THAT(With([](SoftmaxSpec& s) { s.kv_heads = 3; }), HasSubstr("8 query heads are no multiple of 3 KV heads"));
  EXPECT_THAT(With([](SoftmaxSpec& s) { s.kv_heads = 16; }), HasSubstr("8 query heads are no multiple of 16 KV heads"));
  for (const int dim : {0, -2, 63, 258}) {
    EXPECT_THAT(With([&](SoftmaxSpec& s) { s.key_dim = dim; }), HasSubstr("is not an even number in 2..256"));
    EXPECT_THAT(With([&](SoftmaxSpec& s) { s.value_dim = dim; }), HasSubstr("is not an even number in 2..256"));
  }
  EXPECT_THAT(With([](SoftmaxSpec& s) { s.scale = std::numeric_limits<float>::quiet_NaN(); }), HasSubstr("not usable"));
  EXPECT_THAT(With([](SoftmaxSpec& s) { s.window = -1; }), HasSubstr("window -1 is not usable"));
}

TEST(KvBlocks, AWorkerThatHoldsNoWholeSequenceIsToldWhatOneTakesAndOthersNothing) {
  const auto table = *AttentionTable::Build({Spec(), Spec(512)});
  EXPECT_EQ(BlocksPerSegment(table), 4u);
  EXPECT_EQ(TooFewForASequence(table, 8, 1000), "");
  EXPECT_EQ(TooFewForASequence(table, 7, 1000),
            "--kv-capacity: 7 KV blocks hold less than 128 tokens of a sequence of this model, which take 8; only "
            "parts of sequences may lie there: give it 8KiB or more");
}

TEST(AttentionTable, HasAtLeastOneOpAndNotTooManyOpsOrGroups) {
  EXPECT_THAT(std::string(AttentionTable::Build({}).status().message()),
              HasSubstr("a model has 0 attention ops; 1..1024"));
  EXPECT_TRUE(AttentionTable::Build(std::vector<AttentionSpec>(kMaxAttentionOps, Spec())).ok());
  EXPECT_FALSE(AttentionTable::Build(std::vector<AttentionSpec>(kMaxAttentionOps + 1, Spec())).ok());
  std::vector<AttentionSpec> different;
  for (int i = 0; i < kMaxLayerGroups; ++i) different.push_back(Spec(i));
  EXPECT_TRUE(AttentionTable::Build(different).ok());
  different.push_back(Spec(99));
  EXPECT_THAT(std::string(AttentionTable::Build(different).status().message()),
              HasSubstr("more than 16 different specs"));
}

LinearSpec State() {
  LinearSpec spec;
  spec.heads = 4;
  spec.key_dim = 16;
  spec.value_dim = 24;
  spec.blocks_per_head = 3;
  return spec;
}

TEST(KvBlocks, ASequenceOfAModelWithStatesTakesTheSameAtAnyLengthBeyondAChunkAndAWindowToo) {
  LinearConstants constants;
  constants.log_decay.assign(4, -0.1f);
  const auto states = *AttentionTable::Build({State()}, {constants});
  const uint64_t most = BlocksOfSequence(states, 1 << 20, /*max_chunk=*/128);
  EXPECT_EQ(most, 4u * 3 * (2 + 2 + 3)) << "of 4 heads with 3 blocks: window of 65 tokens, a chunk, and 3";
  EXPECT_EQ(BlocksOfSequence(states, 1000, 128), most);
  EXPECT_EQ(BlocksOfSequence(states, 64, 128), 4u * 3);
  const auto mixed = *AttentionTable::Build({Spec(), Spec(512)});  // 2 heads each
  EXPECT_EQ(BlocksOfSequence(mixed, 64000, 128), 2u * 1000 + 2u * (8 + 2 + 3));
  EXPECT_EQ(BlocksOfSequence(mixed, 256, 128), 2u * 4 + 2u * 4);
}

TEST(AttentionTable, ALinearStateLooksLikeAttentionOverTheLastBlock) {
  LinearConstants constants;
  constants.log_decay.assign(4, -0.1f);
  const auto table = *AttentionTable::Build({Spec(), State()}, {{}, constants});
  EXPECT_TRUE(table.has_linear());
  EXPECT_EQ(table.linear(LayerGroup(0)), nullptr);
  ASSERT_NE(table.linear(LayerGroup(1)), nullptr);
  const SoftmaxSpec& view = table.softmax(LayerGroup(1));
  EXPECT_EQ(view.kv_heads, 4);
  EXPECT_EQ(view.group_size(), 1);
  EXPECT_EQ(view.window, 65);  // at any position: the block before, and the tokens since
  EXPECT_EQ(view.blocks_per_head, 3);
  EXPECT_EQ(view.gates, 0);
  LinearSpec gated = State();
  gated.delta = gated.token_decay = gated.token_rate = true;
  EXPECT_EQ(gated.gates(), 2);
  gated.vector_decay = true;
  EXPECT_EQ(gated.gates(), 17);
}

TEST(AttentionTable, SinksAreConstantsOfSoftmaxAttention) {
  LinearConstants sinks;
  sinks.sinks.assign(Spec().query_heads, 0.5f);
  const auto table = *AttentionTable::Build({Spec(), Spec()}, {{}, sinks});
  EXPECT_FALSE(table.has_linear());
  EXPECT_EQ(table.group_count(), 1) << "they are no part of the spec";
  EXPECT_EQ(table.sinks(0), nullptr);
  ASSERT_NE(table.sinks(1), nullptr);
  EXPECT_EQ(table.sinks(1)[0], 0.5f);
  sinks.sinks.pop_back();
  EXPECT_THAT(std::string(AttentionTable::Build({Spec(), Spec()}, {{}, sinks}).status().message()),
              HasSubstr("attention op 1: its constants do not fit its spec"));
  EXPECT_EQ(AttentionTable::Build({Spec()}, {{}})->sinks(0), nullptr);
  LinearConstants of_state;
  of_state.log_decay.assign(4, -0.1f);
  of_state.sinks.assign(4, 0.5f);
  EXPECT_THAT(std::string(AttentionTable::Build({State()}, {of_state}).status().message()),
              HasSubstr("its constants do not fit its spec"));
}

TEST(AttentionTable, StatesWhoseConstantsDoNotFitAreNamed) {
  const auto message = [](LinearSpec spec, LinearConstants constants) {
    const auto table = AttentionTable::Build({spec}, {std::move(constants)});
    return table.ok() ? "accepted" : std::string(table.status().message());
  };
  LinearConstants decays;
  decays.log_decay.assign(4, -0.1f);
  EXPECT_EQ(message(State(), decays), "accepted");
  EXPECT_THAT(message(State(), {}), HasSubstr("attention op 0: its constants do not fit its spec"));
  LinearConstants infinite = decays;
  infinite.log_decay[2] = std::numeric_limits<float>::infinity();
  EXPECT_THAT(message(State(), infinite), HasSubstr("a constant is not finite"));
  LinearSpec delta = State();
  delta.delta = true;
  EXPECT_THAT(message(delta, decays), HasSubstr("contradicts itself"));
  LinearSpec wide = State();
  wide.conv_width = 9;
  EXPECT_THAT(message(wide, decays), HasSubstr("a convolution over 9 tokens"));
  EXPECT_THAT(std::string(AttentionTable::Build({State()}).status().message()),
              HasSubstr("a model of 1 attention ops has constants of 0"));
}

}  // namespace
}  // namespace dovetail::proto
