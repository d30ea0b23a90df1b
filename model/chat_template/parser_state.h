#pragma once
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "model/chat_template/ast.h"
#include "model/chat_template/lexer.h"
#include "model/chat_template/limits.h"

namespace dovetail::model::jinja {

// Recursive descent over the tokens of one template. Expressions are in parser_expressions.cc, statements in parser.cc.
// For one Run().
// Threads: thread-compatible.
// Errors: those of Parse (parser.h).
class Parser {
 public:
  Parser(std::vector<Token> tokens, const TemplateLimits& limits);
  absl::StatusOr<Ast> Run();

 private:
  // Counts one level of nesting while alive.
  class Level {
   public:
    explicit Level(Parser& parser) : parser_(parser) { ++parser_.nesting_; }
    ~Level() { --parser_.nesting_; }

   private:
    Parser& parser_;
  };

  const Token& Current() const { return tokens_[at_]; }
  const Token& Ahead() const { return tokens_[at_ + 1 < tokens_.size() ? at_ + 1 : at_]; }
  void Advance() { at_ += at_ + 1 < tokens_.size(); }
  bool At(TokenType type) const { return Current().type == type; }
  bool AtName(std::string_view name) const { return At(TokenType::kName) && Current().text == name; }
  bool AtOperator(std::string_view op) const { return At(TokenType::kOperator) && Current().text == op; }
  bool SkipName(std::string_view name);
  bool SkipOperator(std::string_view op);
  absl::Status ExpectOperator(std::string_view op);
  absl::Status ExpectName(std::string_view name);
  absl::StatusOr<std::string> TakeName(const char* what);
  absl::Status Unexpected(const std::string& expected) const;
  absl::Status CheckNesting() const;
  NameId Intern(const std::string& name);

  template <typename Node>
  ExprPtr Make(int line, Node node) {
    return ExprPtr(new Expr{line, std::move(node)});
  }

  // Expressions, one function a level of precedence.
  using ParseFn = absl::StatusOr<ExprPtr> (Parser::*)();
  absl::StatusOr<ExprPtr> ParseExpression();
  absl::StatusOr<ExprPtr> ParseOr() { return ParseLogic("or", false, &Parser::ParseAnd); }
  absl::StatusOr<ExprPtr> ParseAnd() { return ParseLogic("and", true, &Parser::ParseNot); }
  absl::StatusOr<ExprPtr> ParseLogic(std::string_view word, bool is_and, ParseFn operand);
  absl::StatusOr<ExprPtr> ParseNot();
  absl::StatusOr<ExprPtr> ParseCompare();
  absl::StatusOr<ExprPtr> ParseSum();
  absl::StatusOr<ExprPtr> ParseConcat();
  absl::StatusOr<ExprPtr> ParseProduct();
  absl::StatusOr<ExprPtr> ParsePower();
  absl::StatusOr<ExprPtr> ParseChain(ParseFn operand, std::initializer_list<std::pair<std::string_view, BinaryOp>> ops);
  absl::StatusOr<ExprPtr> ParseUnaryWithFilters() { return ParseUnary(true); }
  absl::StatusOr<ExprPtr> ParseUnary(bool with_filters);
  absl::StatusOr<ExprPtr> ParsePrimary();
  absl::StatusOr<ExprPtr> ParseNameOrConstant();
  absl::StatusOr<ExprPtr> ParsePostfix(ExprPtr base);
  absl::StatusOr<ExprPtr> ParseFiltersAndTests(ExprPtr base);
  absl::StatusOr<ExprPtr> ParseSubscript(ExprPtr base);
  absl::StatusOr<ExprPtr> ParseFilter(ExprPtr input);
  absl::StatusOr<ExprPtr> ParseFilterChain(ExprPtr input);
  absl::StatusOr<ExprPtr> ParseTest(ExprPtr input);
  absl::StatusOr<CallArguments> ParseArguments();
  absl::StatusOr<ExprPtr> ParseTuple(ParseFn element, bool parenthesized);
  bool AtTupleEnd() const;
  absl::StatusOr<ExprPtr> ParseListLiteral();
  absl::StatusOr<ExprPtr> ParseDictLiteral();

  // Statements.
  absl::StatusOr<Block> ParseBlock(std::initializer_list<std::string_view> ends);
  absl::StatusOr<std::unique_ptr<Stmt>> ParseStatement();
  absl::Status EndStatement();
  absl::Status EndBlock(std::string_view word);
  absl::StatusOr<Stmt> ParseIf(int line);
  absl::StatusOr<Stmt> ParseFor(int line);
  absl::StatusOr<Stmt> ParseSet(int line);
  absl::StatusOr<Stmt> ParseMacro(int line);
  absl::StatusOr<Stmt> ParseCallBlock(int line);
  absl::StatusOr<Stmt> ParseFilterBlock(int line);
  absl::StatusOr<Stmt> ParseWith(int line);
  absl::StatusOr<Stmt> ParseScope(int line, std::string_view end);
  absl::StatusOr<Stmt> ParsePrint(int line);
  absl::StatusOr<Stmt> ParseLoopControl(int line, bool is_break);
  absl::StatusOr<std::vector<Parameter>> ParseParameters();
  absl::Status ParseMacroBody(std::string_view end, MacroDefinition& macro);
  absl::StatusOr<Target> ParseTarget(bool allow_attribute);
  absl::StatusOr<Target> ParseTargetElement(bool allow_attribute);

  const std::vector<Token> tokens_;
  const TemplateLimits& limits_;
  size_t at_ = 0;
  int nesting_ = 0;
  int loops_ = 0;  // for statements around the current position, inside the current macro
  bool saw_varargs_ = false, saw_kwargs_ = false, saw_caller_ = false;  // in the current macro
  Ast ast_;
  absl::flat_hash_map<std::string, NameId> name_ids_;
};

}  // namespace dovetail::model::jinja
