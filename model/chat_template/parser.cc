#include "model/chat_template/parser.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "model/chat_template/parser_state.h"
#include "model/chat_template/unicode.h"

namespace dovetail::model::jinja {

Parser::Parser(std::vector<Token> tokens, const TemplateLimits& limits) : tokens_(std::move(tokens)), limits_(limits) {
  ast_.loop_id = Intern("loop");
  ast_.caller_id = Intern("caller");
  ast_.varargs_id = Intern("varargs");
  ast_.kwargs_id = Intern("kwargs");
}

absl::StatusOr<Ast> Parser::Run() {
  DT_ASSIGN_OR_RETURN(ast_.body, ParseBlock({}));
  return std::move(ast_);
}

NameId Parser::Intern(const std::string& name) {
  const auto [at, is_new] = name_ids_.try_emplace(name, static_cast<NameId>(ast_.names.size()));
  if (is_new) ast_.names.push_back(name);
  return at->second;
}

bool Parser::SkipName(std::string_view name) {
  const bool found = AtName(name);
  if (found) Advance();
  return found;
}

bool Parser::SkipOperator(std::string_view op) {
  const bool found = AtOperator(op);
  if (found) Advance();
  return found;
}

absl::Status Parser::ExpectOperator(std::string_view op) {
  return SkipOperator(op) ? absl::OkStatus() : Unexpected(absl::StrCat("'", std::string(op), "'"));
}

absl::Status Parser::ExpectName(std::string_view name) {
  return SkipName(name) ? absl::OkStatus() : Unexpected(absl::StrCat("'", std::string(name), "'"));
}

absl::StatusOr<std::string> Parser::TakeName(const char* what) {
  if (!At(TokenType::kName)) return Unexpected(what);
  std::string name = Current().text;
  Advance();
  return name;
}

absl::Status Parser::Unexpected(const std::string& expected) const {
  std::string found;
  switch (Current().type) {
    case TokenType::kEnd: found = "the end of the template"; break;
    case TokenType::kText: found = "text"; break;
    case TokenType::kVariableBegin:
    case TokenType::kBlockBegin: found = "the begin of a tag"; break;
    case TokenType::kVariableEnd:
    case TokenType::kBlockEnd: found = "the end of the tag"; break;
    default: found = absl::StrCat("'", Current().text.substr(0, 40), "'");
  }
  return SyntaxError(Current().line, absl::StrCat("expected ", expected, ", got ", found));
}

absl::Status Parser::CheckNesting() const {
  if (nesting_ <= limits_.nesting) return absl::OkStatus();
  return ResourceExhausted("chat template line ", Current().line, ": nested deeper than ", limits_.nesting, " levels");
}

// Parses up to a tag whose first word is one of `ends`, leaving that word as the current token; up to the end without
// `ends`.
absl::StatusOr<Block> Parser::ParseBlock(std::initializer_list<std::string_view> ends) {
  Level level(*this);
  DT_RETURN_IF_ERROR(CheckNesting());
  Block block;
  while (true) {
    const int line = Current().line;
    switch (Current().type) {
      case TokenType::kEnd:
        if (ends.size() == 0) return block;
        return Unexpected(absl::StrCat("'", std::string(*ends.begin()), "'"));
      case TokenType::kText:
        block.emplace_back(new Stmt{line, TextOut{Current().text}});
        Advance();
        break;
      case TokenType::kVariableBegin: {
        Advance();
        Output output;
        DT_ASSIGN_OR_RETURN(ExprPtr value, ParseTuple(&Parser::ParseExpression, false));
        output.values.push_back(std::move(value));
        if (!At(TokenType::kVariableEnd)) return Unexpected("the end of the expression");
        Advance();
        block.emplace_back(new Stmt{line, std::move(output)});
        break;
      }
      default: {
        Advance();  // block begin
        for (std::string_view end : ends) {
          if (AtName(end)) return block;
        }
        DT_ASSIGN_OR_RETURN(auto statement, ParseStatement());
        block.push_back(std::move(statement));
      }
    }
  }
}

absl::Status Parser::EndStatement() {
  if (!At(TokenType::kBlockEnd)) return Unexpected("the end of the statement");
  Advance();
  return absl::OkStatus();
}

absl::Status Parser::EndBlock(std::string_view word) {
  DT_RETURN_IF_ERROR(ExpectName(word));
  return EndStatement();
}

absl::StatusOr<std::unique_ptr<Stmt>> Parser::ParseStatement() {
  const int line = Current().line;
  DT_ASSIGN_OR_RETURN(const std::string word, TakeName("a statement"));
  absl::StatusOr<Stmt> statement = absl::UnknownError("");
  if (word == "if") {
    statement = ParseIf(line);
  } else if (word == "for") {
    statement = ParseFor(line);
  } else if (word == "set") {
    statement = ParseSet(line);
  } else if (word == "macro") {
    statement = ParseMacro(line);
  } else if (word == "call") {
    statement = ParseCallBlock(line);
  } else if (word == "filter") {
    statement = ParseFilterBlock(line);
  } else if (word == "with") {
    statement = ParseWith(line);
  } else if (word == "print") {
    statement = ParsePrint(line);
  } else if (word == "generation") {  // transformers' marker of what the assistant said
    statement = ParseScope(line, "endgeneration");
  } else if (word == "break" || word == "continue") {
    statement = ParseLoopControl(line, word == "break");
  } else if (word == "include" || word == "import" || word == "from" || word == "extends" || word == "block") {
    return SyntaxError(line, absl::StrCat("'", word, "' is not supported: a chat template cannot use other templates"));
  } else {
    return SyntaxError(line, absl::StrCat("unknown statement '", word.substr(0, 40), "'"));
  }
  if (!statement.ok()) return statement.status();
  return std::make_unique<Stmt>(*std::move(statement));
}

absl::StatusOr<Stmt> Parser::ParseIf(int line) {
  If node;
  while (true) {
    DT_ASSIGN_OR_RETURN(ExprPtr test, ParseTuple(&Parser::ParseOr, false));
    DT_RETURN_IF_ERROR(EndStatement());
    DT_ASSIGN_OR_RETURN(Block body, ParseBlock({"endif", "elif", "else"}));
    node.branches.emplace_back(std::move(test), std::move(body));
    if (!SkipName("elif")) break;
  }
  if (SkipName("else")) {
    DT_RETURN_IF_ERROR(EndStatement());
    DT_ASSIGN_OR_RETURN(node.otherwise, ParseBlock({"endif"}));
  }
  DT_RETURN_IF_ERROR(EndBlock("endif"));
  return Stmt{line, std::move(node)};
}

absl::StatusOr<Stmt> Parser::ParseFor(int line) {
  For node;
  DT_ASSIGN_OR_RETURN(node.target, ParseTarget(/*allow_attribute=*/false));
  DT_RETURN_IF_ERROR(ExpectName("in"));
  DT_ASSIGN_OR_RETURN(node.sequence, ParseTuple(&Parser::ParseOr, false));
  if (SkipName("if")) {
    DT_ASSIGN_OR_RETURN(node.condition, ParseExpression());
  }
  if (AtName("recursive")) return SyntaxError(line, "recursive loops are not supported");
  DT_RETURN_IF_ERROR(EndStatement());
  ++loops_;
  DT_ASSIGN_OR_RETURN(node.body, ParseBlock({"endfor", "else"}));
  --loops_;
  if (SkipName("else")) {
    DT_RETURN_IF_ERROR(EndStatement());
    DT_ASSIGN_OR_RETURN(node.otherwise, ParseBlock({"endfor"}));
  }
  DT_RETURN_IF_ERROR(EndBlock("endfor"));
  return Stmt{line, std::move(node)};
}

absl::StatusOr<Stmt> Parser::ParseSet(int line) {
  DT_ASSIGN_OR_RETURN(Target target, ParseTarget(/*allow_attribute=*/true));
  if (SkipOperator("=")) {
    Set node{std::move(target), nullptr};
    DT_ASSIGN_OR_RETURN(node.value, ParseTuple(&Parser::ParseExpression, false));
    DT_RETURN_IF_ERROR(EndStatement());
    return Stmt{line, std::move(node)};
  }
  SetBlock node{std::move(target), nullptr, {}};
  for (int links = 0; AtOperator("|"); ++links) {
    if (links >= limits_.nesting) return Unexpected("fewer filters in a row");
    DT_ASSIGN_OR_RETURN(node.filter, ParseFilter(std::move(node.filter)));
  }
  DT_RETURN_IF_ERROR(EndStatement());
  DT_ASSIGN_OR_RETURN(node.body, ParseBlock({"endset"}));
  DT_RETURN_IF_ERROR(EndBlock("endset"));
  return Stmt{line, std::move(node)};
}

absl::StatusOr<std::vector<Parameter>> Parser::ParseParameters() {
  std::vector<Parameter> parameters;
  DT_RETURN_IF_ERROR(ExpectOperator("("));
  while (!AtOperator(")")) {
    Parameter parameter;
    DT_ASSIGN_OR_RETURN(parameter.name, TakeName("a parameter"));
    parameter.id = Intern(parameter.name);
    if (SkipOperator("=")) {
      DT_ASSIGN_OR_RETURN(parameter.otherwise, ParseExpression());
    } else if (!parameters.empty() && parameters.back().otherwise) {
      return Unexpected("a default, since the parameter before has one");
    }
    parameters.push_back(std::move(parameter));
    if (!SkipOperator(",")) break;
  }
  DT_RETURN_IF_ERROR(ExpectOperator(")"));
  return parameters;
}

absl::Status Parser::ParseMacroBody(std::string_view end, MacroDefinition& macro) {
  DT_RETURN_IF_ERROR(EndStatement());
  const int outer_loops = std::exchange(loops_, 0);
  const bool outer_varargs = std::exchange(saw_varargs_, false), outer_kwargs = std::exchange(saw_kwargs_, false),
             outer_caller = std::exchange(saw_caller_, false);
  DT_ASSIGN_OR_RETURN(macro.body, ParseBlock({end}));
  macro.uses_varargs = std::exchange(saw_varargs_, outer_varargs);
  macro.uses_kwargs = std::exchange(saw_kwargs_, outer_kwargs);
  macro.uses_caller = std::exchange(saw_caller_, outer_caller);
  loops_ = outer_loops;
  return EndBlock(end);
}

absl::StatusOr<Stmt> Parser::ParseMacro(int line) {
  Macro node;
  DT_ASSIGN_OR_RETURN(node.definition.name, TakeName("the name of the macro"));
  node.id = Intern(node.definition.name);
  DT_ASSIGN_OR_RETURN(node.definition.parameters, ParseParameters());
  DT_RETURN_IF_ERROR(ParseMacroBody("endmacro", node.definition));
  return Stmt{line, std::move(node)};
}

absl::StatusOr<Stmt> Parser::ParseCallBlock(int line) {
  CallBlock node;
  node.caller.name = "caller";
  if (AtOperator("(")) {
    DT_ASSIGN_OR_RETURN(node.caller.parameters, ParseParameters());
  }
  DT_ASSIGN_OR_RETURN(node.call, ParseExpression());
  if (!std::holds_alternative<Call>(node.call->node)) return SyntaxError(line, "expected a call after 'call'");
  DT_RETURN_IF_ERROR(ParseMacroBody("endcall", node.caller));
  saw_caller_ |= node.caller.uses_caller;  // a caller() in this body is that of the macro around it
  node.caller.uses_caller = false;
  return Stmt{line, std::move(node)};
}

absl::StatusOr<Stmt> Parser::ParseFilterBlock(int line) {
  FilterBlock node;
  DT_ASSIGN_OR_RETURN(node.filter, ParseFilterChain(nullptr));
  for (int links = 0; AtOperator("|"); ++links) {
    if (links >= limits_.nesting) return Unexpected("fewer filters in a row");
    DT_ASSIGN_OR_RETURN(node.filter, ParseFilter(std::move(node.filter)));
  }
  DT_RETURN_IF_ERROR(EndStatement());
  DT_ASSIGN_OR_RETURN(node.body, ParseBlock({"endfilter"}));
  DT_RETURN_IF_ERROR(EndBlock("endfilter"));
  return Stmt{line, std::move(node)};
}

absl::StatusOr<Stmt> Parser::ParseWith(int line) {
  With node;
  while (!At(TokenType::kBlockEnd)) {
    DT_ASSIGN_OR_RETURN(Target target, ParseTargetElement(/*allow_attribute=*/false));
    DT_RETURN_IF_ERROR(ExpectOperator("="));
    DT_ASSIGN_OR_RETURN(ExprPtr value, ParseExpression());
    node.bindings.emplace_back(std::move(target), std::move(value));
    if (!SkipOperator(",")) break;
  }
  DT_RETURN_IF_ERROR(EndStatement());
  DT_ASSIGN_OR_RETURN(node.body, ParseBlock({"endwith"}));
  DT_RETURN_IF_ERROR(EndBlock("endwith"));
  return Stmt{line, std::move(node)};
}

absl::StatusOr<Stmt> Parser::ParseScope(int line, std::string_view end) {
  With node;
  DT_RETURN_IF_ERROR(EndStatement());
  DT_ASSIGN_OR_RETURN(node.body, ParseBlock({end}));
  DT_RETURN_IF_ERROR(EndBlock(end));
  return Stmt{line, std::move(node)};
}

absl::StatusOr<Stmt> Parser::ParsePrint(int line) {
  Output node;
  while (!At(TokenType::kBlockEnd)) {
    DT_ASSIGN_OR_RETURN(ExprPtr value, ParseExpression());
    node.values.push_back(std::move(value));
    if (!SkipOperator(",")) break;
  }
  DT_RETURN_IF_ERROR(EndStatement());
  return Stmt{line, std::move(node)};
}

absl::StatusOr<Stmt> Parser::ParseLoopControl(int line, bool is_break) {
  if (loops_ == 0) return SyntaxError(line, absl::StrCat("'", is_break ? "break" : "continue", "' outside a loop"));
  DT_RETURN_IF_ERROR(EndStatement());
  if (is_break) return Stmt{line, Break{}};
  return Stmt{line, Continue{}};
}

absl::StatusOr<Target> Parser::ParseTarget(bool allow_attribute) {
  DT_ASSIGN_OR_RETURN(Target first, ParseTargetElement(allow_attribute));
  if (!AtOperator(",")) return first;
  Target tuple{Target::Type::kTuple, 0, "", {}};
  tuple.elements.push_back(std::move(first));
  while (SkipOperator(",")) {
    if (AtName("in") || AtOperator("=") || AtOperator(")")) break;
    DT_ASSIGN_OR_RETURN(Target next, ParseTargetElement(false));
    tuple.elements.push_back(std::move(next));
  }
  return tuple;
}

absl::StatusOr<Target> Parser::ParseTargetElement(bool allow_attribute) {
  if (SkipOperator("(")) {
    Level level(*this);
    DT_RETURN_IF_ERROR(CheckNesting());
    DT_ASSIGN_OR_RETURN(Target inner, ParseTarget(false));
    DT_RETURN_IF_ERROR(ExpectOperator(")"));
    return inner;
  }
  static constexpr std::string_view kConstants[] = {"true", "false", "none", "True", "False", "None"};
  const int line = Current().line;
  DT_ASSIGN_OR_RETURN(const std::string name, TakeName("a variable to assign to"));
  if (std::find(std::begin(kConstants), std::end(kConstants), name) != std::end(kConstants)) {
    return SyntaxError(line, absl::StrCat("cannot assign to '", name, "'"));
  }
  Target target{Target::Type::kName, Intern(name), "", {}};
  if (allow_attribute && SkipOperator(".")) {
    target.type = Target::Type::kAttribute;
    DT_ASSIGN_OR_RETURN(target.attribute, TakeName("an attribute"));
  }
  return target;
}

absl::StatusOr<Ast> ParseTemplate(std::string_view source, const TemplateLimits& limits) {
  if (source.size() > limits.source_bytes) {
    return ResourceExhausted("the chat template has ", source.size(), " bytes; at most ", limits.source_bytes,
                             " are allowed");
  }
  if (!IsValidUtf8(source)) return InvalidArgument("the chat template is not valid UTF-8");
  DT_ASSIGN_OR_RETURN(std::vector<Token> tokens, Tokenize(source));
  return Parser(std::move(tokens), limits).Run();
}

}  // namespace dovetail::model::jinja
