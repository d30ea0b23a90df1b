#include "server/openai/messages_answer.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace dovetail::server {
namespace {

using Kind = AnswerBlock::Kind;

class MessagesAnswer : public BlockAnswer {
 public:
  explicit MessagesAnswer(const ResponseSpec& spec) : BlockAnswer(spec) {}

  Json Body() const override {
    Json content = Json::array();
    for (const AnswerBlock& block : blocks()) content.push_back(Whole(block));
    Json message = Message(std::move(content), Usage(end().usage));
    message.update(StopFields());
    return message;
  }

 protected:
  // What is known of the usage by then: the message's last event has all of it.
  std::string OnBegin() override {
    UsageTotals usage;
    usage.prompt_tokens = static_cast<int64_t>(spec().prompts[0].size());
    return Send("message_start", {{"message", Message(Json::array(), Usage(usage))}});
  }

  std::string OnBlockBegins(const AnswerBlock& block) override {
    Json begun = Whole({.kind = block.kind,
                        .index = block.index,
                        .call_id = block.call_id,
                        .name = block.name,
                        .text = block.kind == Kind::kCall ? "{}" : "",
                        .cut_off = false});
    return Send("content_block_start", {{"index", block.index}, {"content_block", std::move(begun)}});
  }

  std::string OnText(const AnswerBlock& block, std::string_view text) override {
    Json delta;
    switch (block.kind) {
      case Kind::kText: delta = {{"type", "text_delta"}, {"text", text}}; break;
      case Kind::kThought: delta = {{"type", "thinking_delta"}, {"thinking", text}}; break;
      case Kind::kCall: delta = {{"type", "input_json_delta"}, {"partial_json", text}}; break;
    }
    return Send("content_block_delta", {{"index", block.index}, {"delta", std::move(delta)}});
  }

  std::string OnBlockEnds(const AnswerBlock& block) override {
    return Send("content_block_stop", {{"index", block.index}});
  }

  std::string OnEnd() override {
    return Send("message_delta", {{"delta", StopFields()}, {"usage", Usage(end().usage)}}) +
           Send("message_stop", Json::object());
  }

  std::string OnFailure(const absl::Status& why) override {
    return Event("error", Json::parse(MessagesErrorBody(ToApiError(why))));
  }

 private:
  static std::string Send(const std::string& type, const Json& fields) {
    Json event = {{"type", type}};
    event.update(fields);
    return Event(type, event);
  }

  // Those that the prefix cache held are counted apart.
  static Json Usage(const UsageTotals& usage) {
    return {{"input_tokens", usage.prompt_tokens - usage.cached_tokens},
            {"cache_creation_input_tokens", 0},
            {"cache_read_input_tokens", usage.cached_tokens},
            {"output_tokens", usage.completion_tokens}};
  }

  Json Message(Json content, Json usage) const {
    return {{"id", spec().id},    {"type", "message"},      {"role", "assistant"},      {"model", spec().model},
            {"content", content}, {"stop_reason", nullptr}, {"stop_sequence", nullptr}, {"usage", usage}};
  }

  static Json Whole(const AnswerBlock& block) {
    switch (block.kind) {
      case Kind::kText: return {{"type", "text"}, {"text", block.text}};
      case Kind::kThought: return {{"type", "thinking"}, {"thinking", block.text}, {"signature", ""}};
      case Kind::kCall: break;
    }
    const auto arguments = ParseJson(block.text);
    Json input = arguments.ok() && arguments->is_object() ? *arguments
                 : block.text.empty()                     ? Json::object()
                                                          : Json{{"arguments", block.text}};
    return {{"type", "tool_use"}, {"id", block.call_id}, {"name", block.name}, {"input", std::move(input)}};
  }

  Json StopFields() const {
    const bool sequence = end().finish_reason == "stop" && end().stop_reason.is_string();
    return {{"stop_reason", cut_off()                             ? "max_tokens"
                            : end().finish_reason == "tool_calls" ? "tool_use"
                            : sequence                            ? "stop_sequence"
                                                                  : "end_turn"},
            {"stop_sequence", sequence ? end().stop_reason : Json()}};
  }
};

std::string TypeOf(int status) {
  switch (status) {
    case 401: return "authentication_error";
    case 403: return "permission_error";
    case 404: return "not_found_error";
    case 413: return "request_too_large";
    case 429: return "rate_limit_error";
    case 503: return "overloaded_error";
    case 504: return "timeout_error";
    default: return status >= 500 ? "api_error" : "invalid_request_error";
  }
}

}  // namespace

std::unique_ptr<BlockAnswer> MakeMessagesAnswer(const ResponseSpec& spec) {
  return std::make_unique<MessagesAnswer>(spec);
}

std::string MessagesErrorBody(const ApiError& error) {
  std::string message = error.message;
  if (error.n_prompt_tokens && error.n_ctx && *error.n_prompt_tokens >= *error.n_ctx)  // as this API's clients know it
    message = absl::StrCat("prompt is too long: ", *error.n_prompt_tokens, " tokens > ", *error.n_ctx - 1, " maximum (",
                           error.message, ")");
  return Dump(Json{{"type", "error"}, {"error", {{"type", TypeOf(error.http_status)}, {"message", message}}}});
}

}  // namespace dovetail::server
