#pragma once
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "absl/container/flat_hash_map.h"
#include "base/cancel_token.h"
#include "base/mutex.h"
#include "base/status.h"
#include "grammar/grammar_engine.h"

namespace dovetail::grammar {

// Compiles, on a thread of its own, what a step loop asks for and may not wait for.
// Threads: thread-safe.
class BackgroundCompiler {
 public:
  static constexpr size_t kMaxWaiting = 4096;  // more are taken when they are asked for again
  static constexpr size_t kMaxAnswers = 64;    // that were not fetched; the oldest are dropped, and made again

  // The engine outlives it.
  explicit BackgroundCompiler(GrammarEngine& engine) : engine_(engine) {}
  ~BackgroundCompiler();  // ends what is under way

  // nullopt: it is being compiled; ask again. Does not block.
  std::optional<absl::StatusOr<std::shared_ptr<const Compiled>>> Ask(const std::string& source);

 private:
  using Answer = absl::StatusOr<std::shared_ptr<const Compiled>>;
  void Run();

  GrammarEngine& engine_;
  CancelToken stop_;
  Mutex mutex_;
  CondVar wake_;
  std::deque<std::string> waiting_ ABSL_GUARDED_BY(mutex_);  // front: under way
  absl::flat_hash_map<std::string, Answer> answers_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::string> answered_ ABSL_GUARDED_BY(mutex_);  // the keys of answers_, oldest first
  std::thread thread_;                                        // from the first question on
};

}  // namespace dovetail::grammar
