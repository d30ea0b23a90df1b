#include "model/chat_template/builtins.h"
#include "model/chat_template/parser_state.h"

namespace dovetail::model::jinja {

absl::StatusOr<ExprPtr> Parser::ParseExpression() {
  Level level(*this);
  DT_RETURN_IF_ERROR(CheckNesting());
  const int line = Current().line;
  DT_ASSIGN_OR_RETURN(ExprPtr value, ParseOr());
  for (int links = 0; SkipName("if"); ++links) {
    if (links >= limits_.nesting) return Unexpected("fewer conditionals in a row");
    Conditional node;
    node.then = std::move(value);
    DT_ASSIGN_OR_RETURN(node.test, ParseOr());
    if (SkipName("else")) {
      DT_ASSIGN_OR_RETURN(node.otherwise, ParseExpression());
    }
    value = Make(line, std::move(node));
  }
  return value;
}

absl::StatusOr<ExprPtr> Parser::ParseLogic(std::string_view word, bool is_and, ParseFn operand) {
  const int line = Current().line;
  DT_ASSIGN_OR_RETURN(ExprPtr first, (this->*operand)());
  if (!AtName(word)) return first;
  Logic node{is_and, {}};
  node.operands.push_back(std::move(first));
  while (SkipName(word)) {
    DT_ASSIGN_OR_RETURN(ExprPtr next, (this->*operand)());
    node.operands.push_back(std::move(next));
  }
  return Make(line, std::move(node));
}

absl::StatusOr<ExprPtr> Parser::ParseNot() {
  if (!AtName("not")) return ParseCompare();
  Level level(*this);
  DT_RETURN_IF_ERROR(CheckNesting());
  const int line = Current().line;
  Advance();
  DT_ASSIGN_OR_RETURN(ExprPtr operand, ParseNot());
  return Make(line, Unary{UnaryOp::kNot, std::move(operand)});
}

absl::StatusOr<ExprPtr> Parser::ParseCompare() {
  static constexpr std::pair<std::string_view, CompareOp> kOps[] = {
      {"==", CompareOp::kEqual},     {"!=", CompareOp::kNotEqual}, {"<", CompareOp::kLess},
      {"<=", CompareOp::kLessEqual}, {">", CompareOp::kGreater},   {">=", CompareOp::kGreaterEqual}};
  const int line = Current().line;
  DT_ASSIGN_OR_RETURN(ExprPtr first, ParseSum());
  Compare node;
  while (true) {
    bool found = false;
    CompareOp op = CompareOp::kEqual;
    for (const auto& [text, known] : kOps) {
      if (!found && SkipOperator(text)) {
        op = known;
        found = true;
      }
    }
    if (!found && SkipName("in")) {
      op = CompareOp::kIn;
      found = true;
    } else if (!found && AtName("not") && Ahead().type == TokenType::kName && Ahead().text == "in") {
      Advance();
      Advance();
      op = CompareOp::kNotIn;
      found = true;
    }
    if (!found) break;
    DT_ASSIGN_OR_RETURN(ExprPtr operand, ParseSum());
    node.rest.emplace_back(op, std::move(operand));
  }
  if (node.rest.empty()) return first;
  node.first = std::move(first);
  return Make(line, std::move(node));
}

absl::StatusOr<ExprPtr> Parser::ParseChain(ParseFn operand,
                                           std::initializer_list<std::pair<std::string_view, BinaryOp>> ops) {
  const int line = Current().line;
  DT_ASSIGN_OR_RETURN(ExprPtr first, (this->*operand)());
  Chain node;
  for (bool more = true; more;) {
    more = false;
    for (const auto& [text, op] : ops) {
      if (!SkipOperator(text)) continue;
      DT_ASSIGN_OR_RETURN(ExprPtr next, (this->*operand)());
      node.rest.emplace_back(op, std::move(next));
      more = true;
      break;
    }
  }
  if (node.rest.empty()) return first;
  node.first = std::move(first);
  return Make(line, std::move(node));
}

absl::StatusOr<ExprPtr> Parser::ParseSum() {
  return ParseChain(&Parser::ParseConcat, {{"+", BinaryOp::kAdd}, {"-", BinaryOp::kSubtract}});
}

absl::StatusOr<ExprPtr> Parser::ParseConcat() {
  const int line = Current().line;
  DT_ASSIGN_OR_RETURN(ExprPtr first, ParseProduct());
  if (!AtOperator("~")) return first;
  Concat node;
  node.parts.push_back(std::move(first));
  while (SkipOperator("~")) {
    DT_ASSIGN_OR_RETURN(ExprPtr next, ParseProduct());
    node.parts.push_back(std::move(next));
  }
  return Make(line, std::move(node));
}

absl::StatusOr<ExprPtr> Parser::ParseProduct() {
  return ParseChain(
      &Parser::ParsePower,
      {{"*", BinaryOp::kMultiply}, {"/", BinaryOp::kDivide}, {"//", BinaryOp::kFloorDivide}, {"%", BinaryOp::kModulo}});
}

absl::StatusOr<ExprPtr> Parser::ParsePower() {
  return ParseChain(&Parser::ParseUnaryWithFilters, {{"**", BinaryOp::kPower}});
}

absl::StatusOr<ExprPtr> Parser::ParseUnary(bool with_filters) {
  const int line = Current().line;
  ExprPtr value;
  if (AtOperator("-") || AtOperator("+")) {
    Level level(*this);
    DT_RETURN_IF_ERROR(CheckNesting());
    const UnaryOp op = AtOperator("-") ? UnaryOp::kNegate : UnaryOp::kPlus;
    Advance();
    DT_ASSIGN_OR_RETURN(ExprPtr operand, ParseUnary(false));
    value = Make(line, Unary{op, std::move(operand)});
  } else {
    DT_ASSIGN_OR_RETURN(value, ParsePrimary());
  }
  DT_ASSIGN_OR_RETURN(value, ParsePostfix(std::move(value)));
  return with_filters ? ParseFiltersAndTests(std::move(value)) : std::move(value);
}

absl::StatusOr<ExprPtr> Parser::ParsePrimary() {
  const Token token = Current();
  switch (token.type) {
    case TokenType::kName: return ParseNameOrConstant();
    case TokenType::kString: {
      std::string text;
      for (; At(TokenType::kString); Advance()) text += Current().text;
      return Make(token.line, Literal{Value::String(std::move(text))});
    }
    case TokenType::kInteger: Advance(); return Make(token.line, Literal{Value(token.integer)});
    case TokenType::kFloat: Advance(); return Make(token.line, Literal{Value(token.number)});
    default: break;
  }
  if (SkipOperator("(")) {
    DT_ASSIGN_OR_RETURN(ExprPtr value, ParseTuple(&Parser::ParseExpression, /*parenthesized=*/true));
    DT_RETURN_IF_ERROR(ExpectOperator(")"));
    return value;
  }
  if (AtOperator("[")) return ParseListLiteral();
  if (AtOperator("{")) return ParseDictLiteral();
  return Unexpected("an expression");
}

absl::StatusOr<ExprPtr> Parser::ParseNameOrConstant() {
  const Token token = Current();
  Advance();
  if (token.text == "true" || token.text == "True") return Make(token.line, Literal{Value(true)});
  if (token.text == "false" || token.text == "False") return Make(token.line, Literal{Value(false)});
  if (token.text == "none" || token.text == "None") return Make(token.line, Literal{Value(None{})});
  saw_varargs_ |= token.text == "varargs";
  saw_kwargs_ |= token.text == "kwargs";
  saw_caller_ |= token.text == "caller";
  return Make(token.line, NameRef{Intern(token.text)});
}

bool Parser::AtTupleEnd() const {
  return At(TokenType::kVariableEnd) || At(TokenType::kBlockEnd) || AtOperator(")") || AtName("in");
}

absl::StatusOr<ExprPtr> Parser::ParseTuple(ParseFn element, bool parenthesized) {
  const int line = Current().line;
  ListLiteral node{{}, /*is_tuple=*/true};
  bool has_comma = false;
  while (!AtTupleEnd()) {
    DT_ASSIGN_OR_RETURN(ExprPtr item, (this->*element)());
    node.items.push_back(std::move(item));
    if (!SkipOperator(",")) break;
    has_comma = true;
  }
  if (!has_comma && !node.items.empty()) return std::move(node.items[0]);
  if (!has_comma && !parenthesized) return Unexpected("an expression");
  return Make(line, std::move(node));
}

absl::StatusOr<ExprPtr> Parser::ParseListLiteral() {
  const int line = Current().line;
  DT_RETURN_IF_ERROR(ExpectOperator("["));
  ListLiteral node{{}, /*is_tuple=*/false};
  while (!AtOperator("]")) {
    DT_ASSIGN_OR_RETURN(ExprPtr item, ParseExpression());
    node.items.push_back(std::move(item));
    if (!SkipOperator(",")) break;
  }
  DT_RETURN_IF_ERROR(ExpectOperator("]"));
  return Make(line, std::move(node));
}

absl::StatusOr<ExprPtr> Parser::ParseDictLiteral() {
  const int line = Current().line;
  DT_RETURN_IF_ERROR(ExpectOperator("{"));
  DictLiteral node;
  while (!AtOperator("}")) {
    DT_ASSIGN_OR_RETURN(ExprPtr key, ParseExpression());
    DT_RETURN_IF_ERROR(ExpectOperator(":"));
    DT_ASSIGN_OR_RETURN(ExprPtr value, ParseExpression());
    node.entries.emplace_back(std::move(key), std::move(value));
    if (!SkipOperator(",")) break;
  }
  DT_RETURN_IF_ERROR(ExpectOperator("}"));
  return Make(line, std::move(node));
}

absl::StatusOr<ExprPtr> Parser::ParsePostfix(ExprPtr base) {
  for (int links = 0;; ++links) {
    const int line = Current().line;
    if (AtOperator(".") || AtOperator("[")) {
      DT_ASSIGN_OR_RETURN(base, ParseSubscript(std::move(base)));
    } else if (AtOperator("(")) {
      DT_ASSIGN_OR_RETURN(CallArguments arguments, ParseArguments());
      base = Make(line, Call{std::move(base), std::move(arguments)});
    } else {
      return base;
    }
    if (links >= limits_.nesting) return Unexpected("fewer attributes, subscripts and calls in a row");
  }
}

absl::StatusOr<ExprPtr> Parser::ParseFiltersAndTests(ExprPtr base) {
  for (int links = 0;; ++links) {
    const int line = Current().line;
    if (AtOperator("|")) {
      DT_ASSIGN_OR_RETURN(base, ParseFilter(std::move(base)));
    } else if (AtName("is")) {
      DT_ASSIGN_OR_RETURN(base, ParseTest(std::move(base)));
    } else if (AtOperator("(")) {
      DT_ASSIGN_OR_RETURN(CallArguments arguments, ParseArguments());
      base = Make(line, Call{std::move(base), std::move(arguments)});
    } else {
      return base;
    }
    if (links >= limits_.nesting) return Unexpected("fewer filters and tests in a row");
  }
}

absl::StatusOr<ExprPtr> Parser::ParseSubscript(ExprPtr base) {
  const int line = Current().line;
  if (SkipOperator(".")) {
    if (At(TokenType::kInteger)) {
      const int64_t index = Current().integer;
      Advance();
      return Make(line, Subscript{std::move(base), Make(line, Literal{Value(index)})});
    }
    DT_ASSIGN_OR_RETURN(std::string name, TakeName("an attribute"));
    return Make(line, Attribute{std::move(base), std::move(name)});
  }
  DT_RETURN_IF_ERROR(ExpectOperator("["));
  ExprPtr bounds[3];
  int colons = 0;
  for (int i = 0; i < 3; ++i) {
    if (!AtOperator(":") && !AtOperator("]")) {
      DT_ASSIGN_OR_RETURN(bounds[i], ParseExpression());
    }
    if (i == 2 || !SkipOperator(":")) break;
    ++colons;
  }
  if (colons == 0 && !bounds[0]) return Unexpected("a subscript");
  DT_RETURN_IF_ERROR(ExpectOperator("]"));
  if (colons == 0) return Make(line, Subscript{std::move(base), std::move(bounds[0])});
  return Make(line, Slice{std::move(base), std::move(bounds[0]), std::move(bounds[1]), std::move(bounds[2])});
}

absl::StatusOr<ExprPtr> Parser::ParseFilter(ExprPtr input) {
  DT_RETURN_IF_ERROR(ExpectOperator("|"));
  return ParseFilterChain(std::move(input));
}

// At the name of a filter. Takes only that filter; further ones follow a '|'.
absl::StatusOr<ExprPtr> Parser::ParseFilterChain(ExprPtr input) {
  const int line = Current().line;
  FilterCall node;
  node.input = std::move(input);
  DT_ASSIGN_OR_RETURN(node.name, TakeName("the name of a filter"));
  node.filter = FindFilter(node.name);
  if (AtOperator("(")) {
    DT_ASSIGN_OR_RETURN(node.arguments, ParseArguments());
  }
  return Make(line, std::move(node));
}

absl::StatusOr<ExprPtr> Parser::ParseTest(ExprPtr input) {
  const int line = Current().line;
  Advance();  // is
  const bool negated = SkipName("not");
  TestCall node;
  node.input = std::move(input);
  DT_ASSIGN_OR_RETURN(node.name, TakeName("the name of a test"));
  node.test = FindTest(node.name);
  const bool has_operand = At(TokenType::kString) || At(TokenType::kInteger) || At(TokenType::kFloat) ||
                           AtOperator("[") || AtOperator("{") ||
                           (At(TokenType::kName) && !AtName("else") && !AtName("or") && !AtName("and") &&
                            !AtName("if") && !AtName("is") && !AtName("in") && !AtName("not"));
  if (AtOperator("(")) {
    DT_ASSIGN_OR_RETURN(node.arguments, ParseArguments());
  } else if (has_operand) {
    Level level(*this);
    DT_RETURN_IF_ERROR(CheckNesting());
    DT_ASSIGN_OR_RETURN(ExprPtr operand, ParsePrimary());
    DT_ASSIGN_OR_RETURN(operand, ParsePostfix(std::move(operand)));
    node.arguments.positional.push_back(std::move(operand));
  }
  if (AtName("is")) return SyntaxError(line, "tests cannot be chained with 'is'");
  ExprPtr test = Make(line, std::move(node));
  return negated ? Make(line, Unary{UnaryOp::kNot, std::move(test)}) : std::move(test);
}

absl::StatusOr<CallArguments> Parser::ParseArguments() {
  CallArguments arguments;
  DT_RETURN_IF_ERROR(ExpectOperator("("));
  while (!AtOperator(")")) {
    if (SkipOperator("**")) {
      if (arguments.double_star) return Unexpected("one ** argument");
      DT_ASSIGN_OR_RETURN(arguments.double_star, ParseExpression());
    } else if (SkipOperator("*")) {
      if (arguments.star) return Unexpected("one * argument");
      DT_ASSIGN_OR_RETURN(arguments.star, ParseExpression());
    } else if (At(TokenType::kName) && Ahead().type == TokenType::kOperator && Ahead().text == "=") {
      std::string name = Current().text;
      Advance();
      Advance();
      DT_ASSIGN_OR_RETURN(ExprPtr value, ParseExpression());
      arguments.named.emplace_back(std::move(name), std::move(value));
    } else {
      if (!arguments.named.empty() || arguments.star || arguments.double_star) {
        return Unexpected("a keyword argument after the first keyword argument");
      }
      DT_ASSIGN_OR_RETURN(ExprPtr value, ParseExpression());
      arguments.positional.push_back(std::move(value));
    }
    if (!SkipOperator(",")) break;
  }
  DT_RETURN_IF_ERROR(ExpectOperator(")"));
  return arguments;
}

}  // namespace dovetail::model::jinja
