#pragma once
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "server/openai/json.h"

namespace dovetail::server {

// Where the fields of a chat's body came from, for a body that was written from one of another API: errors then name
// what the client sent.
// Threads: thread-compatible; a value.
class FieldNames {
 public:
  // What lies at `chat`, a dotted path of the chat's body, and below it came from `own`. The longest such path counts.
  void Add(std::string chat, std::string own) { names_.emplace_back(std::move(chat), std::move(own)); }

  // The status about the client's own field; OK, or what is about no field of these, as it is.
  absl::Status Rename(const absl::Status& status) const;

 private:
  std::string OwnOf(const std::string& chat) const;

  std::vector<std::pair<std::string, std::string>> names_;
};

// A body of /v1/chat/completions that was written from one of another API.
struct ChatBody {
  Json body = Json::object();
  FieldNames names;
};

// The messages of such a body. What an assistant said is cut into items in those APIs: thoughts, text and calls that
// follow each other are one message here. `path` is where an item stands in the client's body.
// Threads: thread-compatible.
class ChatHistory {
 public:
  explicit ChatHistory(ChatBody& chat) : chat_(chat) { chat_.body["messages"] = Json::array(); }

  // Content: a string, or an array of {type: text, text}; it came from `content_path`.
  void Message(const std::string& role, Json content, const std::string& path, const std::string& content_path);
  void Thought(const std::string& text, const std::string& path);
  void Say(Json content, const std::string& path, const std::string& content_path);
  // `arguments`: JSON text. `id_path`, `result_path`: where the call's id and the result's content came from.
  void Call(const Json& id, const Json& name, Json arguments, const std::string& path, const std::string& id_path);
  void Result(const Json& id, Json content, const std::string& path, const std::string& id_path,
              const std::string& content_path);

 private:
  Json& messages() { return chat_.body["messages"]; }
  Json& Begin(const std::string& role, const std::string& path);
  // The assistant's message that may still get `field`.
  Json& Assistant(const char* field, const std::string& path);
  std::string Last() { return absl::StrCat("messages.", messages().size() - 1); }

  ChatBody& chat_;
};

// Text of another API's content as a chat has it: a string as it is, an array of parts of one of `types` as parts of
// type text. kInvalidArgument names the part below `path`.
// Threads: pure.
absl::StatusOr<Json> TextContent(const Json& content, const std::string& path,
                                 const std::vector<std::string_view>& types);

}  // namespace dovetail::server
