#include "server/grpc/generate_response.h"

#include <algorithm>
#include <utility>

namespace dovetail::server {

namespace pb = vllm::grpc::engine;

namespace {

void AddTop(const proto::PositionLogprobs& position, pb::TopLogProbs& out) {
  for (const proto::TokenLogprob& top : position.top) {
    out.add_values(top.logprob);
    out.add_token_ids(static_cast<uint32_t>(top.token));
  }
}

void AddLogprob(const proto::PositionLogprobs& position, pb::OutputLogProbs& out) {
  out.add_token_logprobs(position.chosen.logprob);
  out.add_token_ids(static_cast<uint32_t>(position.chosen.token));
  AddTop(position, *out.add_top_logprobs());
}

}  // namespace

GenerateResponseBuilder::GenerateResponseBuilder(const ServedModel& model, ResponseSpec spec) : spec_(std::move(spec)) {
  outputs_.reserve(spec_.n);
  for (int i = 0; i < spec_.n; ++i) outputs_.emplace_back(model, spec_);
  if (spec_.prompt_logprobs < 0) return;
  // The first token of a prompt has no logprob.
  prompt_logprobs_.add_token_logprobs();
  prompt_logprobs_.add_token_ids(static_cast<uint32_t>(spec_.prompts.front().front()));
  prompt_logprobs_.add_top_logprobs();
}

void GenerateResponseBuilder::FillPromptLogprobs(const requests::GenerationUpdate& update) {
  for (const proto::PositionLogprobs& position : update.prompt_logprobs) {
    prompt_logprobs_.add_token_logprobs()->set_value(position.chosen.logprob);
    prompt_logprobs_.add_token_ids(static_cast<uint32_t>(position.chosen.token));
    AddTop(position, *prompt_logprobs_.add_top_logprobs());
  }
}

bool GenerateResponseBuilder::stopped_at_length() const {
  return std::any_of(outputs_.begin(), outputs_.end(),
                     [](const Output& output) { return output.choice.finish_reason() == "length"; });
}

GenerateResponseBuilder::Step GenerateResponseBuilder::Add(const requests::GenerationUpdate& update) {
  Step step;
  FillPromptLogprobs(update);
  if (update.choice < 0 || update.choice >= static_cast<int>(outputs_.size())) return step;
  Output& output = outputs_[update.choice];
  if (output.complete) return step;
  const Choice::Delta delta = output.choice.Add(update);
  step.tokens = delta.counted;
  if (delta.stop_in_engine) step.stop_choices.push_back(update.choice);
  output.tokens.insert(output.tokens.end(), delta.tokens.begin(), delta.tokens.end());
  pb::OutputLogProbs logprobs;
  if (spec_.logprobs >= 0)
    for (size_t i = 0; i < delta.tokens.size() && i < update.logprobs.size(); ++i)
      AddLogprob(update.logprobs[i], logprobs);
  const int completion_tokens = static_cast<int>(output.tokens.size());
  if (spec_.stream && !delta.tokens.empty()) {
    pb::GenerateStreamChunk& chunk = *step.messages.emplace_back().mutable_chunk();
    chunk.mutable_token_ids()->Add(delta.tokens.begin(), delta.tokens.end());
    chunk.set_prompt_tokens(update.prompt_tokens);
    chunk.set_completion_tokens(completion_tokens);
    chunk.set_cached_tokens(update.cached_tokens);
    chunk.set_index(update.choice);
    if (spec_.logprobs >= 0) *chunk.mutable_output_logprobs() = logprobs;
    if (spec_.prompt_logprobs >= 0 && !std::exchange(prompt_logprobs_sent_, true))
      *chunk.mutable_input_logprobs() = prompt_logprobs_;
  }
  output.logprobs.MergeFrom(logprobs);
  if (!delta.finished) return step;
  output.complete = true;
  pb::GenerateComplete& complete = *step.messages.emplace_back().mutable_complete();
  complete.mutable_output_ids()->Add(output.tokens.begin(), output.tokens.end());
  complete.set_finish_reason(update.reason == requests::FinishReason::kCancelled ? "abort"
                                                                                 : output.choice.finish_reason());
  complete.set_prompt_tokens(update.prompt_tokens);
  complete.set_completion_tokens(completion_tokens);
  complete.set_cached_tokens(update.cached_tokens);
  complete.set_index(update.choice);
  if (spec_.logprobs >= 0) *complete.mutable_output_logprobs() = output.logprobs;
  if (spec_.prompt_logprobs >= 0) *complete.mutable_input_logprobs() = prompt_logprobs_;
  const Json& matched = output.choice.stop_reason();
  if (matched.is_string()) complete.set_matched_stop_str(matched.get<std::string>());
  if (matched.is_number_integer()) complete.set_matched_token_id(matched.get<uint32_t>());
  return step;
}

}  // namespace dovetail::server
