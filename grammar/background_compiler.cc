#include "grammar/background_compiler.h"

#include <algorithm>
#include <utility>

namespace dovetail::grammar {

BackgroundCompiler::~BackgroundCompiler() {
  {
    MutexLock lock(mutex_);
    stop_.Cancel();
  }
  wake_.notify_one();
  if (thread_.joinable()) thread_.join();
}

std::optional<absl::StatusOr<std::shared_ptr<const Compiled>>> BackgroundCompiler::Ask(const std::string& source) {
  if (auto known = engine_.Find(source)) return known;
  MutexLock lock(mutex_);
  if (const auto found = answers_.find(source); found != answers_.end()) {
    Answer answer = std::move(found->second);
    answers_.erase(found);
    std::erase(answered_, source);
    return answer;
  }
  if (waiting_.size() >= kMaxWaiting || std::find(waiting_.begin(), waiting_.end(), source) != waiting_.end())
    return std::nullopt;
  waiting_.push_back(source);
  if (!thread_.joinable()) thread_ = std::thread([this] { Run(); });
  wake_.notify_one();
  return std::nullopt;
}

void BackgroundCompiler::Run() {
  MutexLock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return stop_.cancelled() || !waiting_.empty(); });
    if (stop_.cancelled()) return;
    const std::string source = waiting_.front();
    lock.unlock();
    Answer answer = engine_.CompileAgain(source, stop_);
    lock.lock();
    waiting_.pop_front();
    if (answers_.size() >= kMaxAnswers) {
      answers_.erase(answered_.front());
      answered_.pop_front();
    }
    answered_.push_back(source);
    answers_.insert_or_assign(source, std::move(answer));
  }
}

}  // namespace dovetail::grammar
