#pragma once
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "server/openai/answers/answer_parser.h"
#include "server/openai/json.h"

// The formats in which models write calls, by name. Each has a file of its own.
// Threads: pure.

namespace dovetail::server {

// A function that a request offers, with its JSON schema: as the client sent it to parsers, as it is enforced
// (json_schema.h) to grammars.
struct Tool {
  std::string name;
  Json parameters;
  // Of the text in the one parameter `input`, as it stands in a JSON string (grammar::Kind::kEbnf). Empty: there is no
  // such grammar.
  std::string input_grammar = {};
};

// How a mark is spelled in a grammar: as text or, where it is a special token of the model, as that token.
using MarkSpeller = std::function<Json(std::string_view)>;

struct CallFormat {
  std::string_view name;
  std::string_view begin;               // an answer has calls behind this, or where it begins so (one character)
  std::vector<std::string_view> marks;  // texts that may be special tokens and that the parser reads
  std::unique_ptr<AnswerParser> (*parser)(const std::vector<Tool>& tools);
  // The answers that are calls and nothing else, as a format of xgrammar's structural tags. `several`: one or more
  // calls; else one.
  Json (*grammar)(const std::vector<Tool>& tools, bool several, const MarkSpeller& mark);
  bool alnum_ids = false;      // the model's templates take ids of nine letters and digits only
  bool json_arguments = true;  // else each argument stands between marks, as it is
};

// Null: there is no such format.
const CallFormat* FindCallFormat(std::string_view name);
std::vector<std::string> CallFormatNames();

// The format that a chat template writes calls in.
// Null: it writes none that is known here.
const CallFormat* CallFormatOf(std::string_view chat_template);

// For their files.
const CallFormat& HermesFormat();
const CallFormat& Llama3JsonFormat();
const CallFormat& PythonicFormat();
const CallFormat& MistralFormat();
const CallFormat& MistralArrayFormat();
const CallFormat& Qwen3CoderFormat();
const CallFormat& GraniteFormat();
const CallFormat& MinimaxM2Format();
const CallFormat& KimiK2Format();
const CallFormat& OpenAiFormat();
const CallFormat& DeepSeekV3Format();
const CallFormat& DeepSeekV31Format();

}  // namespace dovetail::server
