#include "server/openai/generation_response.h"

#include <algorithm>

#include "base/check.h"
#include "base/clock.h"
#include "model/tokenizer/tokenizer.h"
#include "server/openai/api_error.h"
#include "server/openai/embeddings.h"
#include "server/openai/llama_server.h"
#include "server/openai/messages_answer.h"
#include "server/openai/responses_answer.h"

namespace dovetail::server {
namespace {

size_t CodePoints(const std::string& text) {
  return std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; });
}

// An engine's own words stay inside: they may name what a client must not see.
absl::Status EngineFailure(const requests::GenerationUpdate& update) {
  if (update.reason == requests::FinishReason::kCancelled) return absl::UnavailableError("cancelled");
  switch (update.error_code) {
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kResourceExhausted:
    case absl::StatusCode::kAborted: return absl::Status(update.error_code, "try again");
    case absl::StatusCode::kOutOfRange:
      return absl::OutOfRangeError(
          "The server's KV cache has no room for this prompt and its output, even alone; shorten the prompt or ask for "
          "fewer tokens.");
    default: return Internal("generation failed");
  }
}

std::unique_ptr<ShapedAnswer> MakeShapedAnswer(const ResponseSpec& spec, const ServedModel& model) {
  switch (spec.shape) {
    case AnswerShape::kChat:
    case AnswerShape::kVectors: return nullptr;
    case AnswerShape::kResponses: return MakeResponsesAnswer(spec);
    case AnswerShape::kMessages: return MakeMessagesAnswer(spec);
    case AnswerShape::kLlama: break;
  }
  return MakeLlamaAnswer(spec, model);
}

}  // namespace

GenerationResponse::GenerationResponse(std::shared_ptr<const ServedModel> model, ResponseSpec spec)
    : model_(std::move(model)),
      spec_(std::move(spec)),
      logprobs_json_(*model_, spec_.tokens_as_ids),
      shaped_(MakeShapedAnswer(spec_, *model_)),
      begun_(SystemClock().Now()) {
  prompts_.resize(spec_.prompts.size());
  for (size_t p = 0; p < prompts_.size(); ++p) {
    Prompt& prompt = prompts_[p];
    prompt.prompt_tokens = static_cast<int>(spec_.prompts[p].size());
    if (spec_.echo && model_->tokenizer != nullptr)
      prompt.echo_text = model_->tokenizer->Decode(spec_.prompts[p], spec_.skip_special_tokens);
    const size_t echoed = CodePoints(prompt.echo_text);
    for (int c = 0; c < spec_.best_of; ++c) prompt.choices.emplace_back(Choice(*model_, spec_, echoed));
  }
}

GenerationResponse::Effects GenerationResponse::OnUpdate(int p, const requests::GenerationUpdate& update) {
  Effects effects;
  if (done_) return effects;
  Prompt& prompt = prompts_[p];
  prompt.cached_tokens = update.cached_tokens;
  if (!update.pooled.empty()) prompt.pooled = update.pooled;
  std::copy(update.prompt_logprobs.begin(), update.prompt_logprobs.end(), std::back_inserter(prompt.logprobs));

  if (EndsInFailure(prompt, update)) {
    effects.frames = Fail(EngineFailure(update));
    effects.done = true;
    return effects;
  }
  if (update.prompt_done > 0) TellProgress(p, update, effects);
  Choice::Delta delta = prompt.choices[update.choice].state.Add(update);
  effects.tokens = delta.counted;
  if (delta.stop_in_engine) effects.stops.push_back({p, update.choice});
  if (shaped_ != nullptr) {
    effects.frames += shaped_->Add(delta);
  } else if (spec_.stream) {
    Stream(p, update.choice, std::move(delta), effects);
  } else {
    Hold(p, update.choice, std::move(delta));
  }
  CheckDone(effects);
  return effects;
}

