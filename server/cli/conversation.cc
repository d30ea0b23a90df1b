#include "server/cli/conversation.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_format.h"
#include "base/clock.h"
#include "model/tokenizer/detokenizer.h"
#include "server/cli/generation.h"

namespace dovetail::cli {

void Conversation::SetSystem(std::string text) {
  system_ = std::move(text);
  Clear();
}

absl::StatusOr<std::vector<TokenId>> Conversation::PromptOf(const std::string& message) {
  if (options_.raw || !model_.chat) return model_.tokenizer->Encode(message);
  server::ChatPrompt chat;
  chat.messages = server::Json::array();
  if (!system_.empty()) chat.messages.push_back({{"role", "system"}, {"content", system_}});
  for (const server::Json& said : messages_) chat.messages.push_back(said);
  chat.messages.push_back({{"role", "user"}, {"content", message}});
  DT_ASSIGN_OR_RETURN(const auto parts, model_.chat(chat));
  return model_.tokenizer->EncodeParts(parts);
}

absl::StatusOr<requests::GenerationRequest> Conversation::RequestOf(std::vector<TokenId> prompt) {
  const int64_t room = options_.max_model_len - static_cast<int64_t>(prompt.size());
  if (room < 1)
    return InvalidArgument("the conversation has ", prompt.size(), " tokens, and the model takes ",
                           options_.max_model_len, "; /clear begins anew");
  requests::GenerationRequest request;
  request.tenant = "terminal";
  request.prompt = std::move(prompt);
  const server::SamplingDefaults& defaults = model_.defaults;
  request.sampling.temperature = options_.temperature.value_or(defaults.temperature.value_or(1.0f));
  request.sampling.top_p = defaults.top_p.value_or(1.0f);
  request.sampling.min_p = defaults.min_p.value_or(0.0f);
  request.sampling.top_k = defaults.top_k.value_or(0);
  request.sampling.repetition_penalty = defaults.repetition_penalty.value_or(1.0f);
  request.sampling.seed = options_.seed + turns_++;
  request.max_tokens = static_cast<int>(std::clamp<int64_t>(options_.max_tokens, 1, room));
  request.stop_token_ids = model_.end_token_ids;
  return request;
}

absl::StatusOr<Answer> Conversation::Ask(const std::string& message,
                                         const std::function<void(const std::string&)>& show) {
  const absl::Cleanup ended = [this] {
    MutexLock lock(mutex_);
    running_.reset();
    cancelled_ = false;
  };
  DT_ASSIGN_OR_RETURN(std::vector<TokenId> prompt, PromptOf(message));
  DT_ASSIGN_OR_RETURN(requests::GenerationRequest request, RequestOf(std::move(prompt)));
  const auto sink = std::make_shared<CollectingSink>();
  const absl::Time begun = SystemClock().Now();
  {
    MutexLock lock(mutex_);
    if (cancelled_) return Answer{.cancelled = true};
    DT_ASSIGN_OR_RETURN(running_, engine_.Submit(std::move(request), sink));
  }
  Answer answer;
  absl::Time first = begun, last = begun;
  model::IncrementalDetokenizer text(*model_.tokenizer, {});
  const auto add = [&](const std::string& piece) {
    answer.text += piece;
    if (!piece.empty()) show(piece);
  };
  sink->StreamTokens([&](TokenId token) {
    last = SystemClock().Now();
    if (answer.tokens++ == 0) first = last;
    add(text.Push(token));
  });
  DT_RETURN_IF_ERROR(sink->WaitForEnd());
  add(text.Flush());
  answer.cancelled = sink->choices()[0].reason == requests::FinishReason::kCancelled;
  answer.cut = sink->choices()[0].reason == requests::FinishReason::kLength;
  answer.first_token = first - begun;
  answer.after_first = last - first;
  messages_.push_back({{"role", "user"}, {"content", message}});
  messages_.push_back({{"role", "assistant"}, {"content", answer.text}});
  return answer;
}

void Conversation::Cancel() {
  MutexLock lock(mutex_);
  cancelled_ = true;
  if (running_) engine_.Cancel(*running_);
}

std::string Describe(const Answer& answer) {
  std::string text = absl::StrFormat("[%d tokens", answer.tokens);
  if (answer.tokens > 1 && answer.after_first > absl::ZeroDuration())
    absl::StrAppendFormat(&text, ", %.1f tok/s", (answer.tokens - 1) / absl::ToDoubleSeconds(answer.after_first));
  if (answer.tokens > 0)
    absl::StrAppendFormat(&text, ", the first after %.2f s", absl::ToDoubleSeconds(answer.first_token));
  if (answer.cancelled) text += ", stopped";
  if (answer.cut) text += ", cut by --max-tokens or the model's length";
  return text + "]";
}

}  // namespace dovetail::cli
