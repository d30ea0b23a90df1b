#include "absl/strings/str_cat.h"
#include "model/chat_template/builtins.h"
#include "model/chat_template/interpreter.h"
#include "model/chat_template/operators.h"
#include "model/chat_template/python_repr.h"

// The interpreter's expressions.

namespace dovetail::model::jinja {

absl::Status Interpreter::EnterFrame() const {
  if (frames_ <= runtime_.limits().evaluation_depth) return absl::OkStatus();
  return ResourceExhausted("the template recurses deeper than ", runtime_.limits().evaluation_depth, " levels");
}

absl::StatusOr<Value> Interpreter::Evaluate(const Expr& expr) {
  Frame frame(*this);
  line_ = expr.line;
  DT_RETURN_IF_ERROR(EnterFrame());
  DT_RETURN_IF_ERROR(runtime_.Charge());
  return std::visit([&](const auto& node) { return Visit(node, expr.line); }, expr.node);
}

absl::StatusOr<Value> Interpreter::Visit(const NameRef& node, int) {
  if (const Value* found = FindVariable(node.id)) return *found;
  const std::string& name = ast_.names[static_cast<size_t>(node.id)];
  if (const Function function = FindGlobal(name)) {
    DT_ASSIGN_OR_RETURN(Callable * callable, runtime_.NewCallable());
    callable->name = name;
    callable->function = function;
    return Value(callable);
  }
  return Value(Undefined{&name});
}

absl::StatusOr<Value> Interpreter::Visit(const ListLiteral& node, int) {
  DT_ASSIGN_OR_RETURN(List * list, runtime_.NewList(node.items.size(), node.is_tuple));
  for (const ExprPtr& item : node.items) {
    DT_ASSIGN_OR_RETURN(Value value, Evaluate(*item));
    list->items.push_back(std::move(value));
  }
  return Value(list);
}

absl::StatusOr<Value> Interpreter::Visit(const DictLiteral& node, int) {
  DT_ASSIGN_OR_RETURN(Dict * dict, runtime_.NewDict());
  for (const auto& [key_expr, value_expr] : node.entries) {
    DT_ASSIGN_OR_RETURN(Value key, Evaluate(*key_expr));
    DT_ASSIGN_OR_RETURN(Value value, Evaluate(*value_expr));
    DT_RETURN_IF_ERROR(runtime_.Insert(*dict, std::move(key), std::move(value)));
  }
  return Value(dict);
}

absl::StatusOr<Value> Interpreter::Visit(const Unary& node, int line) {
  DT_ASSIGN_OR_RETURN(Value value, Evaluate(*node.operand));
  line_ = line;
  if (node.op == UnaryOp::kNot) return Value(!value.Truthy());
  if (node.op == UnaryOp::kNegate) return Negate(value);
  if (value.IsNumber()) return value;
  return TypeError(value, "has no unary +");
}

absl::StatusOr<Value> Interpreter::Visit(const Chain& node, int) {
  DT_ASSIGN_OR_RETURN(Value value, Evaluate(*node.first));
  for (const auto& [op, operand] : node.rest) {
    DT_ASSIGN_OR_RETURN(const Value right, Evaluate(*operand));
    DT_ASSIGN_OR_RETURN(value, Apply(runtime_, op, value, right));
  }
  return value;
}

absl::StatusOr<Value> Interpreter::Visit(const Concat& node, int) {
  Text out;
  for (const ExprPtr& part : node.parts) {
    DT_ASSIGN_OR_RETURN(const Value value, Evaluate(*part));
    DT_ASSIGN_OR_RETURN(const Text text, ToText(runtime_, value));
    if (out.size() + text.size() > runtime_.string_bytes_max()) return runtime_.ChargeString(out.size() + text.size());
    out.Append(text);
  }
  return runtime_.NewString(std::move(out));
}

absl::StatusOr<Value> Interpreter::Visit(const Logic& node, int) {
  Value value;
  for (const ExprPtr& operand : node.operands) {
    DT_ASSIGN_OR_RETURN(value, Evaluate(*operand));
    if (value.Truthy() != node.is_and) break;
  }
  return value;
}

absl::StatusOr<Value> Interpreter::Visit(const Compare& node, int) {
  DT_ASSIGN_OR_RETURN(Value left, Evaluate(*node.first));
  for (const auto& [op, operand] : node.rest) {
    DT_ASSIGN_OR_RETURN(Value right, Evaluate(*operand));
    DT_ASSIGN_OR_RETURN(const bool holds, ApplyCompare(runtime_, op, left, right));
    if (!holds) return Value(false);
    left = std::move(right);
  }
  return Value(true);
}

absl::StatusOr<Value> Interpreter::Visit(const Conditional& node, int) {
  DT_ASSIGN_OR_RETURN(const Value test, Evaluate(*node.test));
  if (test.Truthy()) return Evaluate(*node.then);
  if (node.otherwise) return Evaluate(*node.otherwise);
  return Value();
}

absl::StatusOr<Value> Interpreter::Visit(const Attribute& node, int line) {
  DT_ASSIGN_OR_RETURN(const Value object, Evaluate(*node.object));
  line_ = line;
  return GetAttribute(runtime_, object, node.name);
}

absl::StatusOr<Value> Interpreter::Visit(const Subscript& node, int line) {
  DT_ASSIGN_OR_RETURN(const Value object, Evaluate(*node.object));
  DT_ASSIGN_OR_RETURN(const Value index, Evaluate(*node.index));
  line_ = line;
  return GetItem(runtime_, object, index);
}

absl::StatusOr<Value> Interpreter::Visit(const Slice& node, int line) {
  DT_ASSIGN_OR_RETURN(const Value object, Evaluate(*node.object));
  Value bounds[3];
  const ExprPtr* const exprs[3] = {&node.begin, &node.end, &node.step};
  for (int i = 0; i < 3; ++i) {
    if (!*exprs[i]) continue;
    DT_ASSIGN_OR_RETURN(bounds[i], Evaluate(**exprs[i]));
  }
  line_ = line;
  const auto bound = [&](int i) { return *exprs[i] ? &bounds[i] : nullptr; };
  return GetSlice(runtime_, object, bound(0), bound(1), bound(2));
}

absl::StatusOr<Args> Interpreter::EvaluateArguments(const CallArguments& arguments) {
  Args args;
  for (const ExprPtr& expr : arguments.positional) {
    DT_ASSIGN_OR_RETURN(Value value, Evaluate(*expr));
    args.positional.push_back(std::move(value));
  }
  if (arguments.star) {
    DT_ASSIGN_OR_RETURN(const Value star, Evaluate(*arguments.star));
    DT_ASSIGN_OR_RETURN(const std::vector<Value> items, Iterate(runtime_, star));
    args.positional.insert(args.positional.end(), items.begin(), items.end());
  }
  for (const auto& [name, expr] : arguments.named) {
    DT_ASSIGN_OR_RETURN(Value value, Evaluate(*expr));
    args.named.emplace_back(name, std::move(value));
  }
  if (arguments.double_star) {
    DT_ASSIGN_OR_RETURN(const Value mapping, Evaluate(*arguments.double_star));
    if (!mapping.IsDict()) return TypeError(mapping, "is not a mapping, which ** needs");
    if (mapping.dict().size() > Runtime::kAttributes) {
      return ResourceExhausted("a call has more than ", Runtime::kAttributes, " keyword arguments");
    }
    for (const auto& [key, value] : mapping.dict().entries()) {
      if (!key.IsString()) return InvalidArgument("keywords must be strings");
      args.named.emplace_back(std::string(key.view()), value);
    }
  }
  return args;
}

absl::StatusOr<Value> Interpreter::EvaluateCall(const Call& node, int line, const Value* caller) {
  // object.method(...) needs no bound method.
  if (const auto* attribute = std::get_if<Attribute>(&node.callee->node)) {
    DT_ASSIGN_OR_RETURN(const Value object, Evaluate(*attribute->object));
    if (const Filter method = FindMethod(runtime_, object, attribute->name)) {
      DT_ASSIGN_OR_RETURN(const Args args, EvaluateArguments(node.arguments));
      line_ = line;
      return method(runtime_, object, args);
    }
  }
  if (const auto* name = std::get_if<NameRef>(&node.callee->node); name && !FindVariable(name->id)) {
    if (const Function function = FindGlobal(ast_.names[static_cast<size_t>(name->id)])) {
      DT_ASSIGN_OR_RETURN(const Args args, EvaluateArguments(node.arguments));
      line_ = line;
      return function(runtime_, args);
    }
  }
  DT_ASSIGN_OR_RETURN(const Value callee, Evaluate(*node.callee));
  if (callee.kind() != Kind::kCallable) return TypeError(callee, "is not callable");
  DT_ASSIGN_OR_RETURN(Args args, EvaluateArguments(node.arguments));
  line_ = line;
  const Callable& callable = callee.callable();
  if (callable.macro) return CallMacro(callable, std::move(args), caller);
  if (callable.method) return callable.method(runtime_, callable.self, args);
  return callable.function(runtime_, args);
}

absl::StatusOr<Value> Interpreter::Visit(const FilterCall& node, int line) {
  if (!node.input) return ApplyFilter(node, line, block_text_ ? *block_text_ : Value());
  DT_ASSIGN_OR_RETURN(const Value input, Evaluate(*node.input));
  return ApplyFilter(node, line, input);
}

absl::StatusOr<Value> Interpreter::ApplyFilter(const FilterCall& node, int line, const Value& input) {
  line_ = line;
  if (!node.filter) return InvalidArgument("No filter named '", node.name, "'");
  DT_ASSIGN_OR_RETURN(const Args args, EvaluateArguments(node.arguments));
  line_ = line;
  return node.filter(runtime_, input, args);
}

absl::StatusOr<Value> Interpreter::FilterText(const Expr& filter, Value text) {
  const Value* outer = std::exchange(block_text_, &text);
  absl::StatusOr<Value> result = Evaluate(filter);
  block_text_ = outer;
  return result;
}

absl::StatusOr<Value> Interpreter::Visit(const TestCall& node, int line) {
  if (!node.test) return InvalidArgument("No test named '", node.name, "'");
  DT_ASSIGN_OR_RETURN(const Value input, Evaluate(*node.input));
  DT_ASSIGN_OR_RETURN(const Args args, EvaluateArguments(node.arguments));
  line_ = line;
  DT_ASSIGN_OR_RETURN(const bool passed, node.test(runtime_, input, args));
  return Value(passed);
}

}  // namespace dovetail::model::jinja