void GenerationResponse::Hold(int p, int c, Choice::Delta delta) {
  ChoiceOutput& output = prompts_[p].choices[c];
  output.text += delta.text;
  for (const AnswerPiece& piece : delta.pieces.all()) {
    switch (piece.kind) {
      case AnswerPiece::Kind::kContent: output.text += piece.text; break;
      case AnswerPiece::Kind::kReasoning: output.reasoning += piece.text; break;
      case AnswerPiece::Kind::kCallBegins: output.held_calls.push_back({IdOf(piece, p, c), piece.text, ""}); break;
      case AnswerPiece::Kind::kArguments: output.held_calls.back().arguments += piece.text; break;
      case AnswerPiece::Kind::kCallEnds: break;
    }
  }
  output.tokens.insert(output.tokens.end(), delta.tokens.begin(), delta.tokens.end());
  std::move(delta.logprobs.begin(), delta.logprobs.end(), std::back_inserter(output.logprobs));
}

// Of a call that begins.
std::string GenerationResponse::IdOf(const AnswerPiece& piece, int p, int c) {
  const int call = prompts_[p].choices[c].calls++;
  return piece.id.empty() ? CallId(spec_.answer, c, call) : piece.id;
}

// What ended by itself, here or in the engine, is whole: a failure behind it changes nothing.
bool GenerationResponse::EndsInFailure(const Prompt& prompt, const requests::GenerationUpdate& update) {
  const bool failed = update.choice_finished && (update.reason == requests::FinishReason::kError ||
                                                 update.reason == requests::FinishReason::kCancelled);
  if (!failed) return false;
  return update.request_finished ? !Finished(prompt) : !prompt.choices[update.choice].state.finished();
}

bool GenerationResponse::Finished(const Prompt& prompt) {
  return std::all_of(prompt.choices.begin(), prompt.choices.end(),
                     [](const ChoiceOutput& choice) { return choice.state.finished(); });
}

void GenerationResponse::CheckDone(Effects& effects) {
  if (!std::all_of(prompts_.begin(), prompts_.end(), Finished)) return;
  done_ = effects.done = true;
  const auto lacks_vector = [](const Prompt& prompt) { return prompt.pooled.empty(); };
  if (spec_.vectors() && std::any_of(prompts_.begin(), prompts_.end(), lacks_vector))
    failure_ = Internal("a prompt ended without its vector");
  if (shaped_ != nullptr) {
    const Choice& choice = prompts_[0].choices[0].state;
    effects.frames += shaped_->Finish({choice.finish_reason(), choice.stop_reason(), usage()});
    return;
  }
  if (!spec_.stream) return;
  if (spec_.include_usage) {
    Json chunk = ChunkHead();
    chunk["choices"] = Json::array();
    chunk["usage"] = UsageJson();
    AppendFrame(chunk, effects.frames);
  }
  effects.frames += "data: [DONE]\n\n";
}

std::string GenerationResponse::Fail(absl::Status why) {
  if (done_) return "";
  done_ = true;
  failure_ = std::move(why);
  if (shaped_ != nullptr) return shaped_->Fail(failure_);
  if (!spec_.stream) return "";
  return absl::StrCat("data: ", ErrorBody(ToApiError(failure_)), "\n\n");
}

// ---- streaming ----

Json GenerationResponse::ChunkHead() const {
  return {{"id", spec_.id},
          {"object", spec_.chat() ? "chat.completion.chunk" : "text_completion"},
          {"created", spec_.created},
          {"model", spec_.model},
          {"system_fingerprint", model_->fingerprint}};
}

void GenerationResponse::AppendFrame(const Json& json, std::string& frames) const {
  frames += "data: ";
  frames += Dump(json);
  frames += "\n\n";
}

void GenerationResponse::AppendChunk(Json choice, std::string& frames, const Json* extra) const {
  Json chunk = ChunkHead();
  chunk["choices"] = Json::array({std::move(choice)});
  if (spec_.continuous_usage) {
    chunk["usage"] = UsageJson();
  } else if (spec_.include_usage) {
    chunk["usage"] = nullptr;
  }
  if (extra != nullptr) chunk.update(*extra);
  AppendFrame(chunk, frames);
}

