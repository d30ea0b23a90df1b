#include <algorithm>
#include <array>

#include "server/openai/parse_generation.h"
#include "server/openai/structured_output.h"

namespace dovetail::server {
namespace {

constexpr std::array<std::string_view, 3> kRoles = {"system", "user", "assistant"};

absl::StatusOr<std::string> ParseContentParts(const Json& parts, const std::string& path) {
  std::string text;
  size_t index = 0;
  for (const Json& part : parts) {
    const std::string at = absl::StrCat(path, ".", index);
    if (!part.is_object()) return BadField(at, "must be an object with type and text, not ", Describe(part));
    const FieldReader reader(part, at);
    DT_ASSIGN_OR_RETURN(const auto type, reader.String("type", 64));
    if (!type) return BadField(absl::StrCat(at, ".type"), "is required");
    if (*type != "text")
      return BadField(absl::StrCat(at, ".type"),
                      "only \"text\" is supported: this server reads no images, audio, video or files");
    const Json* value = reader.Find("text");
    if (value == nullptr || !value->is_string()) return BadField(absl::StrCat(at, ".text"), "must be a string");
    if (index++ > 0) text += '\n';
    text += value->get_ref<const std::string&>();
  }
  return text;
}

absl::StatusOr<Json> ParseMessage(const Json& value, const std::string& path) {
  if (!value.is_object()) return BadField(path, "must be an object with role and content, not ", Describe(value));
  const FieldReader reader(value, path);
  DT_ASSIGN_OR_RETURN(auto role, reader.String("role", 64));
  if (!role) return BadField(reader.Path("role"), "is required");
  if (*role == "tool" || *role == "function")
    return BadField(reader.Path("role"), "tools are not supported yet, so neither are their results");
  if (*role == "developer") role = "system";
  if (std::find(kRoles.begin(), kRoles.end(), *role) == kRoles.end())
    return BadField(reader.Path("role"), "must be system, developer, user or assistant, not ",
                    Describe(*reader.Find("role")));
  for (const char* name : {"tool_calls", "function_call", "audio", "images"}) {
    const Json* field = reader.Find(name);
    if (field != nullptr && !field->empty()) return BadField(reader.Path(name), "not supported yet; leave it out");
  }

  Json message = {{"role", *role}};
  const Json* content = reader.Find("content");
  if (content == nullptr) {
    if (*role != "assistant")
      return BadField(reader.Path("content"), "is required: a string, or an array of text parts");
    message["content"] = "";
  } else if (content->is_string()) {
    message["content"] = *content;
  } else if (content->is_array()) {
    DT_ASSIGN_OR_RETURN(message["content"], ParseContentParts(*content, reader.Path("content")));
  } else {
    return BadField(reader.Path("content"), "must be a string or an array of text parts, not ", Describe(*content));
  }
  for (const char* name : {"name", "reasoning_content"}) {
    DT_ASSIGN_OR_RETURN(const auto text, reader.String(name, size_t{4} << 20));
    if (text) message[name] = *text;
  }
  return message;
}

absl::Status ParseTemplateKwargs(const FieldReader& reader, ChatPrompt& prompt) {
  const Json* kwargs = reader.Find("chat_template_kwargs");
  if (kwargs == nullptr) return absl::OkStatus();
  if (!kwargs->is_object()) return BadField("chat_template_kwargs", "must be an object, not ", Describe(*kwargs));
  if (kwargs->size() > 64) return BadField("chat_template_kwargs", kwargs->size(), " entries; at most 64 are allowed");
  for (const auto& [key, value] : kwargs->items())
    for (const char* taken : {"chat_template", "messages", "tools", "documents", "add_generation_prompt",
                              "continue_final_message", "bos_token", "eos_token", "tokenize"})
      if (key == taken) return BadField(absl::StrCat("chat_template_kwargs.", key), "cannot be set this way");
  prompt.template_kwargs = *kwargs;
  return absl::OkStatus();
}

absl::Status ParseChatLogprobs(const FieldReader& reader, GenerationFields& fields) {
  DT_ASSIGN_OR_RETURN(const bool logprobs, reader.Bool("logprobs", false));
  DT_ASSIGN_OR_RETURN(const auto top, reader.Int("top_logprobs"));
  if (top.value_or(0) > 0 && !logprobs) return BadField("top_logprobs", "only allowed when logprobs is true");
  if (logprobs) fields.logprobs = static_cast<int>(top.value_or(0));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Json> ParseMessages(const Json& value) {
  if (!value.is_array()) return BadField("messages", "must be an array of messages, not ", Describe(value));
  if (value.empty()) return BadField("messages", "is empty");
  if (value.size() > kMaxMessages)
    return BadField("messages", value.size(), " messages; at most ", kMaxMessages, " are allowed");
  Json messages = Json::array();
  for (const Json& one : value) {
    DT_ASSIGN_OR_RETURN(Json message, ParseMessage(one, absl::StrCat("messages.", messages.size())));
    messages.push_back(std::move(message));
  }
  return messages;
}

absl::StatusOr<ChatRequest> ParseChatRequest(const Json& body, const ServedModel& model) {
  DT_RETURN_IF_ERROR(RequireObject(body));
  const FieldReader reader(body);
  ChatRequest request;
  DT_RETURN_IF_ERROR(RefuseUnsupported(body, Endpoint::kChat));
  DT_ASSIGN_OR_RETURN(request.fields, ParseGenerationFields(reader, model, Endpoint::kChat));
  DT_RETURN_IF_ERROR(ParseStructuredOutput(body, model, request.fields));
  if (request.fields.max_tokens == 0) return BadField("max_tokens", "0 asks for nothing; ask for at least 1");
  DT_RETURN_IF_ERROR(ParseChatLogprobs(reader, request.fields));
  if (model.tokenizer == nullptr)
    return BadField("messages", "this model has no tokenizer; send token ids to /v1/completions");
  if (!model.chat)
    return BadField("messages",
                    "this model has no chat template; use /v1/completions, or start the server with --chat-template");
  const Json* messages = reader.Find("messages");
  if (messages == nullptr) return BadField("messages", "is required: an array of {role, content}");
  DT_ASSIGN_OR_RETURN(request.prompt.messages, ParseMessages(*messages));
  DT_ASSIGN_OR_RETURN(request.prompt.continue_final_message, reader.Bool("continue_final_message", false));
  DT_ASSIGN_OR_RETURN(request.prompt.add_generation_prompt,
                      reader.Bool("add_generation_prompt", !request.prompt.continue_final_message));
  if (request.prompt.continue_final_message && request.prompt.add_generation_prompt)
    return BadField("continue_final_message", "cannot be true together with add_generation_prompt");
  DT_RETURN_IF_ERROR(ParseTemplateKwargs(reader, request.prompt));
  return request;
}

}  // namespace dovetail::server
