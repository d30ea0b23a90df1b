#include "server/openai/choice.h"

#include <algorithm>

#include "base/check.h"

namespace dovetail::server {

Choice::Choice(const ServedModel& model, const ResponseSpec& spec, size_t echoed_code_points)
    : spec_(spec), echoed_(echoed_code_points) {
  if (model.tokenizer == nullptr) return;
  detokenizer_.emplace(*model.tokenizer, model::DetokenizeOptions{.skip_special_tokens = spec.skip_special_tokens,
                                                                  .shown_special = spec.answer.marks});
  if (spec.answer.parsed()) parser_ = MakeAnswerParser(spec.answer);
  if (spec.stop.empty()) return;
  auto matcher = model::StopMatcher::Create(spec.stop, spec.include_stop);
  DT_CHECK(matcher.ok(), "stop strings were checked");
  matcher_ = *std::move(matcher);
}

std::string Choice::Watch(std::string text) {
  if (!matcher_) return text;
  return completion_tokens_ < spec_.min_tokens ? matcher_->PushUnwatched(text) : matcher_->Push(text);
}

// Text of the model, towards the delta.
void Choice::Take(std::string_view text, Delta& delta) {
  if (parser_ == nullptr) {
    delta.text += Watch(std::string(text));
    return;
  }
  AnswerPieces pieces;
  parser_->Push(text, pieces);
  TakeApart(pieces, delta);
}

// Stop strings are looked for in content alone; what is held back of it comes before what follows it.
void Choice::TakeApart(const AnswerPieces& pieces, Delta& delta) {
  using Kind = AnswerPiece::Kind;
  AnswerPieces& shown = delta.pieces;
  for (const AnswerPiece& piece : pieces.all()) {
    if (ended_here()) break;
    if (piece.kind == Kind::kContent) {
      shown.Content(Watch(piece.text));
      continue;
    }
    if (matcher_) shown.Content(matcher_->Finish());
    if (piece.kind == Kind::kReasoning && !spec_.answer.show_reasoning) continue;
    shown.Add(piece.kind, piece.text, piece.id);
    called_ |= piece.kind == Kind::kCallBegins;
    last_call_ended_ |= piece.kind == Kind::kCallEnds && !spec_.answer.parallel_calls;
  }
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
  const bool thought = parser_ != nullptr && parser_->thinking();
  if (detokenizer_) Take(detokenizer_->Push(token), delta);
  if (thought || (parser_ != nullptr && parser_->thinking())) ++reasoning_tokens_;
  if (spec_.logprobs >= 0 && i < update.logprobs.size())
    delta.logprobs.push_back({update.logprobs[i], echoed_ + offset});
}

// What was held back.
void Choice::Flush(Delta& delta) {
  Take(detokenizer_->Flush(), delta);
  if (parser_ != nullptr) {
    AnswerPieces pieces;
    parser_->Finish(pieces);
    TakeApart(pieces, delta);
  }
  if (!matcher_ || matcher_->match()) return;
  if (parser_ == nullptr)
    delta.text += matcher_->Finish();
  else
    delta.pieces.Content(matcher_->Finish());
}

void Choice::Finish(const requests::GenerationUpdate& update, Delta& delta) {
  if (detokenizer_ && !ended_here()) Flush(delta);
  finished_ = delta.finished = true;
  if (matcher_ && matcher_->match()) {
    finish_reason_ = "stop";
    stop_reason_ = spec_.stop[matcher_->match()->index];
  } else {
    finish_reason_ = update.reason == requests::FinishReason::kLength && !last_call_ended_ ? "length"
                     : called_                                                             ? "tool_calls"
                                                                                           : "stop";
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
      if (ended_here()) {
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