// In a chunk of its own, as llama-server does.
void GenerationResponse::TellProgress(int p, const requests::GenerationUpdate& update, Effects& effects) {
  const PromptProgress progress{update.prompt_tokens, update.cached_tokens, update.prompt_done,
                                absl::ToDoubleMilliseconds(SystemClock().Now() - begun_)};
  if (shaped_ != nullptr) {
    effects.frames += shaped_->Progress(progress);
    return;
  }
  Json choice = {{"index", Index(p, 0)}, {"logprobs", nullptr}, {"finish_reason", nullptr}};
  if (spec_.chat()) {
    choice["delta"] = Json::object();
  } else {
    choice["text"] = "";
  }
  const Json extra = {{"prompt_progress", progress.AsJson()}};
  AppendChunk(std::move(choice), effects.frames, &extra);
}

// The role in chat; the prompt itself where echo is asked for.
void GenerationResponse::BeginChoice(int p, int c, Choice::Delta& delta, Effects& effects) {
  prompts_[p].choices[c].began = true;
  if (spec_.chat()) {
    const Json delta_json = {{"role", "assistant"}, {"content", nullptr}};
    Json extra = Json::object();
    if (spec_.return_token_ids) extra["prompt_token_ids"] = spec_.prompts[p];
    AppendChunk({{"index", Index(p, c)}, {"delta", delta_json}, {"logprobs", nullptr}, {"finish_reason", nullptr}},
                effects.frames, &extra);
    return;
  }
  delta.text.insert(0, prompts_[p].echo_text);
  if (spec_.echo && spec_.logprobs >= 0) {
    auto all = EchoedLogprobs(p);
    std::move(delta.logprobs.begin(), delta.logprobs.end(), std::back_inserter(all));
    delta.logprobs = std::move(all);
  }
}

void GenerationResponse::Stream(int p, int c, Choice::Delta delta, Effects& effects) {
  ChoiceOutput& output = prompts_[p].choices[c];
  if (delta.counted == 0 && !delta.finished) return;
  const bool first = !output.began;
  if (first) BeginChoice(p, c, delta, effects);
  if (spec_.chat()) return StreamChat(p, c, delta, effects);
  const bool details = !delta.tokens.empty() && (spec_.logprobs >= 0 || spec_.return_token_ids);
  if (delta.text.empty() && !details && !delta.finished) return;
  Json choice = {{"index", Index(p, c)},
                 {"text", delta.text},
                 {"logprobs", LogprobsOrNull(delta.logprobs)},
                 {"finish_reason", delta.finished ? Json(output.state.finish_reason()) : Json()}};
  if (delta.finished) choice["stop_reason"] = output.state.stop_reason();
  if (spec_.return_token_ids) {
    choice["token_ids"] = delta.tokens;
    if (first) choice["prompt_token_ids"] = spec_.prompts[p];
  }
  AppendChunk(std::move(choice), effects.frames);
}

std::vector<Json> GenerationResponse::ChatDeltas(int p, int c, const Choice::Delta& delta) {
  std::vector<Json> deltas;
  if (!delta.text.empty()) deltas.push_back({{"content", delta.text}});
  const auto call = [&](Json fields) {
    fields["index"] = prompts_[p].choices[c].calls - 1;
    deltas.push_back({{"tool_calls", Json::array({std::move(fields)})}});
  };
  for (const AnswerPiece& piece : delta.pieces.all()) {
    switch (piece.kind) {
      case AnswerPiece::Kind::kContent: deltas.push_back({{"content", piece.text}}); break;
      case AnswerPiece::Kind::kReasoning:
        deltas.push_back({{"reasoning_content", piece.text}, {"reasoning", piece.text}});
        break;
      case AnswerPiece::Kind::kCallBegins: {
        const std::string id = IdOf(piece, p, c);
        call({{"index", 0}, {"id", id}, {"type", "function"}, {"function", {{"name", piece.text}, {"arguments", ""}}}});
        break;
      }
      case AnswerPiece::Kind::kArguments: call({{"index", 0}, {"function", {{"arguments", piece.text}}}}); break;
      case AnswerPiece::Kind::kCallEnds: break;
    }
  }
  return deltas;
}

