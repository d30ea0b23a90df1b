#include <algorithm>
#include <array>

#include "server/openai/chat_body.h"
#include "server/openai/field_reader.h"
#include "server/openai/parse_generation.h"
#include "server/openai/requests.h"
#include "server/openai/responses_tools.h"
#include "server/openai/shared_fields.h"

namespace dovetail::server {
namespace {

constexpr size_t kMaxText = size_t{64} << 20;  // of one field; the body's own limit comes first

constexpr std::string_view kNothingKept = "is not supported: no response is kept here; send the conversation as input";

constexpr RefusedField kRefused[] = {
    {"previous_response_id", "", kNothingKept},
    {"conversation", "", kNothingKept},
    {"prompt", "", "is not supported: no prompt is kept here; send input and instructions"},
    {"background", "false", "is not supported: no response is kept here"},
    {"truncation", "\"disabled\"", "only \"disabled\" is supported: nothing of the input is dropped"},
    {"max_tool_calls", "", "is not supported: it counts calls of tools that a server runs, and this one runs none"},
    {"context_management", "[]", "is not supported: nothing of the input is dropped"},
    {"top_logprobs", "0", "log probabilities are not supported here; use /v1/chat/completions"},
    {"logprobs", "false", "log probabilities are not supported here; use /v1/chat/completions"},
    {"prompt_logprobs", "", "log probabilities are not supported here; use /v1/chat/completions"},
    {"return_progress", "false", "is not supported here; use /v1/chat/completions"},
    {"n", "1", "a response is one answer; use /v1/chat/completions"},
    {"messages", "", "this is /v1/responses: send input, or use /v1/chat/completions"},
    {"response_format", "", "use text.format"},
    {"max_tokens", "", "use max_output_tokens"},
    {"max_completion_tokens", "", "use max_output_tokens"},
    {"reasoning_effort", "", "use reasoning.effort"},
    {"return_token_ids", "false", "is not supported here; use /v1/chat/completions"},
};

absl::Status CheckInclude(const FieldReader& reader) {
  const Json* include = reader.Find("include");
  if (include == nullptr) return absl::OkStatus();
  if (!include->is_array()) return BadField("include", "must be an array of strings, not ", Describe(*include));
  for (size_t i = 0; i < include->size(); ++i)
    if ((*include)[i] != "reasoning.encrypted_content")  // thoughts come as they are
      return BadField(absl::StrCat("include.", i), Describe((*include)[i]), " is not supported; leave it out");
  return absl::OkStatus();
}

// ---- input ----

absl::Status ReadMessage(const FieldReader& item, const std::string& path, ChatHistory& history) {
  DT_ASSIGN_OR_RETURN(const auto role, item.String("role", 64));
  if (!role) return BadField(item.Path("role"), "is required");
  const Json* content = item.Find("content");
  const std::string content_path = item.Path("content");
  if (content == nullptr) return BadField(content_path, "is required: a string, or an array of text parts");
  if (*role == "assistant") {
    DT_ASSIGN_OR_RETURN(Json text, TextContent(*content, content_path, {"output_text", "text"}));
    history.Say(std::move(text), path, content_path);
    return absl::OkStatus();
  }
  if (*role != "user" && *role != "system" && *role != "developer")
    return BadField(item.Path("role"), "must be user, assistant, system or developer, not ", Describe(Json(*role)));
  DT_ASSIGN_OR_RETURN(Json text, TextContent(*content, content_path, {"input_text", "text"}));
  history.Message(*role, std::move(text), path, content_path);
  return absl::OkStatus();
}

absl::Status ReadThought(const FieldReader& item, const std::string& path, ChatHistory& history) {
  std::string text;
  const Json* content = item.Find("content");
  if (content != nullptr && !content->empty()) {
    DT_ASSIGN_OR_RETURN(const Json parts, TextContent(*content, item.Path("content"), {"reasoning_text"}));
    for (const Json& part : parts) text += part.is_string() ? part.get<std::string>() : part["text"].get<std::string>();
  } else if (item.Has("encrypted_content")) {
    return BadField(item.Path("encrypted_content"), "cannot be read: another server wrote it; leave the item out");
  }
  if (!text.empty()) history.Thought(text, path);
  return absl::OkStatus();
}

Json FieldOf(const FieldReader& item, const char* name) { return item.Has(name) ? *item.Find(name) : Json(); }

absl::Status ReadCall(const FieldReader& item, const std::string& path, ChatHistory& history) {
  Json name = FieldOf(item, "name");
  DT_ASSIGN_OR_RETURN(const auto group, item.String("namespace", kMaxText));
  if (group && name.is_string()) name = ShownName(*group, name.get<std::string>());
  history.Call(FieldOf(item, "call_id"), name, FieldOf(item, "arguments"), path, item.Path("call_id"));
  return absl::OkStatus();
}

absl::Status ReadCustomCall(const FieldReader& item, const std::string& path, ChatHistory& history) {
  const Json* input = item.Find("input");
  if (input == nullptr || !input->is_string()) return BadField(item.Path("input"), "is required: a string");
  history.Call(FieldOf(item, "call_id"), FieldOf(item, "name"), InputAsArguments(*input), path, item.Path("call_id"));
  return absl::OkStatus();
}

absl::Status ReadOutput(const FieldReader& item, const std::string& path, ChatHistory& history) {
  const Json* output = item.Find("output");
  if (output == nullptr) return BadField(item.Path("output"), "is required: a string, or an array of text parts");
  DT_ASSIGN_OR_RETURN(Json text, TextContent(*output, item.Path("output"), {"input_text", "output_text", "text"}));
  history.Result(FieldOf(item, "call_id"), std::move(text), path, item.Path("call_id"), item.Path("output"));
  return absl::OkStatus();
}

absl::Status ReadItem(const Json& value, const std::string& path, ChatHistory& history) {
  if (!value.is_object()) return BadField(path, "must be an object with type, not ", Describe(value));
  const FieldReader item(value, path);
  DT_ASSIGN_OR_RETURN(const auto type, item.String("type", 64));
  if (!type || *type == "message") return ReadMessage(item, path, history);
  if (*type == "reasoning") return ReadThought(item, path, history);
  if (*type == "function_call") return ReadCall(item, path, history);
  if (*type == "custom_tool_call") return ReadCustomCall(item, path, history);
  if (*type == "function_call_output" || *type == "custom_tool_call_output") return ReadOutput(item, path, history);
  if (*type == "item_reference")
    return BadField(item.Path("type"), "references are not supported: no item is kept here; send the item itself");
  return BadField(item.Path("type"),
                  "must be message, reasoning, function_call, function_call_output, custom_tool_call or "
                  "custom_tool_call_output, not ",
                  Describe(Json(*type)));
}

absl::Status ReadInput(const FieldReader& reader, ChatBody& chat) {
  ChatHistory history(chat);
  chat.names.Add("messages", "input");
  DT_ASSIGN_OR_RETURN(const auto instructions, reader.String("instructions", kMaxText));
  if (instructions) history.Message("system", *instructions, "instructions", "instructions");
  const Json* input = reader.Find("input");
  if (input == nullptr) return BadField("input", "is required: a string, or an array of items");
  if (input->is_string()) {
    history.Message("user", *input, "input", "input");
    return absl::OkStatus();
  }
  if (!input->is_array()) return BadField("input", "must be a string or an array of items, not ", Describe(*input));
  if (input->empty()) return BadField("input", "is empty");
  for (size_t i = 0; i < input->size(); ++i)
    DT_RETURN_IF_ERROR(ReadItem((*input)[i], absl::StrCat("input.", i), history));
  return absl::OkStatus();
}

// ---- tools, format, reasoning ----

absl::Status ReadTools(const FieldReader& reader, ChatBody& chat) {
  if (const Json* tools = reader.Find("tools")) DT_RETURN_IF_ERROR(ToolsAsFunctions(*tools, chat));
  if (const Json* choice = reader.Find("tool_choice")) ToolChoiceAsFunction(*choice, chat);
  return absl::OkStatus();
}

absl::Status ReadText(const FieldReader& reader, ChatBody& chat) {
  const Json* text = reader.Find("text");
  if (text == nullptr) return absl::OkStatus();
  if (!text->is_object()) return BadField("text", "must be an object, not ", Describe(*text));
  const FieldReader inner(*text, "text");
  if (const Json* verbosity = inner.Find("verbosity")) chat.body["verbosity"] = *verbosity;
  chat.names.Add("verbosity", "text.verbosity");
  const Json* format = inner.Find("format");
  if (format == nullptr) return absl::OkStatus();
  chat.names.Add("response_format", "text.format");
  chat.names.Add("response_format.json_schema", "text.format");
  chat.body["response_format"] = *format;
  if (!format->is_object() || !format->contains("type") || (*format)["type"] != "json_schema") return absl::OkStatus();
  Json schema = *format;
  schema.erase("type");
  chat.body["response_format"] = {{"type", "json_schema"}, {"json_schema", std::move(schema)}};
  return absl::OkStatus();
}

absl::Status ReadReasoning(const FieldReader& reader, ChatBody& chat) {
  const Json* reasoning = reader.Find("reasoning");
  if (reasoning == nullptr) return absl::OkStatus();
  if (!reasoning->is_object()) return BadField("reasoning", "must be an object, not ", Describe(*reasoning));
  const FieldReader inner(*reasoning, "reasoning");
  if (const Json* effort = inner.Find("effort")) chat.body["reasoning_effort"] = *effort;
  chat.names.Add("reasoning_effort", "reasoning.effort");
  for (const char* name : {"summary", "generate_summary"}) {  // thoughts come whole, and are not summed up
    DT_ASSIGN_OR_RETURN(const auto summary, inner.String(name, 64));
    constexpr std::array<std::string_view, 3> kKinds = {"auto", "concise", "detailed"};
    if (summary && std::find(kKinds.begin(), kKinds.end(), *summary) == kKinds.end())
      return BadField(inner.Path(name), "must be auto, concise or detailed, not ", Describe(Json(*summary)));
  }
  return absl::OkStatus();
}

Json Number(float value) { return Json::parse(absl::StrCat(value)); }  // 0.8, not 0.800000011920929

// What the response repeats of the request, with what was chosen where that says nothing.
Json Repeated(const Json& body, const ServedModel& model) {
  const FieldReader reader(body);
  const auto field = [&](const char* name, Json absent) { return reader.Has(name) ? *reader.Find(name) : absent; };
  Json text = field("text", Json::object());
  if (!text.contains("format") || text["format"].is_null()) text["format"] = {{"type", "text"}};
  const Json given = field("reasoning", Json::object());
  const Json reasoning = {{"effort", given.contains("effort") ? given["effort"] : Json()}, {"summary", nullptr}};
  return {{"background", false},
          {"instructions", field("instructions", nullptr)},
          {"max_output_tokens", field("max_output_tokens", nullptr)},
          {"max_tool_calls", nullptr},
          {"metadata", field("metadata", Json::object())},
          {"parallel_tool_calls", field("parallel_tool_calls", true)},
          {"previous_response_id", nullptr},
          {"reasoning", reasoning},
          {"service_tier", "default"},
          {"store", false},
          {"temperature", field("temperature", Number(model.defaults.temperature.value_or(1.0f)))},
          {"text", std::move(text)},
          {"tool_choice", field("tool_choice", "auto")},
          {"tools", field("tools", Json::array())},
          {"top_logprobs", 0},
          {"top_p", field("top_p", Number(model.defaults.top_p.value_or(1.0f)))},
          {"truncation", "disabled"},
          {"user", field("user", nullptr)}};
}

absl::StatusOr<ChatBody> ToChat(const Json& body) {
  ChatBody chat;
  const FieldReader reader(body);
  constexpr std::array<std::string_view, 8> kOwn = {"input",       "instructions", "max_output_tokens", "tools",
                                                    "tool_choice", "text",         "reasoning",         "include"};
  DT_ASSIGN_OR_RETURN(chat.body, SharedFields(body, kOwn, kRefused));
  DT_RETURN_IF_ERROR(CheckInclude(reader));
  if (const Json* limit = reader.Find("max_output_tokens")) chat.body["max_tokens"] = *limit;
  chat.names.Add("max_tokens", "max_output_tokens");
  DT_RETURN_IF_ERROR(ReadInput(reader, chat));
  DT_RETURN_IF_ERROR(ReadTools(reader, chat));
  DT_RETURN_IF_ERROR(ReadText(reader, chat));
  DT_RETURN_IF_ERROR(ReadReasoning(reader, chat));
  return chat;
}

}  // namespace

absl::StatusOr<ChatRequest> ParseResponsesRequest(const Json& body, const ServedModel& model) {
  DT_RETURN_IF_ERROR(RequireObject(body));
  DT_ASSIGN_OR_RETURN(ChatBody chat, ToChat(body));
  auto request = ParseChatRequest(chat.body, model);
  if (!request.ok()) return chat.names.Rename(request.status());
  request->shape = AnswerShape::kResponses;
  request->names = std::move(chat.names);
  request->repeated = Repeated(body, model);
  return request;
}

}  // namespace dovetail::server
