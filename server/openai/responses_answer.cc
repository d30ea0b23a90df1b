#include "server/openai/responses_answer.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/openai/api_error.h"
#include "server/openai/responses_tools.h"

namespace dovetail::server {
namespace {

using Kind = AnswerBlock::Kind;

std::string IdOf(std::string_view prefix, const ResponseSpec& spec, const AnswerBlock& block) {
  return absl::StrCat(absl::string_view(prefix.data(), prefix.size()), spec.id.substr(spec.id.find('_') + 1), "_",
                      block.index);
}

Json TextPart(const std::string& text) {
  return {{"type", "output_text"}, {"text", text}, {"annotations", Json::array()}, {"logprobs", Json::array()}};
}
Json ThoughtPart(const std::string& text) { return {{"type", "reasoning_text"}, {"text", text}}; }

class ResponsesAnswer : public BlockAnswer {
 public:
  explicit ResponsesAnswer(const ResponseSpec& spec) : BlockAnswer(spec) {}

  Json Body() const override { return Response(cut_off() ? "incomplete" : "completed"); }

 protected:
  std::string OnBegin() override {
    const Json response = Response("in_progress");
    std::string frames = Send("response.created", {{"response", response}});
    frames += Send("response.in_progress", {{"response", response}});
    return frames;
  }

  std::string OnBlockBegins(const AnswerBlock& block) override {
    std::string frames = Send("response.output_item.added",
                              {{"output_index", block.index}, {"item", Item(block, "in_progress", /*parts=*/false)}});
    if (block.kind != Kind::kCall) frames += SendPart("response.content_part.added", block, "");
    return frames;
  }

  std::string OnText(const AnswerBlock& block, std::string_view text) override {
    if (Custom(block)) return "";  // its text stands in a string of JSON: it comes when that has ended
    Json event = At(block);
    event["delta"] = text;
    if (block.kind == Kind::kText) event["logprobs"] = Json::array();
    return Send(absl::StrCat(TypeOf(block), ".delta"), std::move(event));
  }

  std::string OnBlockEnds(const AnswerBlock& block) override {
    if (Custom(block)) return CustomCallEnds(block);
    Json event = At(block);
    if (block.kind == Kind::kCall) {
      event["name"] = Called(block).name;
      event["arguments"] = block.text;
    } else {
      event["text"] = block.text;
    }
    if (block.kind == Kind::kText) event["logprobs"] = Json::array();
    std::string frames = Send(absl::StrCat(TypeOf(block), ".done"), std::move(event));
    if (block.kind != Kind::kCall) frames += SendPart("response.content_part.done", block, block.text);
    return frames + ItemEnds(block);
  }

  std::string OnEnd() override {
    return Send(cut_off() ? "response.incomplete" : "response.completed", {{"response", Body()}});
  }

  std::string OnFailure(const absl::Status& why) override {
    const ApiError error = ToApiError(why);
    Json response = Response("failed");
    response["error"] = {{"code", error.http_status == 429 ? "rate_limit_exceeded" : "server_error"},
                         {"message", error.message}};
    return Send("response.failed", {{"response", std::move(response)}});
  }

 private:
  ClientTool Called(const AnswerBlock& block) const {
    return ClientToolOf(spec().repeated.value("tools", Json::array()), block.name);
  }
  bool Custom(const AnswerBlock& block) const { return block.kind == Kind::kCall && Called(block).custom; }

  std::string ItemEnds(const AnswerBlock& block) {
    return Send("response.output_item.done", {{"output_index", block.index}, {"item", Item(block, StatusOf(block))}});
  }

  std::string CustomCallEnds(const AnswerBlock& block) {
    const std::string input = InputOf(block.text);
    Json delta = At(block), done = At(block);
    delta["delta"] = input;
    done["input"] = input;
    return Send("response.custom_tool_call_input.delta", std::move(delta)) +
           Send("response.custom_tool_call_input.done", std::move(done)) + ItemEnds(block);
  }

