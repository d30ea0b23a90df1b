#include <algorithm>
#include <array>
#include <set>
#include <string>
#include <vector>

#include "server/openai/chat_body.h"
#include "server/openai/field_reader.h"
#include "server/openai/message_documents.h"
#include "server/openai/parse_generation.h"
#include "server/openai/requests.h"
#include "server/openai/shared_fields.h"

namespace dovetail::server {
namespace {

constexpr size_t kMaxToolText = 1024;

constexpr RefusedField kRefused[] = {
    {"container", "", "is not supported: this server runs no tools of its own"},
    {"mcp_servers", "[]", "is not supported: this server runs no tools of its own"},
    {"n", "1", "a message is one answer; use /v1/chat/completions"},
    {"logprobs", "false", "log probabilities are not supported here; use /v1/chat/completions"},
    {"prompt_logprobs", "", "log probabilities are not supported here; use /v1/chat/completions"},
    {"return_progress", "false", "is not supported here; use /v1/chat/completions"},
    {"return_token_ids", "false", "is not supported here; use /v1/chat/completions"},
    {"response_format", "", "use output_config.format"},
    {"stop", "", "use stop_sequences"},
    {"max_completion_tokens", "", "use max_tokens"},
    {"reasoning_effort", "", "use thinking, or output_config.effort"},
};

// ---- messages ----

absl::Status ReadThinking(const FieldReader& block, const std::string& path, ChatHistory& history) {
  const Json* text = block.Find("thinking");
  if (text == nullptr || !text->is_string()) return BadField(block.Path("thinking"), "must be a string");
  if (!text->get_ref<const std::string&>().empty()) history.Thought(text->get<std::string>(), path);
  return absl::OkStatus();
}

absl::Status ReadUse(const FieldReader& block, const std::string& path, ChatHistory& history) {
  const auto field = [&](const char* name) { return block.Has(name) ? *block.Find(name) : Json(); };
  const Json input = block.Has("input") ? field("input") : Json::object();
  if (!input.is_object()) return BadField(block.Path("input"), "must be an object, not ", Describe(input));
  history.Call(field("id"), field("name"), Dump(input), path, block.Path("id"));
  return absl::OkStatus();
}

std::string MayBeCalled(const std::string& tool) { return absl::StrCat("The tool ", tool, " may be called now."); }

// A tool that a search has found is named; what it is stands in `tools` (Claude Code's ToolSearch). Documents become
// their texts.
absl::StatusOr<Json> AsTexts(const Json& content, const std::string& path) {
  Json texts = content;
  if (!content.is_array()) return texts;
  for (size_t i = 0; i < texts.size(); ++i) {
    const Json& part = content[i];
    if (!part.is_object() || !part.contains("type")) continue;
    if (part["type"] == "document") {
      DT_ASSIGN_OR_RETURN(std::string text, DocumentText(FieldReader(part, absl::StrCat(path, ".", i))));
      texts[i] = {{"type", "text"}, {"text", std::move(text)}};
      continue;
    }
    if (part["type"] != "tool_reference") continue;
    const FieldReader reference(part, absl::StrCat(path, ".", i));
    DT_ASSIGN_OR_RETURN(const auto name, reference.String("tool_name", kMaxToolText));
    if (!name) return BadField(reference.Path("tool_name"), "is required");
    texts[i] = {{"type", "text"}, {"text", MayBeCalled(*name)}};
  }
  return texts;
}

absl::Status ReadResult(const FieldReader& block, const std::string& path, ChatHistory& history) {
  DT_RETURN_IF_ERROR(block.Bool("is_error", false).status());  // its text says so to the model
  const Json* content = block.Find("content");
  Json text = "";
  if (content != nullptr) {
    DT_ASSIGN_OR_RETURN(const Json texts, AsTexts(*content, block.Path("content")));
    DT_ASSIGN_OR_RETURN(text, TextContent(texts, block.Path("content"), {"text"}));
  }
  history.Result(block.Has("tool_use_id") ? *block.Find("tool_use_id") : Json(), std::move(text), path,
                 block.Path("tool_use_id"), block.Path("content"));
  return absl::OkStatus();
}

// What the system changes of the tools in the midst of a conversation: the last word on each name counts.
struct ToolChanges {
  struct Added {
    std::string name, path;
    Json definition;
  };
  std::vector<Added> added;
  std::set<std::string> removed;

