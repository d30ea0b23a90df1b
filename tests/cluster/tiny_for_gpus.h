#pragma once
#include <filesystem>
#include <memory>
#include <utility>
#include <vector>

#include "base/status.h"
#include "model/checkpoint.h"
#include "tests/cluster/test_engine.h"
#include "tests/cluster/tiny_hybrid.h"
#include "tests/cluster/tiny_model.h"
#include "tests/support/test_data.h"

namespace dovetail::test {

// A tiny model for tests of GPUs, and a CPU that has it in bf16: the reference.
struct TinyForGpus {
  std::unique_ptr<TestModel> cpu;
  std::unique_ptr<engine::EmbeddedCluster> reference;
  std::unique_ptr<model::LoadedModel> model;  // its weights are for a GPU to load

  static absl::StatusOr<TinyForGpus> Make(bool with_linear_layers) {
    TinyForGpus tiny;
    const auto path = with_linear_layers ? WriteTinyFolder(TinyGatedDeltaConfig(), 5, TempFolder())
                                         : WriteTinyModel({.layers = 4}, TempFolder());
    DT_ASSIGN_OR_RETURN(tiny.cpu, TestModel::Load(path, model::WeightFormat::kBF16));
    DT_ASSIGN_OR_RETURN(tiny.reference, StartCluster(*tiny.cpu, ClusterOptionsFor(*tiny.cpu, DType::kBF16)));
    DT_ASSIGN_OR_RETURN(auto checkpoint, model::OpenCheckpoint(path));
    DT_ASSIGN_OR_RETURN(tiny.model,
                        model::LoadModel(std::move(checkpoint), model::WeightFormat::kElsewhere, nullptr, {}));
    return tiny;
  }
};

// So many of its tokens, which hardly repeat; others for another seed.
inline std::vector<TokenId> UnlikeTokens(int count, int seed) {
  std::vector<TokenId> tokens;
  for (int64_t i = 0; i < count; ++i) tokens.push_back(static_cast<TokenId>(1 + (17 * i * i + (31 + seed) * i) % 90));
  return tokens;
}

}  // namespace dovetail::test
