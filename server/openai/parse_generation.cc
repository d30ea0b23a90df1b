#include "server/openai/parse_generation.h"

#include <algorithm>

#include "absl/strings/numbers.h"
#include "proto/sampling_params.h"

namespace dovetail::server {
namespace {

constexpr size_t kMaxNameBytes = 512;

absl::Status ParseStream(const FieldReader& reader, GenerationFields& fields) {
  DT_ASSIGN_OR_RETURN(fields.stream, reader.Bool("stream", false));
  const Json* options = reader.Find("stream_options");
  if (options == nullptr) return absl::OkStatus();
  if (!options->is_object()) return BadField("stream_options", "must be an object, not ", Describe(*options));
  if (!fields.stream) return BadField("stream_options", "only allowed when stream is true");
  const FieldReader inner(*options, "stream_options");
  DT_ASSIGN_OR_RETURN(fields.include_usage, inner.Bool("include_usage", false));
  DT_ASSIGN_OR_RETURN(fields.continuous_usage, inner.Bool("continuous_usage_stats", false));
  DT_RETURN_IF_ERROR(
      inner.Bool("include_obfuscation", false).status());  // accepted; padding hides nothing from our own users
  return absl::OkStatus();
}

// `value`, or what llama-server's name for the same field says; both may be there if they agree.
template <typename Number>
absl::StatusOr<std::optional<Number>> OrAlias(const std::optional<Number>& value, const std::string& alias,
                                              const std::optional<Number>& of_alias, const std::string& name) {
  if (value && of_alias && *value != *of_alias) return BadField(alias, "contradicts ", name, ", which is ", *value);
  return value ? value : of_alias;
}

absl::Status ParseLengths(const FieldReader& reader, Endpoint endpoint, GenerationFields& fields) {
  DT_ASSIGN_OR_RETURN(const auto old_name, reader.Int("max_tokens"));
  DT_ASSIGN_OR_RETURN(const auto new_name, reader.Int("max_completion_tokens"));
  DT_ASSIGN_OR_RETURN(const auto n_predict, reader.Int("n_predict"));
  const auto limit = new_name ? new_name : old_name;  // benchmark clients send both
  DT_ASSIGN_OR_RETURN(fields.max_tokens,
                      OrAlias(limit, "n_predict", n_predict, new_name ? "max_completion_tokens" : "max_tokens"));
  if (!fields.max_tokens && endpoint == Endpoint::kCompletions) fields.max_tokens = 16;
  if (fields.max_tokens == -1) fields.max_tokens.reset();
  DT_ASSIGN_OR_RETURN(const auto min_tokens, reader.Int("min_tokens"));
  fields.min_tokens = static_cast<int>(min_tokens.value_or(0));
  if (fields.max_tokens && fields.min_tokens > *fields.max_tokens)
    return BadField("min_tokens", fields.min_tokens, " is more than max_tokens, which is ", *fields.max_tokens);
  return absl::OkStatus();
}

absl::Status ParseSampling(const FieldReader& reader, const ServedModel& model, GenerationFields& fields) {
  DT_ASSIGN_OR_RETURN(fields.temperature, reader.Float("temperature"));
  DT_ASSIGN_OR_RETURN(fields.top_p, reader.Float("top_p"));
  DT_ASSIGN_OR_RETURN(fields.min_p, reader.Float("min_p"));
  DT_ASSIGN_OR_RETURN(const auto repetition, reader.Float("repetition_penalty"));
  DT_ASSIGN_OR_RETURN(const auto repeat, reader.Float("repeat_penalty"));
  DT_ASSIGN_OR_RETURN(fields.repetition_penalty, OrAlias(repetition, "repeat_penalty", repeat, "repetition_penalty"));
  DT_ASSIGN_OR_RETURN(fields.presence_penalty, reader.Float("presence_penalty"));
  DT_ASSIGN_OR_RETURN(fields.frequency_penalty, reader.Float("frequency_penalty"));
  DT_ASSIGN_OR_RETURN(const auto top_k, reader.Int("top_k"));
  if (top_k) fields.top_k = static_cast<int>(std::clamp<int64_t>(*top_k, 0, model.vocab_size));  // -1, as 0: all
  DT_ASSIGN_OR_RETURN(fields.seed, reader.Int("seed"));
  if (fields.seed == -1) fields.seed.reset();  // as vLLM and llama-server have it: a random one
  return absl::OkStatus();
}

absl::Status ParseLogitBias(const FieldReader& reader, const ServedModel& model, GenerationFields& fields) {
  const Json* value = reader.Find("logit_bias");
  if (value == nullptr) return absl::OkStatus();
  if (!value->is_object()) return BadField("logit_bias", "must be an object of token ids, not ", Describe(*value));
  if (value->size() > kMaxLogitBias)
    return BadField("logit_bias", value->size(), " entries; at most ", kMaxLogitBias, " are allowed");
  for (const auto& [key, bias] : value->items()) {
    int64_t id = 0;
    const bool digits = !key.empty() && key.size() <= 10 &&
                        std::all_of(key.begin(), key.end(), [](char c) { return c >= '0' && c <= '9'; });
    if (!digits || !absl::SimpleAtoi(key, &id) || id >= model.vocab_size)
      return BadField("logit_bias", "a key is not a token id between 0 and ", model.vocab_size - 1);
    DT_ASSIGN_OR_RETURN(const float amount,
                        ToFloat(bias, absl::StrCat("logit_bias.", key), {"logit_bias", -100.0, 100.0}));
    fields.logit_bias.emplace_back(static_cast<TokenId>(id), amount);
  }
  // "07" and "7" are different keys and the same token.
  std::sort(fields.logit_bias.begin(), fields.logit_bias.end());
  const auto same = [](const auto& a, const auto& b) { return a.first == b.first; };
  if (std::adjacent_find(fields.logit_bias.begin(), fields.logit_bias.end(), same) != fields.logit_bias.end())
    return BadField("logit_bias", "names a token twice");
  return absl::OkStatus();
}

// A string or an array of them.
absl::StatusOr<std::vector<std::string>> ParseStrings(const FieldReader& reader, const std::string& name,
                                                      size_t max_count, size_t max_bytes) {
  std::vector<std::string> strings;
  const Json* value = reader.Find(name);
  if (value == nullptr) return strings;
  const auto add = [&](const Json& one, const std::string& path) -> absl::Status {
    if (!one.is_string()) return BadField(path, "must be a string, not ", Describe(one));
    const auto& text = one.get_ref<const std::string&>();
    if (text.empty()) return BadField(path, "is empty");
    if (text.size() > max_bytes) return BadField(path, text.size(), " bytes; at most ", max_bytes, " are allowed");
    strings.push_back(text);
    return absl::OkStatus();
  };
  if (!value->is_array()) {
    if (!value->is_string()) return BadField(name, "must be a string or an array of strings, not ", Describe(*value));
    DT_RETURN_IF_ERROR(add(*value, name));
    return strings;
  }
  if (value->size() > max_count) return BadField(name, value->size(), " strings; at most ", max_count, " are allowed");
  for (const Json& one : *value) DT_RETURN_IF_ERROR(add(one, absl::StrCat(name, ".", strings.size())));
  return strings;
}

absl::Status ParseStops(const FieldReader& reader, const ServedModel& model, GenerationFields& fields) {
  const Json* stop = reader.Find("stop");
  if (stop == nullptr || !stop->is_string() ||
      !stop->get_ref<const std::string&>().empty()) {  // stop: "" asks for nothing
    DT_ASSIGN_OR_RETURN(fields.stop, ParseStrings(reader, "stop", kMaxStopStrings, kMaxStopBytes));
  }
  if (!fields.stop.empty() && model.tokenizer == nullptr)
    return BadField("stop", "this model has no tokenizer, so no text; use stop_token_ids");
  DT_ASSIGN_OR_RETURN(const auto ids, reader.TokenIds("stop_token_ids", kMaxStopTokenIds, model.vocab_size));
  if (ids) fields.stop_token_ids = *ids;
  DT_ASSIGN_OR_RETURN(fields.include_stop_str_in_output, reader.Bool("include_stop_str_in_output", false));
  DT_ASSIGN_OR_RETURN(fields.ignore_eos, reader.Bool("ignore_eos", false));
  DT_ASSIGN_OR_RETURN(fields.bad_words, ParseStrings(reader, "bad_words", kMaxBadWords, kMaxStopBytes));
  DT_ASSIGN_OR_RETURN(
      const auto allowed,
      reader.TokenIds("allowed_token_ids", std::min(model.vocab_size, proto::kMaxTokenList), model.vocab_size));
  if (allowed && allowed->empty()) return BadField("allowed_token_ids", "is empty: no token would be left to choose");
  if (allowed) fields.allowed_token_ids = *allowed;
  return absl::OkStatus();
}

absl::Status ParseText(const FieldReader& reader, GenerationFields& fields) {
  DT_ASSIGN_OR_RETURN(fields.skip_special_tokens, reader.Bool("skip_special_tokens", true));
  // Our decoders put nothing between special tokens, so both values mean the same text (model/tokenizer/detokenizer.h).
  DT_RETURN_IF_ERROR(reader.Bool("spaces_between_special_tokens", true).status());
  if (reader.Has("add_special_tokens")) {
    DT_ASSIGN_OR_RETURN(fields.add_special_tokens, reader.Bool("add_special_tokens", true));
  }
  DT_ASSIGN_OR_RETURN(fields.return_token_ids, reader.Bool("return_token_ids", false));
  DT_ASSIGN_OR_RETURN(fields.return_tokens_as_token_ids, reader.Bool("return_tokens_as_token_ids", false));
  DT_ASSIGN_OR_RETURN(fields.truncate_prompt_tokens, reader.Int("truncate_prompt_tokens"));
  if (fields.truncate_prompt_tokens == 0)
    return BadField("truncate_prompt_tokens", "0 would leave no prompt; use -1 or a positive number");
  DT_ASSIGN_OR_RETURN(const auto prompt_logprobs, reader.Int("prompt_logprobs"));
  fields.prompt_logprobs = static_cast<int>(prompt_logprobs.value_or(-1));
  DT_ASSIGN_OR_RETURN(fields.return_progress, reader.Bool("return_progress", false));
  if (prompt_logprobs && fields.stream) return BadField("prompt_logprobs", "not available when stream is true");
  return absl::OkStatus();
}

// Accepted for what they are: labels, hints and bookkeeping that change no token. Their types are checked, so that a
// client's mistake does not go unseen.
absl::Status ParseBookkeeping(const FieldReader& reader, GenerationFields& fields) {
  DT_ASSIGN_OR_RETURN(const auto priority, reader.Int("priority"));
  fields.priority = static_cast<int>(priority.value_or(0));
  DT_ASSIGN_OR_RETURN(const auto salt, reader.String("cache_salt", kMaxNameBytes));
  if (salt && salt->empty()) return BadField("cache_salt", "is empty; leave it out to use your own");
  fields.cache_salt = salt.value_or("");
  DT_ASSIGN_OR_RETURN(fields.use_prefix_cache, reader.Bool("cache_prompt", true));
  for (const char* name :
       {"user", "safety_identifier", "prompt_cache_key", "request_id", "session_id", "service_tier", "verbosity"})
    DT_RETURN_IF_ERROR(reader.String(name, kMaxNameBytes).status());
  DT_RETURN_IF_ERROR(reader.Bool("store", false).status());
  DT_RETURN_IF_ERROR(reader.Bool("parallel_tool_calls", true).status());
  if (const Json* metadata = reader.Find("metadata"); metadata != nullptr && !metadata->is_object())
    return BadField("metadata", "must be an object, not ", Describe(*metadata));
  return absl::OkStatus();
}

}  // namespace

absl::Status RequireObject(const Json& body) {
  if (body.is_object()) return absl::OkStatus();
  return InvalidArgument("the request body must be a JSON object, not ", Describe(body));
}

absl::StatusOr<std::string> ParseModelName(const FieldReader& reader, const ServedModel& model) {
  DT_ASSIGN_OR_RETURN(const auto name, reader.String("model", kMaxNameBytes));
  if (!name) return model.names.front();
  const bool known = std::find(model.names.begin(), model.names.end(), *name) != model.names.end();
  if (!known && !model.accept_any_name) return UnknownModel(*name);
  return *name;
}

absl::StatusOr<GenerationFields> ParseGenerationFields(const FieldReader& reader, const ServedModel& model,
                                                       Endpoint endpoint) {
  GenerationFields fields;
  DT_ASSIGN_OR_RETURN(fields.model, ParseModelName(reader, model));
  DT_RETURN_IF_ERROR(ParseStream(reader, fields));
  DT_ASSIGN_OR_RETURN(const auto n, reader.Int("n"));
  fields.n = fields.best_of = static_cast<int>(n.value_or(1));
  DT_RETURN_IF_ERROR(ParseLengths(reader, endpoint, fields));
  DT_RETURN_IF_ERROR(ParseSampling(reader, model, fields));
  DT_RETURN_IF_ERROR(ParseLogitBias(reader, model, fields));
  DT_RETURN_IF_ERROR(ParseStops(reader, model, fields));
  DT_RETURN_IF_ERROR(ParseText(reader, fields));
  DT_RETURN_IF_ERROR(ParseBookkeeping(reader, fields));
  return fields;
}

}  // namespace dovetail::server
