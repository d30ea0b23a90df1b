#pragma once
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "grammar/grammar_engine.h"
#include "model/checkpoint.h"
#include "model/tokenizer/tokenizer.h"
#include "server/openai/served_model.h"

// A model's text side: its tokenizer and its chat template.
// Threads: thread-safe; blocks on files. What they return is immutable or says otherwise.

namespace dovetail::cli {

// The tokenizer of a checkpoint: in the GGUF file, or tokenizer.json in the folder of the weights. Null when there is
// none. Errors name the file and the field.
absl::StatusOr<std::shared_ptr<const model::Tokenizer>> LoadTokenizer(const model::Checkpoint& checkpoint);

// The tokenizer at `path` alone, without a model: a .gguf file, or a folder with tokenizer.json. kNotFound says what is
// missing.
absl::StatusOr<std::shared_ptr<const model::Tokenizer>> LoadTokenizerAt(const std::string& path);

// Grammars over the tokens of a checkpoint, which is read at the first use and outlives the engine.
std::shared_ptr<grammar::GrammarEngine> MakeGrammars(const model::Checkpoint& checkpoint);

struct ChatTemplateChoice {
  std::string source;       // Jinja; empty: none
  std::string tool_source;  // for conversations with tools; empty: the same
  std::string origin;  // for error texts and the log: "--chat-template chatml", "model.gguf: tokenizer.chat_template"
  std::string bos_token, eos_token;  // what it may write
  std::string warning;               // why chats may be answered badly; empty: no reason is known
};

// The chat template to use: `asked` if given, a Jinja file, the name of a built-in one, or `none`; else the model's
// own; else the built-in one whose special tokens the vocabulary has; else none, or ChatML with `chatml_at_last`, if
// the model is a GGUF file. Errors: kNotFound names --chat-template and what there is.
absl::StatusOr<ChatTemplateChoice> ChooseChatTemplate(const model::Checkpoint& checkpoint,
                                                      const model::Tokenizer* tokenizer, const std::string& asked,
                                                      bool chatml_at_last = false);

struct ServedModelOptions {
  std::vector<std::string> names;  // empty: the file's name
  bool accept_any_name = false;
  std::string chat_template;                       // --chat-template
  bool chatml_at_last = false;                     // as ChooseChatTemplate says
  std::string tool_call_parser, reasoning_parser;  // --tool-call-parser, --reasoning-parser; empty: by the template
  std::string pooling;                             // --pooling; empty: as the checkpoint says, else last
  int64_t max_model_len = 0;
  int max_num_seqs = 0;
  std::shared_ptr<grammar::GrammarEngine> grammars;  // null: one of its own
  uint64_t model_digest = 0;                         // becomes the fingerprint that responses show
};

// What the API serves.
absl::StatusOr<std::shared_ptr<const server::ServedModel>> MakeServedModel(const model::Checkpoint& checkpoint,
                                                                           const ServedModelOptions& options);

}  // namespace dovetail::cli
