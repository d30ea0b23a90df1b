#include <algorithm>
#include <array>

#include "server/openai/parse_generation.h"
#include "server/openai/structured_output.h"

namespace dovetail::server {
namespace {

constexpr std::array<std::string_view, 4> kRoles = {"system", "user", "assistant", "tool"};
constexpr size_t kMaxReasoning = size_t{4} << 20;

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

// Calls of the conversation so far: ids and the functions' names.
using Calls = std::vector<std::pair<std::string, std::string>>;

// `required`: by its role; an assistant's may be left out, or be null.
absl::Status ParseContent(const FieldReader& reader, bool required, Json& message) {
  const Json* content = reader.Find("content");
  if (content == nullptr) {
    if (required) return BadField(reader.Path("content"), "is required: a string, or an array of text parts");
    message["content"] = "";
  } else if (content->is_string()) {
    message["content"] = *content;
  } else if (content->is_array()) {
    DT_ASSIGN_OR_RETURN(message["content"], ParseContentParts(*content, reader.Path("content")));
  } else {
    return BadField(reader.Path("content"), "must be a string or an array of text parts, not ", Describe(*content));
  }
  return absl::OkStatus();
}

// A result belongs to a call before it.
absl::Status ParseResult(const FieldReader& reader, const Calls& calls, Json& message) {
  DT_ASSIGN_OR_RETURN(const auto id, reader.String("tool_call_id", kMaxReasoning));
  if (!id) return BadField(reader.Path("tool_call_id"), "is required");
  const auto call = std::find_if(calls.begin(), calls.end(), [&](const auto& one) { return one.first == *id; });
  if (call == calls.end())
    return BadField(reader.Path("tool_call_id"), "is not the id of a call in an earlier message's tool_calls");
  message["tool_call_id"] = *id;
  message["name"] = call->second;
  return absl::OkStatus();
}

// What the assistant thought and called.
absl::Status ParseAssistant(const FieldReader& reader, Calls& calls, Json& message) {
  for (const char* name : {"reasoning", "reasoning_content"}) {
    DT_ASSIGN_OR_RETURN(const auto text, reader.String(name, kMaxReasoning));
    if (text) message["reasoning_content"] = *text;
  }
  const Json* given = reader.Find("tool_calls");
  if (given == nullptr || given->empty()) return absl::OkStatus();
  DT_ASSIGN_OR_RETURN(message["tool_calls"], ParseHistoricCalls(*given, reader.Path("tool_calls"), calls));
  return absl::OkStatus();
}

absl::StatusOr<Json> ParseMessage(const Json& value, const std::string& path, Calls& calls) {
  if (!value.is_object()) return BadField(path, "must be an object with role and content, not ", Describe(value));
  const FieldReader reader(value, path);
  DT_ASSIGN_OR_RETURN(auto role, reader.String("role", 64));
  if (!role) return BadField(reader.Path("role"), "is required");
  if (*role == "function") return BadField(reader.Path("role"), "is an old name; use tool, with tool_call_id");
  if (*role == "developer") role = "system";
  if (std::find(kRoles.begin(), kRoles.end(), *role) == kRoles.end())
    return BadField(reader.Path("role"), "must be system, developer, user, assistant or tool, not ",
                    Describe(*reader.Find("role")));
  for (const char* name : {"function_call", "audio", "images"}) {
    const Json* field = reader.Find(name);
    if (field != nullptr && !field->empty()) return BadField(reader.Path(name), "not supported; leave it out");
  }
  if (const Json* field = reader.Find("tool_calls"); *role != "assistant" && field != nullptr && !field->empty())
    return BadField(reader.Path("tool_calls"), "only an assistant's message has calls");

  Json message = {{"role", *role}};
  DT_RETURN_IF_ERROR(ParseContent(reader, /*required=*/*role != "assistant", message));
  DT_ASSIGN_OR_RETURN(const auto name, reader.String("name", kMaxReasoning));
  if (name) message["name"] = *name;
  if (*role == "tool") DT_RETURN_IF_ERROR(ParseResult(reader, calls, message));
  if (*role == "assistant") DT_RETURN_IF_ERROR(ParseAssistant(reader, calls, message));
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

// `value` as a variable of the template, unless chat_template_kwargs says the same.
absl::Status SetTemplateVariable(const std::string& name, const Json& value, const std::string& field,
                                 ChatPrompt& prompt) {
  if (!prompt.template_kwargs.contains(name)) prompt.template_kwargs[name] = value;
  const Json& set = prompt.template_kwargs[name];
  if (set == value) return absl::OkStatus();
  return BadField(field, "contradicts chat_template_kwargs.", name, ", which is ", Describe(set));
}

// How much the model is to think, under the names that templates have for it.
absl::Status ParseThinking(const FieldReader& reader, ChatRequest& request) {
  DT_ASSIGN_OR_RETURN(request.show_reasoning, reader.Bool("include_reasoning", true));
  DT_ASSIGN_OR_RETURN(const auto effort, reader.String("reasoning_effort", 64));
  std::optional<bool> thinking;
  if (reader.Has("enable_thinking")) {
    DT_ASSIGN_OR_RETURN(thinking, reader.Bool("enable_thinking", true));
  }
  if (effort) {
    constexpr std::array<std::string_view, 6> kEfforts = {"none", "minimal", "low", "medium", "high", "xhigh"};
    if (std::find(kEfforts.begin(), kEfforts.end(), *effort) == kEfforts.end())
      return BadField("reasoning_effort", "must be none, minimal, low, medium, high or xhigh, not ",
                      Describe(Json(*effort)));
    if (thinking && *thinking == (*effort == "none"))
      return BadField("enable_thinking", "contradicts reasoning_effort, which is ", *effort);
    if (*effort == "none")
      thinking = false;
    else
      DT_RETURN_IF_ERROR(SetTemplateVariable("reasoning_effort", *effort, "reasoning_effort", request.prompt));
  }
  if (!thinking) return absl::OkStatus();
  const std::string field = reader.Has("enable_thinking") ? "enable_thinking" : "reasoning_effort";
  for (const char* name : {"enable_thinking", "thinking"})
    DT_RETURN_IF_ERROR(SetTemplateVariable(name, *thinking, field, request.prompt));
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
  Calls calls;
  for (const Json& one : value) {
    DT_ASSIGN_OR_RETURN(Json message, ParseMessage(one, absl::StrCat("messages.", messages.size()), calls));
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
    return BadField(
        "messages",
        "this model has no chat template; use /v1/completions, or start the server with --chat-template and "
        "a file or the name of a built-in one, as chatml");
  const Json* messages = reader.Find("messages");
  if (messages == nullptr) return BadField("messages", "is required: an array of {role, content}");
  DT_ASSIGN_OR_RETURN(request.prompt.messages, ParseMessages(*messages));
  DT_ASSIGN_OR_RETURN(request.prompt.continue_final_message, reader.Bool("continue_final_message", false));
  DT_ASSIGN_OR_RETURN(request.prompt.add_generation_prompt,
                      reader.Bool("add_generation_prompt", !request.prompt.continue_final_message));
  if (request.prompt.continue_final_message && request.prompt.add_generation_prompt)
    return BadField("continue_final_message", "cannot be true together with add_generation_prompt");
  DT_RETURN_IF_ERROR(ParseTemplateKwargs(reader, request.prompt));
  DT_RETURN_IF_ERROR(ParseThinking(reader, request));
  DT_ASSIGN_OR_RETURN(request.tools, ParseTools(body, model, !request.fields.grammar.empty(), request.prompt.tools));
  if (!request.tools.grammar.is_null())
    DT_RETURN_IF_ERROR(CheckGrammarFields(request.fields, request.tools.param, model));
  return request;
}

}  // namespace dovetail::server
