#include "model/chat_template/chat_template.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "model/chat_template/builtins.h"
#include "model/chat_template/interpreter.h"
#include "model/chat_template/json.h"
#include "model/chat_template/parser.h"
#include "model/chat_template/text_ops.h"
#include "model/chat_template/unicode.h"

namespace dovetail::model {
namespace {

using nlohmann::ordered_json;

// How large the conversation is, which is what a rendering may cost.
struct InputSize {
  size_t bytes = 0;
  size_t values = 0;
};

void Measure(const ordered_json& json, int depth, InputSize& size) {
  ++size.values;
  if (json.is_string()) size.bytes += json.get_ref<const std::string&>().size();
  if (depth == 0 || !json.is_structured()) return;
  for (const auto& [key, item] : json.items()) {
    if (json.is_object()) size.bytes += key.size();
    Measure(item, depth - 1, size);
  }
}

size_t StepBudget(const TemplateLimits& limits, const InputSize& size, size_t messages) {
  // Each term is capped before the sum, so that no conversation overflows it.
  const auto capped = [&](size_t count, size_t each) { return std::min(count, limits.steps_max) * each; };
  const size_t steps = limits.steps + capped(messages, limits.steps_per_message) +
                       capped(size.values, limits.steps_per_json_value) +
                       size.bytes / std::max<size_t>(limits.input_bytes_per_step, 1);
  return std::min(steps, limits.steps_max);
}

absl::Status CheckInputs(const RenderInputs& inputs) {
  if (!inputs.messages.is_array()) return InvalidArgument("messages must be a list");
  if (!inputs.extra.is_null() && !inputs.extra.is_object())
    return InvalidArgument("chat_template_kwargs must be an object");
  if (inputs.continue_final_message) {
    if (inputs.add_generation_prompt) {
      return InvalidArgument("continue_final_message and add_generation_prompt exclude each other: set one to false");
    }
    if (inputs.messages.empty()) return InvalidArgument("continue_final_message needs a message to continue");
  }
  return absl::OkStatus();
}

absl::Status Located(const absl::Status& status, int line) {
  if (jinja::IsRaised(status)) return absl::InvalidArgumentError(status.message());
  return Annotate(status, absl::StrCat("chat template line ", line));
}

// Gives the template its variables. Only those that it names are converted.
class Globals {
 public:
  Globals(const jinja::Ast& ast, jinja::Runtime& runtime, jinja::Interpreter& interpreter)
      : ast_(ast), runtime_(runtime), interpreter_(interpreter) {}

  absl::Status Set(const std::string& name, const ordered_json& json, bool is_input) {
    if (json.is_discarded()) return absl::OkStatus();
    const auto found = std::find(ast_.names.begin(), ast_.names.end(), name);
    if (found == ast_.names.end()) return absl::OkStatus();
    auto value = jinja::FromJson(runtime_, json, is_input);
    if (!value.ok()) return Annotate(value.status(), name);
    interpreter_.SetGlobal(static_cast<jinja::NameId>(found - ast_.names.begin()), *std::move(value));
    return absl::OkStatus();
  }

