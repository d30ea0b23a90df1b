#include "server/openai/chat_body.h"

#include <algorithm>

#include "server/openai/api_error.h"
#include "server/openai/field_reader.h"

namespace dovetail::server {

std::string FieldNames::OwnOf(const std::string& chat) const {
  size_t longest = 0;
  std::string own = chat;
  for (const auto& [inner, outer] : names_) {
    const bool below =
        chat.compare(0, inner.size(), inner) == 0 && (chat.size() == inner.size() || chat[inner.size()] == '.');
    if (!below || inner.size() < longest) continue;
    longest = inner.size();
    own = outer + chat.substr(inner.size());
  }
  return own;
}

absl::Status FieldNames::Rename(const absl::Status& status) const {
  if (status.ok()) return status;
  const auto param = ToApiError(status).param;
  if (!param) return status;
  const std::string own = OwnOf(*param);
  std::string message(status.message());
  if (message.compare(0, param->size(), *param) == 0) message.replace(0, param->size(), own);
  absl::Status renamed(status.code(), message);
  status.ForEachPayload([&](absl::string_view url, const absl::Cord& payload) { renamed.SetPayload(url, payload); });
  return internal::WithParam(std::move(renamed), own);
}

Json& ChatHistory::Begin(const std::string& role, const std::string& path) {
  messages().push_back({{"role", role}, {"content", nullptr}});
  chat_.names.Add(Last(), path);
  return messages().back();
}

void ChatHistory::Message(const std::string& role, Json content, const std::string& path,
                          const std::string& content_path) {
  Begin(role, path)["content"] = std::move(content);
  chat_.names.Add(Last() + ".content", content_path);
}

Json& ChatHistory::Assistant(const char* field, const std::string& path) {
  const bool begins = messages().empty() || messages().back()["role"] != "assistant";
  if (begins) return Begin("assistant", path);
  const Json& last = messages().back();
  const bool said = !last["content"].is_null() || last.contains("tool_calls");
  const std::string_view next = field;
  const bool behind =
      next == "reasoning_content" ? said || last.contains("reasoning_content") : next == "content" && said;
  return behind ? Begin("assistant", path) : messages().back();
}

void ChatHistory::Thought(const std::string& text, const std::string& path) {
  Assistant("reasoning_content", path)["reasoning_content"] = text;
}

void ChatHistory::Say(Json content, const std::string& path, const std::string& content_path) {
  Assistant("content", path)["content"] = std::move(content);
  chat_.names.Add(Last() + ".content", content_path);
}

void ChatHistory::Call(const Json& id, const Json& name, Json arguments, const std::string& path,
                       const std::string& id_path) {
  Json& calls = Assistant("tool_calls", path)["tool_calls"];
  calls.push_back(
      {{"id", id}, {"type", "function"}, {"function", {{"name", name}, {"arguments", std::move(arguments)}}}});
  const std::string call = absl::StrCat(Last(), ".tool_calls.", calls.size() - 1);
  chat_.names.Add(call, path);
  chat_.names.Add(call + ".function", path);
  chat_.names.Add(call + ".id", id_path);
}

void ChatHistory::Result(const Json& id, Json content, const std::string& path, const std::string& id_path,
                         const std::string& content_path) {
  Json& message = Begin("tool", path);
  message["tool_call_id"] = id;
  message["content"] = std::move(content);
  chat_.names.Add(Last() + ".tool_call_id", id_path);
  chat_.names.Add(Last() + ".content", content_path);
}

absl::StatusOr<Json> TextContent(const Json& content, const std::string& path,
                                 const std::vector<std::string_view>& types) {
  if (content.is_string()) return content;
  if (!content.is_array()) return BadField(path, "must be a string or an array of parts, not ", Describe(content));
  Json parts = Json::array();
  for (const Json& part : content) {
    const std::string at = absl::StrCat(path, ".", parts.size());
    if (!part.is_object()) return BadField(at, "must be an object with type and text, not ", Describe(part));
    const FieldReader reader(part, at);
    DT_ASSIGN_OR_RETURN(const auto type, reader.String("type", 64));
    if (!type) return BadField(reader.Path("type"), "is required");
    if (std::find(types.begin(), types.end(), *type) == types.end())
      return BadField(reader.Path("type"), Describe(Json(*type)), " is not supported here; only text is read");
    const Json* text = reader.Find("text");
    if (text == nullptr || !text->is_string()) return BadField(reader.Path("text"), "must be a string");
    parts.push_back({{"type", "text"}, {"text", *text}});
  }
  return parts;
}

}  // namespace dovetail::server
