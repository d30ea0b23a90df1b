#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/ids.h"
#include "model/prompt_part.h"
#include "server/openai/answers/answer_parser.h"
#include "server/openai/tools.h"

// What a chat's answer is taken apart into, and how it is enforced.
// Threads: pure.

namespace dovetail::server {

// Of which API the answer is. kChat: OpenAI's completions, too; kLlama: llama-server's own; kVectors: no text, but a
// vector of each prompt (embeddings.h).
enum class AnswerShape { kChat, kResponses, kMessages, kLlama, kVectors };

struct AnswerSpec {
  const CallFormat* calls = nullptr;  // null: calls are not looked for
  std::vector<Tool> tools;
  bool parallel_calls = true;
  const ThoughtFormat* thoughts = nullptr;  // null: thoughts are not looked for
  bool thought_begun = false;               // the prompt has opened one
  bool show_reasoning = true;
  std::vector<TokenId> marks;  // special tokens that are text for the parser; sorted
  uint64_t id_seed = 0;        // of the calls' ids

  bool parsed() const { return calls != nullptr || thoughts != nullptr; }
};

// Null: the text is content as it stands.
std::unique_ptr<AnswerParser> MakeAnswerParser(const AnswerSpec& spec);

// The id of a choice's call, the same for the same arguments: "call_..." or nine letters and digits.
std::string CallId(const AnswerSpec& spec, int choice, int call);

// What a prompt says about the thought that may follow it.
enum class ThoughtState {
  kNone,  // there is none: the model has none, the prompt has closed it, or continues a message
  kMay,   // the model may open one
  kBegun  // the prompt has opened it
};
ThoughtState ThoughtAfter(const std::vector<model::PromptPart>& prompt, const ServedModel& model);

// The grammar of an answer (grammar_engine.h) in which `text`, such a grammar, is that of its content (empty: anything)
// and the calls are as `tools` says. Empty: it may be anything. A thought before it is free.
std::string AnswerGrammar(const std::string& text, const ToolUse& tools, ThoughtState thought,
                          const ServedModel& model);

}  // namespace dovetail::server
