#include "model/tokenizer/tokenizer.h"
#include "server/openai/api_error.h"
#include "server/openai/llama_server.h"

namespace dovetail::server {
namespace {

Json TextOrNull(const ServedModel& model, const std::optional<TokenId>& id) {
  return model.tokenizer != nullptr && id ? Json(std::string(model.tokenizer->TokenText(*id))) : Json();
}

}  // namespace

absl::StatusOr<std::string> ApplyTemplateBody(const TokenizeRequest& request, const ServedModel& model) {
  const auto* chat = std::get_if<ChatPrompt>(&request.input);
  if (chat == nullptr) return BadField("messages", "is required: an array of {role, content}");
  const auto parts = model.chat(*chat);
  if (!parts.ok()) return BadField("messages", std::string(parts.status().message()));
  std::string prompt;
  for (const model::PromptPart& part : *parts) prompt += part.text;
  return Dump({{"prompt", prompt}});
}

std::string PropsBody(const ServedModel& model, int64_t usable_len, const std::string& version) {
  const SamplingDefaults& defaults = model.defaults;
  const Json params = {{"temperature", defaults.temperature.value_or(1.0f)},
                       {"top_k", defaults.top_k.value_or(0)},
                       {"top_p", defaults.top_p.value_or(1.0f)},
                       {"min_p", defaults.min_p.value_or(0.0f)},
                       {"repeat_penalty", defaults.repetition_penalty.value_or(1.0f)},
                       {"n_predict", -1}};
  const std::optional<TokenId> none;
  const bool text = model.tokenizer != nullptr;
  return Dump({{"default_generation_settings", {{"n_ctx", usable_len}, {"params", params}}},
               {"total_slots", model.max_num_seqs},
               {"model_alias", model.names.front()},
               {"model_path", model.names.front()},
               {"chat_template", model.chat_template},
               {"bos_token", TextOrNull(model, text ? model.tokenizer->special().bos : none)},
               {"eos_token", TextOrNull(model, text ? model.tokenizer->special().eos : none)},
               {"modalities", {{"vision", false}, {"audio", false}}},
               {"build_info", absl::StrCat("dovetail-", version)},
               {"is_sleeping", false}});
}

std::string SlotsBody(const ServedModel& model, int64_t usable_len, int running) {
  Json slots = Json::array();
  for (int i = 0; i < model.max_num_seqs; ++i)
    slots.push_back({{"id", i}, {"n_ctx", usable_len}, {"speculative", false}, {"is_processing", i < running}});
  return Dump(slots);
}

}  // namespace dovetail::server