// What belongs to the tokens stands in the first chunk of an update.
void GenerationResponse::StreamChat(int p, int c, const Choice::Delta& delta, Effects& effects) {
  const bool details = !delta.tokens.empty() && (spec_.logprobs >= 0 || spec_.return_token_ids);
  const int index = Index(p, c);
  std::vector<Json> deltas = ChatDeltas(p, c, delta);
  if (deltas.empty() && details) deltas.push_back({{"content", ""}});
  for (size_t i = 0; i < deltas.size(); ++i) {
    Json choice = {{"index", index},
                   {"delta", std::move(deltas[i])},
                   {"logprobs", i == 0 ? LogprobsOrNull(delta.logprobs) : Json()},
                   {"finish_reason", nullptr}};
    if (spec_.return_token_ids) choice["token_ids"] = i == 0 ? Json(delta.tokens) : Json::array();
    AppendChunk(std::move(choice), effects.frames);
  }
  if (!delta.finished) return;
  const Choice& state = prompts_[p].choices[c].state;
  AppendChunk({{"index", index},
               {"delta", Json::object()},
               {"logprobs", nullptr},
               {"finish_reason", state.finish_reason()},
               {"stop_reason", state.stop_reason()}},
              effects.frames);
}

// ---- bodies ----

Json GenerationResponse::LogprobsOrNull(std::span<const ShownLogprob> shown) const {
  if (spec_.logprobs < 0 || (spec_.stream && shown.empty())) return nullptr;
  return spec_.chat() ? logprobs_json_.Chat(shown) : logprobs_json_.Completion(shown);
}

std::vector<ShownLogprob> GenerationResponse::EchoedLogprobs(int p) const {
  const std::vector<TokenId>& ids = spec_.prompts[p];
  std::vector<ShownLogprob> shown;
  if (model_->tokenizer == nullptr) return shown;
  model::IncrementalDetokenizer detokenizer(
      *model_->tokenizer, {.skip_special_tokens = spec_.skip_special_tokens, .at_sequence_start = true});
  for (size_t i = 0; i < ids.size(); ++i) {
    ShownLogprob one;
    one.text_offset = detokenizer.emitted_code_points();
    if (i > 0 && i - 1 < prompts_[p].logprobs.size()) {
      one.position = prompts_[p].logprobs[i - 1];
      one.position.top.resize(std::min<size_t>(one.position.top.size(), spec_.logprobs));
    } else {
      one.position.chosen.token = -1 - ids[i];
    }
    detokenizer.Push(ids[i]);
    shown.push_back(std::move(one));
  }
  return shown;
}

UsageTotals GenerationResponse::usage() const {
  UsageTotals totals;
  for (const Prompt& prompt : prompts_) {
    totals.prompt_tokens += prompt.prompt_tokens;
    totals.cached_tokens += prompt.cached_tokens;
    for (const ChoiceOutput& choice : prompt.choices) {
      totals.completion_tokens += choice.state.completion_tokens();
      totals.reasoning_tokens += choice.state.reasoning_tokens();
    }
  }
  return totals;
}

std::vector<std::vector<float>> GenerationResponse::Vectors() const {
  std::vector<std::vector<float>> vectors;
  for (const Prompt& prompt : prompts_) vectors.push_back(prompt.pooled);
  return vectors;
}

Json GenerationResponse::UsageJson() const {
  const UsageTotals totals = usage();
  Json usage = {{"prompt_tokens", totals.prompt_tokens},
                {"completion_tokens", totals.completion_tokens},
                {"total_tokens", totals.prompt_tokens + totals.completion_tokens},
                {"prompt_tokens_details", {{"cached_tokens", totals.cached_tokens}}}};
  if (spec_.answer.thoughts != nullptr)
    usage["completion_tokens_details"] = {{"reasoning_tokens", totals.reasoning_tokens}};
  return usage;
}

