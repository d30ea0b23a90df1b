#include "compute_worker/cuda/kept_rows.h"

#include <gtest/gtest.h>

#include "compute_worker/cuda/cuda_model.h"
#include "compute_worker/cuda/launch_runner.h"
#include "kernels/cuda/experts/expert_product.h"
#include "model/dummy_checkpoint.h"
#include "tests/support/test_data.h"

namespace dovetail::compute {
namespace {

using kernels::cuda::QuantKind;
using model::GgmlType;
using model::TensorSource;

TensorSource Matrix(GgmlType type, int64_t rows, int64_t cols) {
  TensorSource source;
  source.stored_name = "blk.0.ffn_gate_exps.weight";
  source.type = type;
  source.rows = rows;
  source.cols = cols;
  return source;
}

TEST(ExpertStacks, AreKeptWhereAllOfThemAreOfOneType) {
  const std::vector<TensorSource> sources(4, Matrix(GgmlType::kQ4_K, 24, 256));
  const ExpertStack pairs(sources, 2, false);
  ASSERT_TRUE(pairs.is_kept());
  EXPECT_EQ(pairs.rows(), 96);
  EXPECT_EQ(pairs.kept_rows().kind, QuantKind::kU4Offset);
  EXPECT_EQ(pairs.kept_rows().halves_of, 48);
  EXPECT_EQ(pairs.bytes(), 96u * 256 * 5 / 8 + 96 * 4) << "4 bits, a scale and an offset for 32, a factor for each row";
  EXPECT_EQ(pairs.scratch_bytes(), 96u * 256 * 2) << "all of them, since that is little";
  const ExpertStack single(sources, 1, false);
  EXPECT_FALSE(single.is_kept()) << "24 rows are no whole tiles";
  EXPECT_TRUE(single.is_dequantised());
  EXPECT_EQ(single.bytes(), 96u * 256 * 2);
  EXPECT_EQ(single.scratch_bytes(), 0u);
}

TEST(ExpertStacks, OfSeveralTypesAreDequantised) {
  std::vector<TensorSource> sources(4, Matrix(GgmlType::kQ4_K, 32, 256));
  sources[3].type = GgmlType::kQ6_K;
  EXPECT_TRUE(ExpertStack(sources, 2, false).is_dequantised());
  sources[3].type = GgmlType::kQ4_1;
  EXPECT_TRUE(ExpertStack(sources, 2, false).is_dequantised()) << "a tile is packed from rows of one type";
  const std::vector<TensorSource> wide(4, Matrix(GgmlType::kBF16, 32, 256));
  EXPECT_FALSE(ExpertStack(wide, 2, false).is_dequantised()) << "there is nothing to keep";
  EXPECT_FALSE(ExpertStack(wide, 2, false).is_kept());
  EXPECT_TRUE(ExpertStack(wide, 2, /*random=*/true).is_kept());
}

TEST(ExpertStacks, AreNamedByLayerAndByWhatIsMultipliedAtOnce) {
  model::ModelConfig config;
  const auto gate = ExpertStackOf("layers.3.experts.17.gate_proj.weight", config);
  const auto up = ExpertStackOf("layers.3.experts.4.up_proj.weight", config);
  const auto down = ExpertStackOf("layers.3.experts.4.down_proj.weight", config);
  ASSERT_TRUE(gate.has_value() && up.has_value() && down.has_value());
  EXPECT_EQ(gate->name, up->name);
  EXPECT_EQ(gate->each, 2);
  EXPECT_NE(gate->name, down->name);
  EXPECT_EQ(down->each, 1);
  EXPECT_FALSE(ExpertStackOf("layers.3.experts.4.down_proj.bias", config).has_value());
  EXPECT_FALSE(ExpertStackOf("layers.3.experts.latent_down_proj.weight", config).has_value());
  EXPECT_FALSE(ExpertStackOf("layers.3.mlp.up_proj.weight", config).has_value());
  config.activation = model::Activation::kRelu2;
  EXPECT_EQ(ExpertStackOf("layers.3.experts.4.up_proj.weight", config)->each, 1) << "there are no gates";
}

// A model of 30.5 billion weights, 29 of them experts': in 4 bits with scales and offsets, as Q4_K is kept, with what
// prompts unpack weights to.
TEST(KeptWeights, OfQwen3With30BFitInto20GB) {
  const auto checkpoint = model::OpenDummyCheckpoint(test::ProjectFile("models/shapes/qwen3-30b-a3b"));
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_GT(CudaModel::WeightBytes((*checkpoint)->config()), uint64_t{60'000'000'000}) << "in 16 bits";
  const auto bytes = CudaModel::KeptWeightBytes(**checkpoint, /*random=*/true);
  ASSERT_TRUE(bytes.ok()) << bytes.status();
  EXPECT_GT(*bytes, uint64_t{19'000'000'000});
  EXPECT_LT(*bytes, uint64_t{20'000'000'000});
}

TEST(ExpertTiles, OfKeptWeightsHaveFewRowsUntilUnpackingTakesLess) {
  using kernels::cuda::kFewTileRows;
  using kernels::cuda::kGroupedTileRows;
  using kernels::cuda::kManyTileRows;
  EXPECT_EQ(ExpertTileRows(79 * 128, 128, true, true), kFewTileRows);
  EXPECT_EQ(ExpertTileRows(80 * 128, 128, true, true), kGroupedTileRows);
  EXPECT_EQ(ExpertTileRows(80 * 128, 128, false, true), kManyTileRows);
  EXPECT_EQ(ExpertTileRows(31 * 128, 128, true, false), kernels::cuda::kMoreTileRows) << "in 16 bits as ever";
}

}  // namespace
}  // namespace dovetail::compute
