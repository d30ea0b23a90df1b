#include "absl/time/time.h"
#include "base/clock.h"
#include "model/tokenizer/tokenizer.h"
#include "server/openai/api_error.h"
#include "server/openai/llama_server.h"
#include "server/openai/logprobs_json.h"

namespace dovetail::server {
namespace {

class LlamaAnswer : public ShapedAnswer {
 public:
  LlamaAnswer(const ResponseSpec& spec, const ServedModel& model)
      : spec_(spec), model_(model), logprobs_json_(model, /*tokens_as_ids=*/false), begun_(SystemClock().Now()) {}

  std::string Add(const Choice::Delta& delta) override {
    const absl::Time now = SystemClock().Now();
    if (predicted_ == 0) first_ = now;
    last_ = now;
    predicted_ += delta.counted;
    if (!spec_.stream) {
      text_ += delta.text;
      tokens_.insert(tokens_.end(), delta.tokens.begin(), delta.tokens.end());
      logprobs_.insert(logprobs_.end(), delta.logprobs.begin(), delta.logprobs.end());
      return "";
    }
    has_new_line_ = has_new_line_ || delta.text.find('\n') != std::string::npos;
    if (delta.text.empty() && delta.tokens.empty()) return "";
    Json chunk = Head(delta.text, delta.tokens, /*stop=*/false);
    AddProbabilities(delta.logprobs, chunk);
    if (spec_.repeated["timings_per_token"] == true) chunk["timings"] = Timings();
    return Frame(chunk);
  }

  std::string Progress(const PromptProgress& progress) override {
    Json chunk = Head("", {}, /*stop=*/false);
    chunk["prompt_progress"] = progress.AsJson();
    return Frame(chunk);
  }

  std::string Finish(const AnswerEnd& end) override {
    end_ = end;
    return spec_.stream ? Frame(Last("", {})) : "";
  }

  std::string Fail(const absl::Status& why) override {
    return spec_.stream ? absl::StrCat("data: ", ErrorBody(ToApiError(why)), "\n\n") : "";
  }

  Json Body() const override {
    Json body = Last(text_, spec_.repeated["return_tokens"] == true ? tokens_ : std::vector<TokenId>());
    AddProbabilities(logprobs_, body);
    return body;
  }

 private:
  static std::string Frame(const Json& json) { return absl::StrCat("data: ", Dump(json), "\n\n"); }

  int64_t prompt_tokens() const { return static_cast<int64_t>(spec_.prompts[0].size()); }

  Json Head(const std::string& text, const std::vector<TokenId>& tokens, bool stop) const {
    return {{"index", 0},
            {"content", text},
            {"tokens", tokens},
            {"stop", stop},
            {"id_slot", 0},
            {"tokens_predicted", predicted_},
            {"tokens_evaluated", prompt_tokens()}};
  }

  Json Last(const std::string& text, const std::vector<TokenId>& tokens) const {
    Json json = Head(text, tokens, /*stop=*/true);
    const bool word = end_.finish_reason == "stop" && end_.stop_reason.is_string();
    const bool new_line = has_new_line_ || text.find('\n') != std::string::npos;
    const std::string prompt =
        model_.tokenizer == nullptr ? "" : model_.tokenizer->Decode(spec_.prompts[0], /*skip_special=*/false);
    json.update({{"model", spec_.model},
                 {"generation_settings", spec_.repeated["settings"]},
                 {"prompt", prompt},
                 {"has_new_line", new_line},
                 {"truncated", false},
                 {"stop_type", end_.finish_reason == "length" ? "limit"
                               : word                         ? "word"
                                                              : "eos"},
                 {"stopping_word", word ? end_.stop_reason : Json("")},
                 {"tokens_cached", prompt_tokens() + predicted_},
                 {"timings", Timings()}});
    return json;
  }

  void AddProbabilities(const std::vector<ShownLogprob>& logprobs, Json& json) const {
    if (spec_.logprobs > 0) json["completion_probabilities"] = logprobs_json_.Llama(logprobs);
  }

  // What the prefix cache held is told at the end only.
  Json Timings() const {
    const int64_t cached = end_.usage.cached_tokens, read = prompt_tokens() - cached;
    const auto part = [](Json& timings, const std::string& name, int64_t tokens, absl::Duration time) {
      const double ms = absl::ToDoubleMilliseconds(time);
      timings[name + "_n"] = tokens;
      timings[name + "_ms"] = ms;
      timings[name + "_per_token_ms"] = tokens > 0 ? ms / static_cast<double>(tokens) : 0.0;
      timings[name + "_per_second"] = ms > 0 ? static_cast<double>(tokens) * 1000 / ms : 0.0;
    };
    Json timings = {{"cache_n", cached}};
    part(timings, "prompt", read, first_ - begun_);
    part(timings, "predicted", predicted_, last_ - first_);
    return timings;
  }

  const ResponseSpec& spec_;
  const ServedModel& model_;
  const LogprobsJson logprobs_json_;
  const absl::Time begun_;
  absl::Time first_ = begun_, last_ = begun_;  // tokens
  int64_t predicted_ = 0;
  bool has_new_line_ = false;
  std::string text_;
  std::vector<TokenId> tokens_;
  std::vector<ShownLogprob> logprobs_;
  AnswerEnd end_;
};

}  // namespace

std::unique_ptr<ShapedAnswer> MakeLlamaAnswer(const ResponseSpec& spec, const ServedModel& model) {
  return std::make_unique<LlamaAnswer>(spec, model);
}

Json LlamaSettings(const GenerationFields& fields, const requests::GenerationRequest& request) {
  const proto::SamplingParams& sampling = request.sampling;
  return {{"n_predict", request.max_tokens},
          {"max_tokens", request.max_tokens},
          {"seed", sampling.seed},
          {"temperature", sampling.temperature},
          {"top_k", sampling.top_k},
          {"top_p", sampling.top_p},
          {"min_p", sampling.min_p},
          {"repeat_penalty", sampling.repetition_penalty},
          {"repeat_last_n", -1},
          {"presence_penalty", sampling.presence_penalty},
          {"frequency_penalty", sampling.frequency_penalty},
          {"ignore_eos", fields.ignore_eos},
          {"stop", fields.stop},
          {"n_probs", std::max(fields.logprobs, 0)},
          {"stream", fields.stream}};
}

}  // namespace dovetail::server