 private:
  const jinja::Ast& ast_;
  jinja::Runtime& runtime_;
  jinja::Interpreter& interpreter_;
};

absl::Status SetGlobals(const RenderInputs& inputs, Globals& globals) {
  // What the server itself provides: arguments of the request cannot replace it.
  static constexpr std::string_view kReserved[] = {"messages",  "tools",     "documents", "add_generation_prompt",
                                                   "bos_token", "eos_token", "loop"};
  DT_RETURN_IF_ERROR(globals.Set("messages", inputs.messages, true));
  DT_RETURN_IF_ERROR(globals.Set("tools", inputs.tools, true));
  DT_RETURN_IF_ERROR(globals.Set("documents", inputs.documents, true));
  DT_RETURN_IF_ERROR(globals.Set("add_generation_prompt", inputs.add_generation_prompt, false));
  DT_RETURN_IF_ERROR(globals.Set("bos_token", inputs.bos_token, false));
  DT_RETURN_IF_ERROR(globals.Set("eos_token", inputs.eos_token, false));
  if (inputs.extra.is_null()) return absl::OkStatus();
  for (const auto& [name, value] : inputs.extra.items()) {
    const bool reserved = std::find(std::begin(kReserved), std::end(kReserved), name) != std::end(kReserved);
    if (reserved || jinja::FindGlobal(name)) {
      return InvalidArgument("chat_template_kwargs: '", name, "' is set by the server and cannot be replaced");
    }
    DT_RETURN_IF_ERROR(globals.Set(name, value, true));
  }
  return absl::OkStatus();
}

// The text of the message to continue: its content, or the last text part of it.
std::string FinalText(const ordered_json& message) {
  if (!message.is_object() || !message.contains("content")) return "";
  const ordered_json& content = message["content"];
  if (content.is_string()) return content.get<std::string>();
  if (!content.is_array()) return "";
  for (auto part = content.rbegin(); part != content.rend(); ++part) {
    if (part->is_object() && part->contains("text") && (*part)["text"].is_string())
      return (*part)["text"].get<std::string>();
  }
  return "";
}

// Cuts what the template wrote after the final message, as transformers does: the message may have been trimmed.
absl::StatusOr<jinja::Text> CutAfterFinalMessage(const jinja::Text& text, const RenderInputs& inputs) {
  const jinja::Text final_text(FinalText(inputs.messages.back()), true);
  const jinja::Text trimmed = jinja::Strip(final_text, jinja::Side::kBoth);
  const size_t at = jinja::FindLastBytes(text.view(), trimmed.view());
  if (trimmed.empty() || at == std::string_view::npos) {
    return InvalidArgument(
        "continue_final_message: the template does not show the text of the last message, so it cannot be "
        "continued");
  }
  const jinja::Text with_tail = jinja::Strip(final_text, jinja::Side::kLeft);
  const bool kept = text.view().substr(at).starts_with(with_tail.view());
  return text.Slice(0, at + (kept ? with_tail : trimmed).size());
}

}  // namespace

std::string RenderedPrompt::Text() const {
  std::string text;
  for (const PromptPart& part : parts) text += part.text;
  return text;
}

absl::StatusOr<ChatTemplate> ChatTemplate::Parse(std::string_view source, const TemplateLimits& limits) {
  DT_ASSIGN_OR_RETURN(jinja::Ast ast, jinja::ParseTemplate(source, limits));
  return ChatTemplate(std::make_shared<const jinja::Ast>(std::move(ast)), limits);
}

absl::StatusOr<RenderedPrompt> ChatTemplate::Render(const RenderInputs& inputs) const {
  return Render(inputs, nullptr);
}

absl::StatusOr<RenderedPrompt> ChatTemplate::Render(const RenderInputs& inputs, size_t* steps_used) const {
  DT_RETURN_IF_ERROR(CheckInputs(inputs));
  InputSize size;
  for (const ordered_json* json : {&inputs.messages, &inputs.tools, &inputs.documents, &inputs.extra}) {
    Measure(*json, limits_.value_depth, size);
  }
  jinja::Runtime runtime(limits_, StepBudget(limits_, size, inputs.messages.size()), limits_.output_bytes + size.bytes,
                         inputs.now, inputs.time_zone);
  jinja::Interpreter interpreter(*ast_, runtime);
  Globals globals(*ast_, runtime, interpreter);
  DT_RETURN_IF_ERROR(SetGlobals(inputs, globals));
  absl::StatusOr<jinja::Text> text = interpreter.Run();
  if (steps_used) *steps_used = runtime.steps_used();
  if (!text.ok()) return Located(text.status(), interpreter.line());
  if (inputs.continue_final_message) {
    DT_ASSIGN_OR_RETURN(*text, CutAfterFinalMessage(*text, inputs));
  }
  RenderedPrompt prompt;
  text->ForEachRun([&](std::string_view run, bool is_input) { prompt.parts.push_back({std::string(run), is_input}); });
  return prompt;
}

}  // namespace dovetail::model
