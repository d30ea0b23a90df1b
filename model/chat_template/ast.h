#pragma once
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "model/chat_template/runtime.h"
#include "model/chat_template/value.h"

// A parsed template, shared by concurrent renderings.
// Threads: immutable once parsed.

namespace dovetail::model::jinja {

using NameId = int;  // index into Ast::names

struct Expr;
using ExprPtr = std::unique_ptr<Expr>;
struct Stmt;
using Block = std::vector<std::unique_ptr<Stmt>>;

struct CallArguments {
  std::vector<ExprPtr> positional;
  std::vector<std::pair<std::string, ExprPtr>> named;
  ExprPtr star, double_star;  // null unless *args, **kwargs
};

struct Literal {
  Value value;
};
struct NameRef {
  NameId id;
};
struct ListLiteral {
  std::vector<ExprPtr> items;
  bool is_tuple;
};
struct DictLiteral {
  std::vector<std::pair<ExprPtr, ExprPtr>> entries;
};
enum class UnaryOp { kNegate, kPlus, kNot };
struct Unary {
  UnaryOp op;
  ExprPtr operand;
};
enum class BinaryOp { kAdd, kSubtract, kMultiply, kDivide, kFloorDivide, kModulo, kPower };
// a + b - c ...: flat, so that a long sum is not a deep tree. Evaluated from the left.
struct Chain {
  ExprPtr first;
  std::vector<std::pair<BinaryOp, ExprPtr>> rest;
};
struct Concat {
  std::vector<ExprPtr> parts;
};
struct Logic {
  bool is_and;
  std::vector<ExprPtr> operands;
};
enum class CompareOp { kEqual, kNotEqual, kLess, kLessEqual, kGreater, kGreaterEqual, kIn, kNotIn };
struct Compare {
  ExprPtr first;
  std::vector<std::pair<CompareOp, ExprPtr>> rest;
};
struct Conditional {
  ExprPtr test, then, otherwise;
};  // otherwise may be null
struct Attribute {
  ExprPtr object;
  std::string name;
};
struct Subscript {
  ExprPtr object, index;
};
struct Slice {
  ExprPtr object, begin, end, step;
};  // each of the last three may be null
struct Call {
  ExprPtr callee;
  CallArguments arguments;
};
struct FilterCall {
  ExprPtr input;
  std::string name;
  Filter filter;
  CallArguments arguments;
};  // input null: a block's text
struct TestCall {
  ExprPtr input;
  std::string name;
  Test test;
  CallArguments arguments;
};

struct Expr {
  int line;
  std::variant<Literal, NameRef, ListLiteral, DictLiteral, Unary, Chain, Concat, Logic, Compare, Conditional, Attribute,
               Subscript, Slice, Call, FilterCall, TestCall>
      node;
};

// What `set`, `for` and `with` assign to.
struct Target {
  enum class Type { kName, kAttribute, kTuple } type = Type::kName;
  NameId id = 0;
  std::string attribute;
  std::vector<Target> elements;
};

struct Parameter {
  NameId id;
  std::string name;
  ExprPtr otherwise;
};
struct MacroDefinition {
  std::string name;
  std::vector<Parameter> parameters;
  Block body;
  bool uses_varargs = false, uses_kwargs = false, uses_caller = false;
};

struct TextOut {
  std::string text;
};
struct Output {
  std::vector<ExprPtr> values;
};
struct If {
  std::vector<std::pair<ExprPtr, Block>> branches;
  Block otherwise;
};
struct For {
  Target target;
  ExprPtr sequence, condition;
  Block body, otherwise;
};
struct Set {
  Target target;
  ExprPtr value;
};
struct SetBlock {
  Target target;
  ExprPtr filter;
  Block body;
};  // filter may be null
struct Macro {
  NameId id;
  MacroDefinition definition;
};
struct CallBlock {
  ExprPtr call;
  MacroDefinition caller;
};  // call->node is a Call
struct FilterBlock {
  ExprPtr filter;
  Block body;
};
struct With {
  std::vector<std::pair<Target, ExprPtr>> bindings;
  Block body;
};  // also a plain scope, without bindings
struct Break {};
struct Continue {};

struct Stmt {
  int line;
  std::variant<TextOut, Output, If, For, Set, SetBlock, Macro, CallBlock, FilterBlock, With, Break, Continue> node;
};

struct Ast {
  std::vector<std::string> names;
  Block body;
  NameId loop_id = 0, caller_id = 0, varargs_id = 0, kwargs_id = 0;
};

}  // namespace dovetail::model::jinja
