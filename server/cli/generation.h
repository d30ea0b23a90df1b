#pragma once
#include <functional>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "base/status.h"
#include "engine/engine.h"

namespace dovetail::cli {

// Collects one request's updates; for commands and tests that wait for the end.
// Threads: thread-safe; the engine's thread writes, one other waits.
class CollectingSink final : public engine::GenerationSink {
 public:
  explicit CollectingSink(int choices = 1) : choices_(choices) {}

  struct Choice {
    std::vector<TokenId> tokens;
    std::vector<proto::PositionLogprobs> logprobs;
    std::vector<std::vector<float>> logits;
    bool finished = false;
    requests::FinishReason reason = requests::FinishReason::kStop;
  };

  void OnUpdate(requests::GenerationUpdate update) override;

  // Blocks until the request has ended or `tokens` output tokens (over all choices) are there.
  void WaitForTokens(size_t tokens);
  // Calls `token` for each output token of choice 0 as it comes; blocks until the end.
  void StreamTokens(const std::function<void(TokenId)>& token);
  // Blocks until the end; kError ends become a Status.
  absl::Status WaitForEnd();

  // After the end:
  const std::vector<Choice>& choices() const { return choices_; }
  const std::vector<float>& prompt_logits() const { return prompt_logits_; }
  const std::vector<proto::PositionLogprobs>& prompt_logprobs() const { return prompt_logprobs_; }
  const std::vector<float>& pooled() const { return pooled_; }
  int cached_tokens() const { return cached_tokens_; }
  int protocol_errors() const { return protocol_errors_; }  // positions repeated or skipped, updates after the end

 private:
  Mutex mutex_;
  CondVar changed_;
  std::vector<Choice> choices_;
  std::vector<float> prompt_logits_;
  std::vector<proto::PositionLogprobs> prompt_logprobs_;
  std::vector<float> pooled_;
  int cached_tokens_ = 0;
  int protocol_errors_ = 0;
  size_t tokens_ ABSL_GUARDED_BY(mutex_) = 0;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace dovetail::cli