  void Forget(const std::string& name) {
    std::erase_if(added, [&](const Added& one) { return one.name == name; });
  }
};

// Returns what the model is told of it.
absl::StatusOr<std::string> ReadToolChange(const FieldReader& block, bool addition, ToolChanges& changes) {
  const Json* value = block.Find("tool");
  if (value == nullptr || !value->is_object())
    return BadField(block.Path("tool"), "must be an object of type tool_reference or tool_definition");
  const FieldReader tool(*value, block.Path("tool"));
  DT_ASSIGN_OR_RETURN(const auto type, tool.String("type", 64));
  const bool defined = type == "tool_definition" && addition;
  if (!defined && type != "tool_reference")
    return BadField(tool.Path("type"), "must be tool_reference", addition ? " or tool_definition" : "");
  const Json* definition = defined ? tool.Find("definition") : value;
  if (definition == nullptr || !definition->is_object())
    return BadField(tool.Path("definition"), "must be an object with name and input_schema");
  const FieldReader named(*definition, defined ? tool.Path("definition") : block.Path("tool"));
  DT_ASSIGN_OR_RETURN(const auto name, named.String("name", kMaxToolText));
  if (!name) return BadField(named.Path("name"), "is required");
  if (!addition || defined) changes.Forget(*name);
  if (defined) changes.added.push_back({*name, tool.Path("definition"), *definition});
  if (addition) {
    changes.removed.erase(*name);
    return MayBeCalled(*name);
  }
  changes.removed.insert(*name);
  return absl::StrCat("The tool ", *name, " may not be called any more.");
}

// The blocks of one message: texts that follow each other are one.
absl::Status ReadBlocks(const std::string& role, const Json& content, const std::string& path, ChatHistory& history,
                        ToolChanges& changes) {
  Json texts = Json::array();
  std::string texts_path;
  const auto flush = [&] {
    if (texts.empty()) return;
    if (role == "assistant")
      history.Say(std::move(texts), path, path + ".content");
    else
      history.Message(role, std::move(texts), path, path + ".content");
    texts = Json::array();
  };
  for (size_t i = 0; i < content.size(); ++i) {
    const std::string at = absl::StrCat(path, ".content.", i);
    if (!content[i].is_object()) return BadField(at, "must be an object with type, not ", Describe(content[i]));
    const FieldReader block(content[i], at);
    DT_ASSIGN_OR_RETURN(const auto type, block.String("type", 64));
    if (!type) return BadField(block.Path("type"), "is required");
    if (*type == "text") {
      const Json* text = block.Find("text");
      if (text == nullptr || !text->is_string()) return BadField(block.Path("text"), "must be a string");
      texts.push_back({{"type", "text"}, {"text", *text}});
      continue;
    }
    if (role == "user" && *type == "document") {
      DT_ASSIGN_OR_RETURN(std::string text, DocumentText(block));
      texts.push_back({{"type", "text"}, {"text", std::move(text)}});
      continue;
    }
    if (role == "system" && (*type == "tool_addition" || *type == "tool_removal")) {
      DT_ASSIGN_OR_RETURN(std::string told, ReadToolChange(block, *type == "tool_addition", changes));
      texts.push_back({{"type", "text"}, {"text", std::move(told)}});
      continue;
    }
    flush();
    if (role == "assistant" && *type == "thinking") {
      DT_RETURN_IF_ERROR(ReadThinking(block, at, history));
    } else if (role == "assistant" && *type == "tool_use") {
      DT_RETURN_IF_ERROR(ReadUse(block, at, history));
    } else if (role == "user" && *type == "tool_result") {
      DT_RETURN_IF_ERROR(ReadResult(block, at, history));
    } else {
      return BadField(block.Path("type"), Describe(Json(*type)), " is not supported in a message of the ", role,
                      role == "user"        ? ": only text, document and tool_result are"
                      : role == "assistant" ? ": only text, thinking and tool_use are"
                                            : ": only text, tool_addition and tool_removal are");
    }
  }
  flush();
  return absl::OkStatus();
}

// Behind the first message, the system may say more (as Claude Code has it do).
absl::Status ReadMessage(const Json& value, const std::string& path, bool first, ChatHistory& history,
                         ToolChanges& changes) {
  if (!value.is_object()) return BadField(path, "must be an object with role and content, not ", Describe(value));
  const FieldReader message(value, path);
  DT_ASSIGN_OR_RETURN(const auto role, message.String("role", 64));
  const bool system = role == "system" && !first;
  if (role != "user" && role != "assistant" && !system)
    return BadField(message.Path("role"), "must be user or assistant",
                    first ? "; what the system says first is in the field system" : ", or system");
  const Json* content = message.Find("content");
  const std::string content_path = message.Path("content");
  if (content == nullptr) return BadField(content_path, "is required: a string, or an array of blocks");
  if (content->is_array()) return ReadBlocks(*role, *content, path, history, changes);
  if (!content->is_string())
    return BadField(content_path, "must be a string or an array of blocks, not ", Describe(*content));
  if (*role == "assistant")
    history.Say(*content, path, content_path);
  else
    history.Message(*role, *content, path, content_path);
  return absl::OkStatus();
}

// A last message of the assistant is the beginning of the answer.
absl::Status ReadConversation(const FieldReader& reader, ChatBody& chat, ToolChanges& changes) {
  ChatHistory history(chat);
  if (const Json* system = reader.Find("system")) {
    DT_ASSIGN_OR_RETURN(Json text, TextContent(*system, "system", {"text"}));
    history.Message("system", std::move(text), "system", "system");
  }
  const Json* messages = reader.Find("messages");
  if (messages == nullptr) return BadField("messages", "is required: an array of {role, content}");
  if (!messages->is_array()) return BadField("messages", "must be an array of messages, not ", Describe(*messages));
  if (messages->empty()) return BadField("messages", "is empty");
  for (size_t i = 0; i < messages->size(); ++i)
    DT_RETURN_IF_ERROR(ReadMessage((*messages)[i], absl::StrCat("messages.", i), i == 0, history, changes));
  const Json& last = chat.body["messages"].back();
  if (last["role"] == "assistant" && !last.contains("tool_calls")) chat.body["continue_final_message"] = true;
  return absl::OkStatus();
}

// ---- tools, format, thinking ----

absl::Status ReadTool(const Json& tool, const std::string& path, ChatBody& chat) {
  if (!tool.is_object()) return BadField(path, "must be an object with name and input_schema, not ", Describe(tool));
  const FieldReader fields(tool, path);
  if (fields.Has("type") && *fields.Find("type") != "custom")
    return BadField(path + ".type", "must be \"custom\": this server runs no tools of its own");
  Json function = Json::object();
  for (const auto& [name, as] : {std::pair("name", "name"), std::pair("description", "description"),
                                 std::pair("input_schema", "parameters"), std::pair("strict", "strict")})
    if (fields.Has(name)) function[as] = *fields.Find(name);
  Json& all = chat.body["tools"];
  const std::string at = absl::StrCat("tools.", all.size());
  chat.names.Add(at, path);
  chat.names.Add(at + ".function", path);
  chat.names.Add(at + ".function.parameters", path + ".input_schema");
  all.push_back({{"type", "function"}, {"function", std::move(function)}});
  return absl::OkStatus();
}

// Those of the request, as the conversation has changed them. Tools that are to be loaded later (defer_loading) are
// shown at once.
absl::Status ReadTools(const FieldReader& reader, const ToolChanges& changes, ChatBody& chat) {
  const Json* tools = reader.Find("tools");
  if (tools == nullptr && changes.added.empty()) return absl::OkStatus();
  if (tools != nullptr && !tools->is_array()) return BadField("tools", "must be an array, not ", Describe(*tools));
  chat.body["tools"] = Json::array();
  const auto replaced = [&](const Json& tool) {
    if (!tool.is_object() || !tool.contains("name") || !tool["name"].is_string()) return false;
    const auto& name = tool["name"].get_ref<const std::string&>();
    const auto same = [&](const ToolChanges::Added& one) { return one.name == name; };
    return changes.removed.contains(name) || std::any_of(changes.added.begin(), changes.added.end(), same);
  };
  for (size_t i = 0; tools != nullptr && i < tools->size(); ++i)
    if (!replaced((*tools)[i])) DT_RETURN_IF_ERROR(ReadTool((*tools)[i], absl::StrCat("tools.", i), chat));
  for (const ToolChanges::Added& one : changes.added) DT_RETURN_IF_ERROR(ReadTool(one.definition, one.path, chat));
  return absl::OkStatus();
}

absl::Status ReadToolChoice(const FieldReader& reader, ChatBody& chat) {
  const Json* value = reader.Find("tool_choice");
  if (value == nullptr) return absl::OkStatus();
  if (!value->is_object()) return BadField("tool_choice", "must be an object with type, not ", Describe(*value));
  const FieldReader choice(*value, "tool_choice");
  DT_ASSIGN_OR_RETURN(const auto type, choice.String("type", 64));
  DT_ASSIGN_OR_RETURN(const bool one, choice.Bool("disable_parallel_tool_use", false));
  if (one) chat.body["parallel_tool_calls"] = false;
  chat.names.Add("tool_choice.function", "tool_choice");
  if (type == "auto" || type == "none") {
    chat.body["tool_choice"] = *type;
  } else if (type == "any") {
    chat.body["tool_choice"] = "required";
  } else if (type == "tool") {
    const Json name = choice.Has("name") ? *choice.Find("name") : Json();
    chat.body["tool_choice"] = {{"type", "function"}, {"function", {{"name", name}}}};
  } else {
    return BadField("tool_choice.type", "must be auto, any, tool or none");
  }
  return absl::OkStatus();
}

// The budget of a thought is the model's own.
absl::Status ReadThought(const FieldReader& reader, ChatBody& chat) {
  const Json* value = reader.Find("thinking");
  if (value == nullptr) return absl::OkStatus();
  if (!value->is_object()) return BadField("thinking", "must be an object with type, not ", Describe(*value));
  const FieldReader thinking(*value, "thinking");
  DT_ASSIGN_OR_RETURN(const auto type, thinking.String("type", 64));
  if (type != "enabled" && type != "disabled" && type != "adaptive")
    return BadField("thinking.type", "must be enabled, disabled or adaptive");
  if (type != "adaptive") chat.body["enable_thinking"] = type == "enabled";
  chat.names.Add("enable_thinking", "thinking");
  return absl::OkStatus();
}

absl::Status ReadOutput(const FieldReader& reader, ChatBody& chat) {
  const Json* value = reader.Find("output_config");
  if (value == nullptr) return absl::OkStatus();
  if (!value->is_object()) return BadField("output_config", "must be an object, not ", Describe(*value));
  const FieldReader output(*value, "output_config");
  if (const Json* effort = output.Find("effort"))
    chat.body["reasoning_effort"] = *effort == "max" ? Json("xhigh") : *effort;  // the most, as each API calls it
  chat.names.Add("reasoning_effort", "output_config.effort");
  const Json* format = output.Find("format");
  if (format == nullptr) return absl::OkStatus();
  const std::string path = "output_config.format";
  chat.names.Add("response_format", path);
  chat.names.Add("response_format.json_schema", path);
  if (!format->is_object() || !format->contains("type") || (*format)["type"] != "json_schema")
    return BadField(path + ".type", "must be json_schema");
  Json schema = *format;
  schema.erase("type");
  chat.body["response_format"] = {{"type", "json_schema"}, {"json_schema", std::move(schema)}};
  return absl::OkStatus();
}

// Nothing of a conversation is dropped here, so what asks for that and no more is as it is (Claude Code sends it).
absl::Status CheckContextManagement(const FieldReader& reader) {
  const Json* value = reader.Find("context_management");
  if (value == nullptr) return absl::OkStatus();
  if (!value->is_object()) return BadField("context_management", "must be an object, not ", Describe(*value));
  const FieldReader management(*value, "context_management");
  const Json* edits = management.Find("edits");
  if (edits == nullptr) return absl::OkStatus();
  if (!edits->is_array()) return BadField("context_management.edits", "must be an array, not ", Describe(*edits));
  for (size_t i = 0; i < edits->size(); ++i) {
    const std::string path = absl::StrCat("context_management.edits.", i);
    const Json& edit = (*edits)[i];
    if (!edit.is_object()) return BadField(path, "must be an object with type, not ", Describe(edit));
    const bool keeps_all = edit.contains("type") && edit["type"] == "clear_thinking_20251015" &&
                           edit.contains("keep") && edit["keep"] == "all";
    if (!keeps_all)
      return BadField(path,
                      "is not supported: nothing of the conversation is dropped here; only "
                      "clear_thinking_20251015 with keep \"all\" is taken");
  }
  return absl::OkStatus();
}

absl::StatusOr<ChatBody> ToChat(const Json& body) {
  ChatBody chat;
  const FieldReader reader(body);
  constexpr std::array<std::string_view, 8> kOwn = {"system",      "messages", "stop_sequences", "tools",
                                                    "tool_choice", "thinking", "output_config",  "context_management"};
  DT_ASSIGN_OR_RETURN(chat.body, SharedFields(body, kOwn, kRefused));
  if (const Json* stop = reader.Find("stop_sequences")) chat.body["stop"] = *stop;
  chat.names.Add("stop", "stop_sequences");
  ToolChanges changes;
  DT_RETURN_IF_ERROR(ReadConversation(reader, chat, changes));
  DT_RETURN_IF_ERROR(ReadTools(reader, changes, chat));
  DT_RETURN_IF_ERROR(ReadToolChoice(reader, chat));
  DT_RETURN_IF_ERROR(ReadThought(reader, chat));
  DT_RETURN_IF_ERROR(ReadOutput(reader, chat));
  DT_RETURN_IF_ERROR(CheckContextManagement(reader));
  return chat;
}

absl::StatusOr<ChatRequest> Parse(const Json& body, const ServedModel& model) {
  DT_ASSIGN_OR_RETURN(ChatBody chat, ToChat(body));
  auto request = ParseChatRequest(chat.body, model);
  if (!request.ok()) return chat.names.Rename(request.status());
  request->shape = AnswerShape::kMessages;
  request->names = std::move(chat.names);
  return request;
}

}  // namespace

absl::StatusOr<ChatRequest> ParseMessagesRequest(const Json& body, const ServedModel& model) {
  DT_RETURN_IF_ERROR(RequireObject(body));
  if (!FieldReader(body).Has("max_tokens")) return BadField("max_tokens", "is required: the most tokens of the answer");
  return Parse(body, model);
}

absl::StatusOr<ChatRequest> ParseCountTokensRequest(const Json& body, const ServedModel& model) {
  DT_RETURN_IF_ERROR(RequireObject(body));
  return Parse(body, model);
}

}  // namespace dovetail::server
