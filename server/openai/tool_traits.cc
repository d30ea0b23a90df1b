#include "server/openai/tool_traits.h"

#include <string>
#include <utility>

namespace dovetail::server {
namespace {

constexpr char kFunction[] = "probed_function", kArgument[] = "probed_argument", kResult[] = "probed_result";

bool Shows(const model::ChatTemplate& chat, const model::RenderInputs& inputs, std::initializer_list<const char*> all) {
  const auto rendered = chat.Render(inputs);
  if (!rendered.ok()) return false;
  const std::string text = rendered->Text();
  for (const char* one : all)
    if (text.find(one) == std::string::npos) return false;
  return true;
}

Json ProbedTools() {
  const Json parameters = {{"type", "object"},
                           {"properties", {{"a", {{"type", "string"}, {"description", "a text"}}}}},
                           {"required", Json::array({"a"})}};
  return Json::array(
      {{{"type", "function"},
        {"function", {{"name", kFunction}, {"description", "a function"}, {"parameters", parameters}}}}});
}

Json ProbedCalls(bool text_arguments, bool null_content) {
  const Json arguments = {{"a", kArgument}};
  const Json call = {
      {"id", "abcdefgh9"},
      {"type", "function"},
      {"function", {{"name", kFunction}, {"arguments", text_arguments ? Json(Dump(arguments)) : arguments}}}};
  return Json::array(
      {{{"role", "user"}, {"content", "hi"}},
       {{"role", "assistant"}, {"content", null_content ? Json() : Json("")}, {"tool_calls", Json::array({call})}},
       {{"role", "tool"}, {"tool_call_id", "abcdefgh9"}, {"name", kFunction}, {"content", kResult}}});
}

// hermes' format, in our own words.
std::string Description(const Json& tools) {
  std::string text = "You can call functions. Each line is one of them, as JSON:\n<tools>\n";
  for (const Json& tool : tools) text += Dump(tool) + "\n";
  return text +
         "</tools>\nTo call a function, write a JSON object with its name and its arguments between these tags:\n"
         "<tool_call>\n{\"name\": \"FUNCTION\", \"arguments\": {\"NAME\": VALUE}}\n</tool_call>\n"
         "Its result comes back as <tool_response>RESULT</tool_response>.";
}

void DescribeTools(bool takes_system, Json& messages, const Json& tools) {
  const std::string text = Description(tools);
  const std::string role = takes_system ? "system" : "user";
  for (Json& message : messages) {
    if (message["role"] == role && message["content"].is_string()) {
      const auto& content = message["content"].get_ref<const std::string&>();
      message["content"] = takes_system ? content + "\n\n" + text : text + "\n\n" + content;
      return;
    }
  }
  messages.insert(messages.begin(), Json{{"role", role}, {"content", text}});
}

// Calls and results as text. Results that follow each other are one message, as roles alternate.
Json WithCallsAsText(const Json& messages) {
  Json out = Json::array();
  for (const Json& message : messages) {
    if (message["role"] == "tool") {
      const std::string text = "<tool_response>\n" + message["content"].get<std::string>() + "\n</tool_response>";
      if (!out.empty() && out.back().contains("of_tools"))
        out.back()["content"] = out.back()["content"].get<std::string>() + "\n" + text;
      else
        out.push_back({{"role", "user"}, {"content", text}, {"of_tools", true}});
      continue;
    }
    out.push_back(message);
    if (!message.contains("tool_calls")) continue;
    std::string text = message["content"].is_string() ? message["content"].get<std::string>() : "";
    for (const Json& call : message["tool_calls"]) {
      const Json& function = call["function"];
      const std::string arguments =
          function["arguments"].is_string() ? function["arguments"].get<std::string>() : Dump(function["arguments"]);
      text += std::string(text.empty() ? "" : "\n") + "<tool_call>\n{\"name\": " + Dump(function["name"]) +
              ", \"arguments\": " + arguments + "}\n</tool_call>";
    }
    out.back().erase("tool_calls");
    out.back()["content"] = text;
  }
  for (Json& message : out) message.erase("of_tools");
  return out;
}

std::string Joined(const std::string& before, const std::string& behind) {
  return before.empty() ? behind : before + "\n\n" + behind;
}

void AdaptCalls(const ToolTraits& traits, Json& message) {
  const bool empty = message["content"].is_null() || message["content"] == "";
  if (empty && traits.takes_thinking && message.contains("reasoning_content"))
    message["thinking"] = message["reasoning_content"];
  if (empty) message["content"] = traits.null_content ? Json() : Json("");
  if (!traits.text_arguments) return;
  for (Json& call : message["tool_calls"]) {
    Json& arguments = call["function"]["arguments"];
    if (!arguments.is_string()) arguments = Dump(arguments);
  }
}

}  // namespace

ToolTraits TraitsOf(const model::ChatTemplate& chat, const model::RenderInputs& inputs, std::string_view source) {
  ToolTraits traits;
  model::RenderInputs probe = inputs;
  probe.messages = Json::array({{{"role", "user"}, {"content", "hi"}}});
  probe.tools = ProbedTools();
  traits.shows_tools = Shows(chat, probe, {kFunction});
  for (const bool text_arguments : {false, true}) {
    for (const bool null_content : {false, true}) {
      probe.messages = ProbedCalls(text_arguments, null_content);
      if (traits.shows_calls || !Shows(chat, probe, {kArgument, kResult})) continue;
      traits.shows_calls = true;
      traits.text_arguments = text_arguments;
      traits.null_content = null_content;
    }
  }
  probe.tools = nullptr;
  probe.messages = Json::array({{{"role", "system"}, {"content", kResult}}, {{"role", "user"}, {"content", "hi"}}});
  traits.takes_system = Shows(chat, probe, {kResult});
  probe.messages = Json::array({{{"role", "system"}, {"content", kResult}},
                                {{"role", "system"}, {"content", kArgument}},
                                {{"role", "user"}, {"content", "hi"}},
                                {{"role", "system"}, {"content", kFunction}}});
  traits.takes_more_systems = Shows(chat, probe, {kResult, kArgument, kFunction});
  traits.takes_thinking = source.find(".thinking") != std::string_view::npos;
  return traits;
}

void AdaptSystem(const ToolTraits& traits, Json& messages) {
  if (!traits.takes_system || traits.takes_more_systems) return;
  Json out = Json::array();
  std::string waiting;  // for what the user says next
  for (Json& message : messages) {
    const bool text = message["content"].is_string();
    const bool system = text && message["role"] == "system";
    const bool user = text && message["role"] == "user";
    if (system && !out.empty() && (out.back()["role"] == "user" || out.back()["role"] == "system")) {
      out.back()["content"] = Joined(out.back()["content"], message["content"]);
    } else if (system && !out.empty()) {
      waiting = Joined(waiting, message["content"]);
    } else {
      if (!waiting.empty() && user) message["content"] = Joined(std::exchange(waiting, ""), message["content"]);
      out.push_back(std::move(message));
    }
  }
  if (!waiting.empty()) out.push_back({{"role", "user"}, {"content", waiting}});
  messages = std::move(out);
}

void Adapt(const ToolTraits& traits, model::RenderInputs& inputs) {
  if (!traits.shows_calls) inputs.messages = WithCallsAsText(inputs.messages);
  for (Json& message : inputs.messages)
    if (message.contains("tool_calls")) AdaptCalls(traits, message);
  if (traits.shows_tools || !inputs.tools.is_array()) return;
  DescribeTools(traits.takes_system, inputs.messages, inputs.tools);
  inputs.tools = nullptr;
}

}  // namespace dovetail::server
