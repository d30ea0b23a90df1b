#include "server/cli/generation.h"

#include <iterator>
#include <utility>

namespace dovetail::cli {

void CollectingSink::OnUpdate(requests::GenerationUpdate update) {
  MutexLock lock(mutex_);
  if (finished_ || update.choice < 0 || update.choice >= static_cast<int>(choices_.size())) {
    ++protocol_errors_;
    return;
  }
  Choice& choice = choices_[update.choice];
  if (choice.finished && (!update.tokens.empty() || update.choice_finished)) ++protocol_errors_;
  if (!update.tokens.empty() && update.first_index != static_cast<int>(choice.tokens.size())) ++protocol_errors_;
  tokens_ += update.tokens.size();
  choice.tokens.insert(choice.tokens.end(), update.tokens.begin(), update.tokens.end());
  std::move(update.logprobs.begin(), update.logprobs.end(), std::back_inserter(choice.logprobs));
  std::move(update.logits.begin(), update.logits.end(), std::back_inserter(choice.logits));
  std::move(update.prompt_logprobs.begin(), update.prompt_logprobs.end(), std::back_inserter(prompt_logprobs_));
  if (!update.prompt_logits.empty()) prompt_logits_ = std::move(update.prompt_logits);
  if (!update.pooled.empty()) pooled_ = std::move(update.pooled);
  cached_tokens_ = update.cached_tokens;
  if (update.choice_finished) {
    choice.finished = true;
    choice.reason = update.reason;
    if (update.reason == requests::FinishReason::kError && status_.ok())
      status_ = absl::Status(
          update.error_code == absl::StatusCode::kOk ? absl::StatusCode::kInternal : update.error_code, update.error);
  }
  finished_ = update.request_finished;
  changed_.notify_all();
}

void CollectingSink::WaitForTokens(size_t tokens) {
  MutexLock lock(mutex_);
  changed_.wait(lock, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return finished_ || tokens_ >= tokens; });
}

void CollectingSink::StreamTokens(const std::function<void(TokenId)>& token) {
  MutexLock lock(mutex_);
  for (size_t next = 0;; ++next) {
    changed_.wait(
        lock, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return finished_ || choices_[0].tokens.size() > next; });
    if (choices_[0].tokens.size() <= next) return;
    const TokenId id = choices_[0].tokens[next];
    lock.unlock();
    token(id);
    lock.lock();
  }
}

absl::Status CollectingSink::WaitForEnd() {
  MutexLock lock(mutex_);
  changed_.wait(lock, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return finished_; });
  return status_;
}

}  // namespace dovetail::cli
