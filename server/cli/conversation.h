#pragma once
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "base/mutex.h"
#include "base/status.h"
#include "engine/engine.h"
#include "server/openai/served_model.h"

namespace dovetail::cli {

struct AnswerOptions {
  bool raw = false;                  // continue the prompt as it is, without a chat template
  std::optional<float> temperature;  // none: what the model recommends
  int max_tokens = 256;              // less where the model's positions end
  uint64_t seed = 0;
  int64_t max_model_len = 0;
};

// What an answer took.
struct Answer {
  std::string text;
  int tokens = 0;
  bool cut = false;                         // by max_tokens
  bool cancelled = false;                   // by the reader
  absl::Duration first_token, after_first;  // until the first token; from then to the last
};

// A conversation with a model, as the `run` command holds it. Without a chat template, or where options ask for it,
// each message is continued alone.
// Threads: thread-compatible, except Cancel(), which is thread-safe.
class Conversation {
 public:
  // All outlive it.
  Conversation(engine::Engine& engine, const server::ServedModel& model, const AnswerOptions& options)
      : engine_(engine), model_(model), options_(options) {}

  void SetSystem(std::string text);                    // empty: none; begins anew
  void Clear() { messages_ = server::Json::array(); }  // keeps the system message

  // Answers a message; calls `show` with text as it comes. Blocks until the end. After an error the message counts as
  // not said, and so it does where Cancel() comes before its answer begins. What was shown of an answer that was
  // cancelled stays in the conversation.
  absl::StatusOr<Answer> Ask(const std::string& message, const std::function<void(const std::string&)>& show);

  void Cancel();  // ends the answer under way, or the next one if there is none; from any thread

 private:
  absl::StatusOr<std::vector<TokenId>> PromptOf(const std::string& message);
  absl::StatusOr<requests::GenerationRequest> RequestOf(std::vector<TokenId> prompt);

  engine::Engine& engine_;
  const server::ServedModel& model_;
  const AnswerOptions options_;
  std::string system_;
  server::Json messages_ = server::Json::array();
  uint64_t turns_ = 0;
  Mutex mutex_;
  std::optional<RequestId> running_ ABSL_GUARDED_BY(mutex_);
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;  // the answer under way, or the next one
};

// "[42 tokens, 31.2 tok/s, the first after 0.12 s]"
std::string Describe(const Answer& answer);

}  // namespace dovetail::cli
