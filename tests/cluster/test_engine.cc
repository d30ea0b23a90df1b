#include "tests/cluster/test_engine.h"

#include <gtest/gtest.h>

#include <thread>
#include <utility>

#include "base/clock.h"
#include "model/checkpoint.h"
#include "server/cli/model_text.h"

namespace dovetail::test {

absl::StatusOr<std::unique_ptr<TestModel>> TestModel::Load(const std::filesystem::path& path,
                                                           model::WeightFormat format,
                                                           const kernels::CpuDeviceOptions& device) {
  auto loaded = std::make_unique<TestModel>();
  DT_ASSIGN_OR_RETURN(loaded->device, kernels::CreateCpuDevice(device));
  DT_ASSIGN_OR_RETURN(std::unique_ptr<model::Checkpoint> checkpoint, model::OpenCheckpoint(path));
  const auto stream = loaded->device->CreateStream();
  DT_ASSIGN_OR_RETURN(loaded->model, model::LoadModel(std::move(checkpoint), format, &stream->pool(), {}));
  loaded->model->grammars = cli::MakeGrammars(*loaded->model->checkpoint);
  return loaded;
}

engine::EmbeddedClusterOptions ClusterOptionsFor(const TestModel& model, DType kv) {
  engine::EmbeddedClusterOptions options;
  options.kv_dtype = kv;
  options.scheduler.max_model_len = static_cast<int>(model.config().max_positions);
  options.scheduler.max_num_seqs = 8;
  options.scheduler.max_num_batched_tokens = 512;
  options.poison_freed_kv = true;
  return options;
}

absl::StatusOr<std::unique_ptr<engine::EmbeddedCluster>> StartCluster(const TestModel& model,
                                                                      const engine::EmbeddedClusterOptions& options) {
  return engine::EmbeddedCluster::Create(*model.model, *model.device, options);
}

absl::StatusOr<std::shared_ptr<cli::CollectingSink>> Generate(engine::Engine& engine,
                                                              requests::GenerationRequest request) {
  auto sink = std::make_shared<cli::CollectingSink>(request.choices);
  DT_RETURN_IF_ERROR(engine.Submit(std::move(request), sink).status());
  DT_RETURN_IF_ERROR(sink->WaitForEnd());
  return sink;
}

requests::GenerationRequest GreedyRequest(std::vector<TokenId> prompt, int max_tokens) {
  requests::GenerationRequest request;
  request.tenant = "test";
  request.prompt = std::move(prompt);
  request.sampling.temperature = 0;
  request.max_tokens = max_tokens;
  return request;
}

std::shared_ptr<cli::CollectingSink> Submit(engine::Engine& engine, const requests::GenerationRequest& request) {
  auto sink = std::make_shared<cli::CollectingSink>(request.choices);
  const auto id = engine.Submit(request, sink);
  EXPECT_TRUE(id.ok()) << id.status();
  return sink;
}

bool Eventually(const std::function<bool()>& condition) {
  const absl::Time end = SystemClock().Now() + absl::Seconds(60);
  while (!condition()) {
    if (SystemClock().Now() > end) return false;
    std::this_thread::yield();
  }
  return true;
}

}  // namespace dovetail::test