  static std::string TypeOf(const AnswerBlock& block) {
    switch (block.kind) {
      case Kind::kText: return "response.output_text";
      case Kind::kThought: return "response.reasoning_text";
      case Kind::kCall: break;
    }
    return "response.function_call_arguments";
  }

  std::string ItemId(const AnswerBlock& block) const {
    switch (block.kind) {
      case Kind::kText: return IdOf("msg_", spec(), block);
      case Kind::kThought: return IdOf("rs_", spec(), block);
      case Kind::kCall: break;
    }
    return IdOf(Custom(block) ? "ctc_" : "fc_", spec(), block);
  }

  static std::string StatusOf(const AnswerBlock& block) { return block.cut_off ? "incomplete" : "completed"; }

  Json CallItem(const AnswerBlock& block) const {
    const ClientTool tool = Called(block);
    if (tool.custom)
      return {{"type", "custom_tool_call"},
              {"call_id", block.call_id},
              {"name", tool.name},
              {"input", block.text.empty() ? "" : InputOf(block.text)}};
    Json item = {{"type", "function_call"}, {"call_id", block.call_id}, {"name", tool.name}, {"arguments", block.text}};
    if (!tool.group.empty()) item["namespace"] = tool.group;
    return item;
  }

  Json Item(const AnswerBlock& block, const std::string& status, bool parts = true) const {
    Json item = {{"id", ItemId(block)}, {"status", status}};
    const auto content = [&](const Json& part) { return parts ? Json::array({part}) : Json::array(); };
    switch (block.kind) {
      case Kind::kText:
        item.update({{"type", "message"}, {"role", "assistant"}, {"content", content(TextPart(block.text))}});
        break;
      case Kind::kThought:
        item.update({{"type", "reasoning"}, {"summary", Json::array()}, {"content", content(ThoughtPart(block.text))}});
        break;
      case Kind::kCall: item.update(CallItem(block)); break;
    }
    return item;
  }

  Json At(const AnswerBlock& block) const {
    Json event = {{"item_id", ItemId(block)}, {"output_index", block.index}};
    if (block.kind != Kind::kCall) event["content_index"] = 0;
    return event;
  }

  std::string Send(const std::string& type, Json fields) {
    Json event = {{"type", type}, {"sequence_number", sequence_number_++}};
    event.update(fields);
    return Event(type, event);
  }

  std::string SendPart(const std::string& type, const AnswerBlock& block, const std::string& text) {
    Json event = At(block);
    event["part"] = block.kind == Kind::kText ? TextPart(text) : ThoughtPart(text);
    return Send(type, std::move(event));
  }

  Json Usage() const {
    const UsageTotals& totals = end().usage;
    return {{"input_tokens", totals.prompt_tokens},
            {"input_tokens_details", {{"cached_tokens", totals.cached_tokens}}},
            {"output_tokens", totals.completion_tokens},
            {"output_tokens_details", {{"reasoning_tokens", totals.reasoning_tokens}}},
            {"total_tokens", totals.prompt_tokens + totals.completion_tokens}};
  }

  Json Response(const std::string& status) const {
    const bool ended = status == "completed" || status == "incomplete";
    Json response = {{"id", spec().id},      {"object", "response"}, {"created_at", spec().created},
                     {"status", status},     {"error", nullptr},     {"incomplete_details", nullptr},
                     {"model", spec().model}};
    response.update(spec().repeated);
    if (status == "incomplete") response["incomplete_details"] = {{"reason", "max_output_tokens"}};
    Json output = Json::array();
    if (status != "in_progress")
      for (const AnswerBlock& block : blocks()) output.push_back(Item(block, ended ? StatusOf(block) : "incomplete"));
    response["output"] = std::move(output);
    response["usage"] = ended ? Usage() : Json();
    return response;
  }

  int sequence_number_ = 0;
};

}  // namespace

std::unique_ptr<BlockAnswer> MakeResponsesAnswer(const ResponseSpec& spec) {
  return std::make_unique<ResponsesAnswer>(spec);
}

}  // namespace dovetail::server
