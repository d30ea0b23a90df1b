#include "model/chat_template/interpreter.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "model/chat_template/operators.h"
#include "model/chat_template/python_repr.h"

// The interpreter's statements, scopes and macros.

namespace dovetail::model::jinja {

Interpreter::Interpreter(const Ast& ast, Runtime& runtime) : ast_(ast), runtime_(runtime) {
  globals_ = PushScope(nullptr);
  scope_ = globals_;
}

void Interpreter::SetGlobal(NameId id, Value value) { globals_->variables.emplace_back(id, std::move(value)); }

absl::StatusOr<Text> Interpreter::Run() {
  Text out;
  out_ = &out;
  DT_RETURN_IF_ERROR(Execute(ast_.body).status());
  return out;
}

Value* Interpreter::FindVariable(NameId id) {
  for (Scope* scope = scope_; scope; scope = scope->parent) {
    for (auto& [name, value] : scope->variables) {
      if (name == id) return &value;
    }
  }
  return nullptr;
}

void Interpreter::SetVariable(NameId id, Value value) {
  for (auto& [name, old] : scope_->variables) {
    if (name == id) {
      old = std::move(value);
      return;
    }
  }
  scope_->variables.emplace_back(id, std::move(value));
}

Scope* Interpreter::PushScope(Scope* parent) {
  Scope* scope;
  if (free_scopes_.empty()) {
    scope = &scopes_.emplace_back();
  } else {
    scope = free_scopes_.back();
    free_scopes_.pop_back();
  }
  scope->parent = parent;
  scope_ = scope;
  return scope;
}

void Interpreter::PopScope(Scope* outer) {
  if (!scope_->captured) {
    scope_->variables.clear();
    free_scopes_.push_back(scope_);
  }
  scope_ = outer;
}

absl::StatusOr<Interpreter::Flow> Interpreter::Execute(const Block& block) {
  for (const auto& stmt : block) {
    DT_ASSIGN_OR_RETURN(const Flow flow, Execute(*stmt));
    if (flow != Flow::kNormal) return flow;
  }
  return Flow::kNormal;
}

absl::StatusOr<Interpreter::Flow> Interpreter::Execute(const Stmt& stmt) {
  Frame frame(*this);
  line_ = stmt.line;
  DT_RETURN_IF_ERROR(EnterFrame());
  DT_RETURN_IF_ERROR(runtime_.Charge());
  return std::visit([&](const auto& node) { return Visit(node); }, stmt.node);
}

absl::Status Interpreter::CheckOutput() const {
  if (out_->size() <= runtime_.string_bytes_max()) return absl::OkStatus();
  return ResourceExhausted("the template wrote more than ", runtime_.string_bytes_max(),
                           " bytes for this conversation");
}

absl::StatusOr<Interpreter::Flow> Interpreter::Visit(const TextOut& node) {
  DT_RETURN_IF_ERROR(runtime_.ChargeBytes(node.text.size()));
  out_->Append(node.text, /*is_input=*/false);
  DT_RETURN_IF_ERROR(CheckOutput());
  return Flow::kNormal;
}

absl::Status Interpreter::Print(const Value& value) {
  if (value.IsString()) {
    DT_RETURN_IF_ERROR(runtime_.ChargeBytes(value.text().Cost()));
    out_->Append(value.text());
  } else {
    DT_ASSIGN_OR_RETURN(const Text text, ToText(runtime_, value));
    out_->Append(text);
  }
  return CheckOutput();
}

absl::StatusOr<Interpreter::Flow> Interpreter::Visit(const Output& node) {
  for (const ExprPtr& expr : node.values) {
    DT_ASSIGN_OR_RETURN(const Value value, Evaluate(*expr));
    DT_RETURN_IF_ERROR(Print(value));
  }
  return Flow::kNormal;
}

absl::StatusOr<Interpreter::Flow> Interpreter::Visit(const If& node) {
  for (const auto& [test, body] : node.branches) {
    DT_ASSIGN_OR_RETURN(const Value value, Evaluate(*test));
    if (value.Truthy()) return Execute(body);
  }
  return Execute(node.otherwise);
}

absl::StatusOr<std::vector<Value>> Interpreter::LoopItems(const For& node) {
  DT_ASSIGN_OR_RETURN(const Value sequence, Evaluate(*node.sequence));
  DT_ASSIGN_OR_RETURN(std::vector<Value> items, Iterate(runtime_, sequence));
  if (!node.condition) return items;
  std::vector<Value> kept;
  Scope* outer = scope_;
  for (Value& item : items) {
    PushScope(outer);
    DT_RETURN_IF_ERROR(Assign(node.target, item));
    DT_ASSIGN_OR_RETURN(const Value passed, Evaluate(*node.condition));
    PopScope(outer);
    if (passed.Truthy()) kept.push_back(std::move(item));
  }
  return kept;
}

absl::StatusOr<Interpreter::Flow> Interpreter::Visit(const For& node) {
  DT_ASSIGN_OR_RETURN(const std::vector<Value> items, LoopItems(node));
  Scope* outer = scope_;
  if (items.empty()) {
    PushScope(outer);
    DT_ASSIGN_OR_RETURN(const Flow flow, Execute(node.otherwise));
    PopScope(outer);
    return flow;
  }
  DT_ASSIGN_OR_RETURN(LoopState * loop, runtime_.NewLoop());
  loop->length = items.size();
  const auto undefined = [this] { return Value(Undefined{runtime_.Keep("there is no such item in the loop")}); };
  for (size_t i = 0; i < items.size(); ++i) {
    DT_RETURN_IF_ERROR(runtime_.Charge());
    loop->index0 = i;
    loop->previous = i > 0 ? items[i - 1] : undefined();
    loop->next = i + 1 < items.size() ? items[i + 1] : undefined();
    PushScope(outer);
    scope_->variables.emplace_back(ast_.loop_id, Value(loop));
    DT_RETURN_IF_ERROR(Assign(node.target, items[i]));
    DT_ASSIGN_OR_RETURN(const Flow flow, Execute(node.body));
    PopScope(outer);
    if (flow == Flow::kBreak) break;
  }
  return Flow::kNormal;
}

absl::Status Interpreter::Assign(const Target& target, Value value) {
  switch (target.type) {
    case Target::Type::kName: SetVariable(target.id, std::move(value)); return absl::OkStatus();
    case Target::Type::kAttribute: {
      const Value* object = FindVariable(target.id);
      if (!object || object->kind() != Kind::kNamespace) {
        return InvalidArgument("cannot assign attribute on non-namespace object '",
                               ast_.names[static_cast<size_t>(target.id)], "'");
      }
      return runtime_.SetAttribute(object->space(), target.attribute, std::move(value));
    }
    case Target::Type::kTuple: {
      DT_ASSIGN_OR_RETURN(std::vector<Value> values, Iterate(runtime_, value));
      if (values.size() != target.elements.size()) {
        return InvalidArgument("expected ", target.elements.size(), " values to unpack, got ", values.size());
      }
      for (size_t i = 0; i < values.size(); ++i) DT_RETURN_IF_ERROR(Assign(target.elements[i], std::move(values[i])));
      return absl::OkStatus();
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<Interpreter::Flow> Interpreter::Visit(const Set& node) {
  DT_ASSIGN_OR_RETURN(Value value, Evaluate(*node.value));
  DT_RETURN_IF_ERROR(Assign(node.target, std::move(value)));
  return Flow::kNormal;
}

absl::StatusOr<Text> Interpreter::Capture(const Block& block) {
  Text text;
  Text* outer_out = std::exchange(out_, &text);
  Scope* outer = scope_;
  PushScope(outer);
  const absl::Status status = Execute(block).status();
  PopScope(outer);
  out_ = outer_out;
  DT_RETURN_IF_ERROR(status);
  return text;
}

absl::StatusOr<Interpreter::Flow> Interpreter::Visit(const SetBlock& node) {
  DT_ASSIGN_OR_RETURN(Text text, Capture(node.body));
  DT_ASSIGN_OR_RETURN(Value value, runtime_.NewString(std::move(text)));
  if (node.filter) {
    DT_ASSIGN_OR_RETURN(value, FilterText(*node.filter, std::move(value)));
  }
  DT_RETURN_IF_ERROR(Assign(node.target, std::move(value)));
  return Flow::kNormal;
}

absl::StatusOr<Interpreter::Flow> Interpreter::Visit(const FilterBlock& node) {
  DT_ASSIGN_OR_RETURN(Text text, Capture(node.body));
  DT_ASSIGN_OR_RETURN(Value value, runtime_.NewString(std::move(text)));
  DT_ASSIGN_OR_RETURN(value, FilterText(*node.filter, std::move(value)));
  DT_RETURN_IF_ERROR(Print(value));
  return Flow::kNormal;
}

absl::StatusOr<Interpreter::Flow> Interpreter::Visit(const With& node) {
  Scope* outer = scope_;
  std::vector<Value> values;
  for (const auto& [target, expr] : node.bindings) {
    DT_ASSIGN_OR_RETURN(Value value, Evaluate(*expr));
    values.push_back(std::move(value));
  }
  PushScope(outer);
  for (size_t i = 0; i < values.size(); ++i) DT_RETURN_IF_ERROR(Assign(node.bindings[i].first, std::move(values[i])));
  DT_ASSIGN_OR_RETURN(const Flow flow, Execute(node.body));
  PopScope(outer);
  return flow;
}

absl::StatusOr<Callable*> Interpreter::MakeMacro(const MacroDefinition& definition) {
  DT_ASSIGN_OR_RETURN(Callable * macro, runtime_.NewCallable());
  macro->name = definition.name;
  macro->macro = &definition;
  macro->closure = scope_;
  for (Scope* scope = scope_; scope && !scope->captured; scope = scope->parent) scope->captured = true;
  return macro;
}

absl::StatusOr<Interpreter::Flow> Interpreter::Visit(const Macro& node) {
  DT_ASSIGN_OR_RETURN(Callable * macro, MakeMacro(node.definition));
  SetVariable(node.id, Value(macro));
  return Flow::kNormal;
}

absl::StatusOr<Interpreter::Flow> Interpreter::Visit(const CallBlock& node) {
  DT_ASSIGN_OR_RETURN(Callable * caller, MakeMacro(node.caller));
  const Value caller_value(caller);
  DT_ASSIGN_OR_RETURN(const Value value, EvaluateCall(std::get<Call>(node.call->node), node.call->line, &caller_value));
  DT_RETURN_IF_ERROR(Print(value));
  return Flow::kNormal;
}

// Binds the arguments of a macro in the current scope, Jinja's way: missing ones are undefined, and what has no
// parameter goes to varargs and kwargs.
absl::Status Interpreter::BindParameters(const MacroDefinition& macro, Args& args, const Value* caller) {
  std::vector<bool> used(args.named.size(), false);
  for (size_t i = 0; i < macro.parameters.size(); ++i) {
    const Parameter& parameter = macro.parameters[i];
    Value value(Undefined{&parameter.name});
    const auto named = std::find_if(args.named.begin(), args.named.end(),
                                    [&](const auto& argument) { return argument.first == parameter.name; });
    if (named != args.named.end()) used[static_cast<size_t>(named - args.named.begin())] = true;
    if (i < args.positional.size()) {
      if (named != args.named.end()) {
        return InvalidArgument("macro '", macro.name, "' got multiple values for argument '", parameter.name, "'");
      }
      value = args.positional[i];
    } else if (named != args.named.end()) {
      value = named->second;
    } else if (parameter.otherwise) {
      DT_ASSIGN_OR_RETURN(value, Evaluate(*parameter.otherwise));
    }
    SetVariable(parameter.id, std::move(value));
  }
  if (args.positional.size() > macro.parameters.size() && !macro.uses_varargs) {
    return InvalidArgument("macro '", macro.name, "' takes not more than ", macro.parameters.size(), " argument(s)");
  }
  if (macro.uses_varargs) {
    DT_ASSIGN_OR_RETURN(List * varargs, runtime_.NewList(0, /*is_tuple=*/true));
    for (size_t i = macro.parameters.size(); i < args.positional.size(); ++i) {
      DT_RETURN_IF_ERROR(runtime_.Push(*varargs, args.positional[i]));
    }
    SetVariable(ast_.varargs_id, Value(varargs));
  }
  DT_ASSIGN_OR_RETURN(Dict * kwargs, runtime_.NewDict());
  for (size_t i = 0; i < args.named.size(); ++i) {
    if (used[i]) continue;
    if (!macro.uses_kwargs) {
      return InvalidArgument("macro '", macro.name, "' takes no keyword argument '", args.named[i].first, "'");
    }
    DT_RETURN_IF_ERROR(runtime_.Insert(*kwargs, Value::String(args.named[i].first), args.named[i].second));
  }
  if (macro.uses_kwargs) SetVariable(ast_.kwargs_id, Value(kwargs));
  if (caller && !macro.uses_caller)
    return InvalidArgument("macro '", macro.name, "' was called with a block but uses no caller");
  if (macro.uses_caller) {
    SetVariable(ast_.caller_id, caller ? *caller : Value(Undefined{&ast_.names[static_cast<size_t>(ast_.caller_id)]}));
  }
  return absl::OkStatus();
}

absl::StatusOr<Value> Interpreter::CallMacro(const Callable& callable, Args args, const Value* caller) {
  const MacroDefinition& macro = *callable.macro;
  if (macros_ >= runtime_.limits().macro_depth) {
    return ResourceExhausted("macro '", macro.name, "': macros call one another deeper than ",
                             runtime_.limits().macro_depth, " levels");
  }
  ++macros_;
  Text text;
  Text* outer_out = std::exchange(out_, &text);
  Scope* outer = scope_;
  PushScope(callable.closure);
  absl::Status status = BindParameters(macro, args, caller);
  if (status.ok()) status = Execute(macro.body).status();
  PopScope(outer);
  out_ = outer_out;
  --macros_;
  DT_RETURN_IF_ERROR(status);
  return runtime_.NewString(std::move(text));
}

}  // namespace dovetail::model::jinja
