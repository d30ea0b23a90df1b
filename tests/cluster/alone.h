#pragma once
#include <filesystem>
#include <memory>
#include <utility>

#include "tests/cluster/test_engine.h"

namespace dovetail::test {

// What a request gets when the embedded engine has nothing else to do: one worker, one thread, every prompt in one
// chunk, nothing kept between requests. The model, in f32, is loaded for the first comparison. K and V are float32, or
// with a `storage` of 8 bits bfloat16 on the way there. Used by one thread.
class Alone {
 public:
  explicit Alone(std::filesystem::path model, DType state = DType::kF32, KvStorage storage = KvStorage::kAsSent)
      : path_(std::move(model)), state_(state), storage_(storage) {}

  // Fails the test unless every choice of `sink` has the tokens, and the logits of each to the bit, that it has here.
  // Of a request that was cancelled: as far as it got.
  void Expect(const requests::GenerationRequest& request, const cli::CollectingSink& sink, bool cancelled = false);

 private:
  engine::Engine& Engine();

  const std::filesystem::path path_;
  const DType state_;  // of linear states
  const KvStorage storage_;
  std::unique_ptr<TestModel> model_;
  std::unique_ptr<engine::EmbeddedCluster> engine_;
};

}  // namespace dovetail::test
