#include "server/openai/unsupported_fields.h"

#include <algorithm>

#include "absl/strings/str_split.h"
#include "server/openai/api_error.h"

namespace dovetail::server {
namespace {

constexpr std::string_view kTools = "only /v1/chat/completions has tools; leave it out";
constexpr std::string_view kFunctions = "an old name; use tools and tool_choice";
constexpr std::string_view kText = "this server reads and writes text only";
constexpr std::string_view kSampler = "this sampler is not supported; use temperature, top_p, top_k and min_p";
constexpr std::string_view kTemplate =
    "the chat template belongs to the server (--chat-template); a request cannot bring one";
constexpr std::string_view kNotHere = "not supported; leave it out";

constexpr UnsupportedField kFields[] = {
    {"tools", true, false, "[]", kTools},
    {"tool_choice", true, false, "\"none\"", kTools},
    {"functions", true, true, "[]", kFunctions},
    {"function_call", true, true, "\"none\"", kFunctions},
    {"enable_thinking", true, false, "", "only /v1/chat/completions has thoughts; leave it out"},
    {"logits_processors", true, true, "[]", kNotHere},
    {"modalities", true, true, R"(["text"])", kText},
    {"audio", true, true, "", kText},
    {"images", true, true, "[]", kText},
    {"image_data", true, true, "[]", kText},
    {"mm_processor_kwargs", true, true, "{}", kText},
    {"prompt_embeds", true, true, "", "a prompt is text or token ids"},
    {"documents", true, true, "[]", kNotHere},
    {"web_search_options", true, true, "", kNotHere},
    {"prediction", true, true, "", kNotHere},
    {"suffix", true, true, "\"\"", "filling in the middle is not supported; leave it out"},
    {"chat_template", true, true, "", kTemplate},
    {"use_beam_search", true, true, "false", kSampler},
    {"length_penalty", true, true, "1|1.0", kSampler},
    {"early_stopping", true, true, "false", kSampler},
    {"mirostat", true, true, "0", kSampler},
    {"dry_multiplier", true, true, "0|0.0", kSampler},
    {"xtc_probability", true, true, "0|0.0", kSampler},
    {"typical_p", true, true, "1|1.0", kSampler},
    {"tfs_z", true, true, "1|1.0", kSampler},
    {"dynatemp_range", true, true, "0|0.0", kSampler},
    {"samplers", true, true, "", kSampler},
    {"top_n_sigma", true, true, "-1|-1.0|0|0.0", kSampler},
    {"adaptive_target", true, true, "-1|-1.0", kSampler},
    {"min_keep", true, true, "0", kSampler},
    {"repeat_last_n", true, true, "-1", "penalties look at the whole text; use -1"},
    {"n_probs", true, true, "0", "use logprobs"},
    {"post_sampling_probs", true, true, "false", "probabilities are of the model's distribution; leave it out"},
    {"t_max_predict_ms", true, true, "0|-1", "use max_tokens; the server has a --request-timeout"},
    {"n_indent", true, true, "0", kNotHere},
    {"response_fields", true, true, "[]", "answers have all fields; leave it out"},
    {"return_tokens", true, true, "false", "use return_token_ids"},
    {"timings_per_token", true, true, "false", "only /completion has timings; leave it out"},
    {"grammar_lazy", true, true, "false", "a grammar holds from the first token; for calls, send tools"},
    {"guided_whitespace_pattern", true, true, "", kNotHere},
    {"structural_tag", true, true, "", "use response_format or structured_outputs"},
    {"regex", true, true, "", "use structured_outputs"},
    {"ebnf", true, true, "", "use structured_outputs"},
    {"min_new_tokens", true, true, "0", "use min_tokens"},
    {"return_hidden_states", true, true, "false", kNotHere},
    {"reasoning_format", true, true, "\"auto\"|\"deepseek\"",
     "thoughts are always told apart; include_reasoning: false leaves them out"},
    {"reasoning_budget_tokens", true, true, "-1", kNotHere},
    {"thinking_forced_open", true, true, "false", "use enable_thinking"},
    {"parse_tool_calls", true, true, "true", "calls are always told apart; without tools there are none"},
    {"logprob_token_ids", true, true, "[]", kNotHere},
    {"return_token_offsets", true, true, "false", "logprobs has text_offset"},
    {"repetition_detection", true, true, "", kNotHere},
    {"thinking_token_budget", true, true, "", kNotHere},
    {"truncation_side", true, true, "\"left\"", "prompts are cut at their left end"},
    {"kv_transfer_params", true, true, "{}", kNotHere},
    {"vllm_xargs", true, true, "{}", kNotHere},
    {"lora", true, true, "[]", kNotHere},
    {"echo", false, true, "false", "only /v1/completions can repeat its prompt"},
    {"best_of", false, true, "1", "use /v1/completions, or n"},
    {"messages", true, false, "", "this is /v1/completions: send a prompt, or use /v1/chat/completions"},
    {"prompt", false, true, "", "this is /v1/chat/completions: send messages, or use /v1/completions"},
};

bool AsksForNothing(const Json& value, std::string_view harmless) {
  if (value.is_null()) return true;
  if (harmless.empty()) return false;
  const std::string text = Dump(value);
  for (const auto one : absl::StrSplit(absl::string_view(harmless.data(), harmless.size()), '|'))
    if (text == std::string(one)) return true;
  return false;
}

}  // namespace

std::span<const UnsupportedField> UnsupportedFields() { return kFields; }

absl::Status RefuseUnsupported(const Json& body, Endpoint endpoint) {
  for (const UnsupportedField& field : kFields) {
    if (!(endpoint == Endpoint::kChat ? field.chat : field.completions)) continue;
    const auto at = body.find(field.name);
    if (at == body.end() || AsksForNothing(*at, field.harmless)) continue;
    return BadField(std::string(field.name), std::string(field.remedy));
  }
  return absl::OkStatus();
}

}  // namespace dovetail::server
