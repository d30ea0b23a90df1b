#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace dovetail::model::jinja {

enum class TokenType {
  kText,  // template text, white space already trimmed
  kVariableBegin,
  kVariableEnd,
  kBlockBegin,
  kBlockEnd,
  kName,
  kString,  // text = unescaped
  kInteger,
  kFloat,
  kOperator,  // text = the operator
  kEnd,
};

struct Token {
  TokenType type;
  int line;
  std::string text;
  int64_t integer = 0;
  double number = 0;
};

// Splits a template into tokens with Jinja's settings of chat templates: trim_blocks and lstrip_blocks on, one trailing
// newline dropped, \r\n and \r read as \n. Comments and raw blocks are resolved here. Ends with kEnd.
// Errors: kInvalidArgument naming the line.
// Threads: pure.
absl::StatusOr<std::vector<Token>> Tokenize(std::string_view source);

// "chat template line 3: <what>", kInvalidArgument.
absl::Status SyntaxError(int line, const std::string& what);

}  // namespace dovetail::model::jinja
