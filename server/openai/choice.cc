#include "server/openai/choice.h"

#include <algorithm>

#include "base/check.h"

namespace dovetail::server {

Choice::Choice(const ServedModel& model, const ResponseSpec& spec, size_t echoed_code_points)
    : spec_(spec), echoed_(echoed_code_points) {
  if (model.tokenizer == nullptr) return;
  detokenizer_.emplace(*model.tokenizer, model::DetokenizeOptions{.skip_special_tokens = spec.skip_special_tokens});
  if (spec.stop.empty()) return;
  auto matcher = model::StopMatcher::Create(spec.stop, spec.include_stop);
  DT_CHECK(matcher.ok(), "stop strings were checked");
  matcher_ = *std::move(matcher);
}

std::string Choice::Watch(std::string text) {
  if (!matcher_) return text;
  return completion_tokens_ < spec_.min_tokens ? matcher_->PushUnwatched(text) : matcher_->Push(text);
}

void Choice::AddToken(const requests::GenerationUpdate& update, size_t i, Delta& delta) {
  const TokenId token = update.tokens[i];
  ++completion_tokens_;
  ++delta.counted;
  delta.tokens.push_back(token);
  if (i < update.logprobs.size()) cumulative_logprob_ += update.logprobs[i].chosen.logprob;

  const bool ends = update.choice_finished && update.stop_token == token && i + 1 == update.tokens.size();
  const auto& mine = spec_.user_stop_token_ids;
  const bool shown = !ends || (spec_.include_stop && std::find(mine.begin(), mine.end(), token) != mine.end());
  if (!shown) return;
  const size_t offset = detokenizer_ ? detokenizer_->emitted_code_points() : 0;
  if (detokenizer_) delta.text += Watch(detokenizer_->Push(token));
  if (spec_.logprobs >= 0 && i < update.logprobs.size())
    delta.logprobs.push_back({update.logprobs[i], echoed_ + offset});
}

void Choice::Finish(const requests::GenerationUpdate& update, Delta& delta) {
  if (detokenizer_ && !(matcher_ && matcher_->match())) {
    delta.text += Watch(detokenizer_->Flush());
    if (matcher_ && !matcher_->match()) delta.text += matcher_->Finish();
  }
  finished_ = delta.finished = true;
  if (matcher_ && matcher_->match()) {
    finish_reason_ = "stop";
    stop_reason_ = spec_.stop[matcher_->match()->index];
  } else {
    finish_reason_ = update.reason == requests::FinishReason::kLength ? "length" : "stop";
    const auto& mine = spec_.user_stop_token_ids;
    if (update.stop_token >= 0 && std::find(mine.begin(), mine.end(), update.stop_token) != mine.end())
      stop_reason_ = update.stop_token;
  }
}

Choice::Delta Choice::Add(const requests::GenerationUpdate& update) {
  Delta delta;
  if (finished_) return delta;
  if (!spec_.drop_output) {
    for (size_t i = 0; i < update.tokens.size(); ++i) {
      AddToken(update, i, delta);
      if (matcher_ && matcher_->match()) {
        delta.stop_in_engine = !update.choice_finished;
        Finish(update, delta);
        return delta;
      }
    }
  }
  if (update.choice_finished) {
    Finish(update, delta);
    if (spec_.drop_output) finish_reason_ = "length";
  }
  return delta;
}

}  // namespace dovetail::server
