#pragma once
#include <filesystem>
#include <functional>
#include <memory>
#include <vector>

#include "base/status.h"
#include "engine/embedded_cluster.h"
#include "kernels/device.h"
#include "model/loaded_model.h"
#include "server/cli/generation.h"

// The whole engine in a test: a model from a file, a cluster over it, requests in and what came of them out.

namespace dovetail::test {

// A model packed for a device, to be shared by any number of clusters. Not movable: clusters hold references.
struct TestModel {
  std::unique_ptr<kernels::Device> device;
  std::unique_ptr<model::LoadedModel> model;

  const model::ModelConfig& config() const { return model->config(); }

  static absl::StatusOr<std::unique_ptr<TestModel>> Load(const std::filesystem::path& path, model::WeightFormat format,
                                                         const kernels::CpuDeviceOptions& device = {.threads = 2});
};

// Options with every length the model allows, chunks of at most 512 tokens, K and V in `kv`.
engine::EmbeddedClusterOptions ClusterOptionsFor(const TestModel& model, DType kv);

absl::StatusOr<std::unique_ptr<engine::EmbeddedCluster>> StartCluster(const TestModel& model,
                                                                      const engine::EmbeddedClusterOptions& options);

// Submits the request and waits for its end.
absl::StatusOr<std::shared_ptr<cli::CollectingSink>> Generate(engine::Engine& engine,
                                                              requests::GenerationRequest request);

// Submits the request and returns at once. Fails the test if it is refused.
std::shared_ptr<cli::CollectingSink> Submit(engine::Engine& engine, const requests::GenerationRequest& request);

// A greedy request; nothing ends it before max_tokens.
requests::GenerationRequest GreedyRequest(std::vector<TokenId> prompt, int max_tokens);

// Polls until the condition holds; false after a time that only a hang takes.
bool Eventually(const std::function<bool()>& condition);

}  // namespace dovetail::test