// best_of: the n most probable, by falling cumulative log probability; ties keep their order.
std::vector<const GenerationResponse::ChoiceOutput*> GenerationResponse::Shown(const Prompt& prompt) const {
  std::vector<const ChoiceOutput*> shown;
  for (const ChoiceOutput& choice : prompt.choices) shown.push_back(&choice);
  if (spec_.best_of > spec_.n) {
    std::stable_sort(shown.begin(), shown.end(), [](const ChoiceOutput* a, const ChoiceOutput* b) {
      return a->state.cumulative_logprob() > b->state.cumulative_logprob();
    });
    shown.resize(spec_.n);
  }
  return shown;
}

// Content is null where an answer consists of calls only.
Json GenerationResponse::MessageJson(const ChoiceOutput& output) {
  const bool none = output.text.empty() && !output.held_calls.empty();
  Json message = {{"role", "assistant"}, {"content", none ? Json() : Json(output.text)}, {"refusal", nullptr}};
  if (!output.reasoning.empty()) {
    message["reasoning_content"] = output.reasoning;
    message["reasoning"] = output.reasoning;
  }
  if (output.held_calls.empty()) return message;
  Json calls = Json::array();
  for (const HeldCall& call : output.held_calls)
    calls.push_back(
        {{"id", call.id}, {"type", "function"}, {"function", {{"name", call.name}, {"arguments", call.arguments}}}});
  message["tool_calls"] = std::move(calls);
  return message;
}

Json GenerationResponse::ChoiceJson(int p, const ChoiceOutput& output, int index) const {
  const Prompt& prompt = prompts_[p];
  Json choice = {{"index", index}};
  std::vector<ShownLogprob> shown;
  if (spec_.echo && spec_.logprobs >= 0) shown = EchoedLogprobs(p);
  shown.insert(shown.end(), output.logprobs.begin(), output.logprobs.end());
  if (spec_.chat()) {
    choice["message"] = MessageJson(output);
  } else {
    choice["text"] = prompt.echo_text + output.text;
  }
  choice["logprobs"] = LogprobsOrNull(shown);
  choice["finish_reason"] = output.state.finish_reason();
  choice["stop_reason"] = output.state.stop_reason();
  if (spec_.return_token_ids) {
    choice["token_ids"] = output.tokens;
    if (!spec_.chat()) choice["prompt_token_ids"] = spec_.prompts[p];
  }
  if (spec_.prompt_logprobs >= 0 && !spec_.chat())
    choice["prompt_logprobs"] = logprobs_json_.Prompt(prompt.logprobs, spec_.prompt_logprobs);
  return choice;
}

std::string GenerationResponse::Body() const {
  DT_CHECK(done_ && failure_.ok() && !spec_.stream);
  if (shaped_ != nullptr) return Dump(shaped_->Body());
  if (spec_.vectors()) return VectorsBody(spec_, Vectors(), usage());
  Json choices = Json::array();
  for (size_t p = 0; p < prompts_.size(); ++p) {
    int c = 0;
    for (const ChoiceOutput* output : Shown(prompts_[p]))
      choices.push_back(ChoiceJson(static_cast<int>(p), *output, Index(p, c++)));
  }
  Json body = {{"id", spec_.id},
               {"object", spec_.chat() ? "chat.completion" : "text_completion"},
               {"created", spec_.created},
               {"model", spec_.model}};
  body["choices"] = std::move(choices);
  body["usage"] = UsageJson();
  body["system_fingerprint"] = model_->fingerprint;
  if (spec_.chat() && spec_.return_token_ids) body["prompt_token_ids"] = spec_.prompts[0];
  if (spec_.chat() && spec_.prompt_logprobs >= 0)
    body["prompt_logprobs"] = logprobs_json_.Prompt(prompts_[0].logprobs, spec_.prompt_logprobs);
  return Dump(body);
}

}  // namespace dovetail::server
