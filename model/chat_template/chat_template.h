#pragma once
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/time/time.h"
#include "base/status.h"
#include "model/chat_template/limits.h"
#include "model/prompt_part.h"
#include "nlohmann/json.hpp"

namespace dovetail::model {

// A rendered conversation, ready for the tokenizer. Neighbouring parts differ in is_input; none is empty.
//
// A special token may be recognised only where all of its characters lie in one part that is not input: so no message
// can forge the end of its turn. The text between special tokens is tokenized as a whole, across parts, since the
// reference does so.
struct RenderedPrompt {
  std::vector<PromptPart> parts;
  std::string Text() const;
};

// What a template sees. JSON values keep the order of their keys. Tools and documents that are null are none to the
// template, as transformers passes them; ordered_json::value_t::discarded leaves them undefined.
struct RenderInputs {
  nlohmann::ordered_json messages = nlohmann::ordered_json::array();
  nlohmann::ordered_json tools;
  nlohmann::ordered_json documents;
  bool add_generation_prompt = true;
  // Ends the prompt after the last message's text, so that the model continues it. Excludes add_generation_prompt.
  bool continue_final_message = false;
  std::string bos_token, eos_token;
  nlohmann::ordered_json extra =
      nlohmann::ordered_json::object();  // chat_template_kwargs: enable_thinking and the like
  absl::Time now = absl::UnixEpoch();    // what strftime_now formats
  absl::TimeZone time_zone = absl::UTCTimeZone();
};

namespace jinja {
struct Ast;
}

// A chat template in the bounded Jinja subset that real chat templates use (docs in model/chat_template/limits.h for
// its bounds): the language of Jinja 3.1 with trim_blocks, lstrip_blocks and loop controls, without anything that loads
// other templates, and with exactly the filters, tests, methods and functions of builtins.h. Semantics are Python's.
// Threads: immutable.
class ChatTemplate {
 public:
  // Errors: kInvalidArgument naming the line of a syntax error, kResourceExhausted for a template beyond `limits`.
  static absl::StatusOr<ChatTemplate> Parse(std::string_view source, const TemplateLimits& limits = {});

  // Errors: kInvalidArgument with the template's own text if it called raise_exception ("roles must alternate"),
  // kInvalidArgument naming the template's line for anything else it does wrong with this conversation,
  // kResourceExhausted naming line and limit when it runs too long or grows too large. Takes at most about 100 ms
  // whatever the template.
  absl::StatusOr<RenderedPrompt> Render(const RenderInputs& inputs) const;

  // As Render; additionally says how many steps of the budget were used.
  absl::StatusOr<RenderedPrompt> Render(const RenderInputs& inputs, size_t* steps_used) const;

 private:
  ChatTemplate(std::shared_ptr<const jinja::Ast> ast, const TemplateLimits& limits)
      : ast_(std::move(ast)), limits_(limits) {}

  std::shared_ptr<const jinja::Ast> ast_;  // shared by copies of this value; immutable
  TemplateLimits limits_;
};

}  // namespace dovetail::model
