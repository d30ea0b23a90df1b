#pragma once
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "model/chat_template/ast.h"
#include "model/chat_template/runtime.h"

namespace dovetail::model::jinja {

// Variables of one block. Name lookup goes outwards through `parent`.
struct Scope {
  Scope* parent = nullptr;
  std::vector<std::pair<NameId, Value>> variables;
  bool captured = false;  // a macro refers to it, so it must outlive its block
};

// Evaluates one template once. `ast` and `runtime` outlive it.
// Threads: thread-compatible; one thread and one rendering.
class Interpreter {
 public:
  Interpreter(const Ast& ast, Runtime& runtime);

  void SetGlobal(NameId id, Value value);
  // The rendered text, or the error. Afterwards line() is where it happened.
  absl::StatusOr<Text> Run();
  int line() const { return line_; }

 private:
  enum class Flow { kNormal, kBreak, kContinue };
  class Frame;  // counts one level of recursion while alive

  // Statements (interpreter.cc).
  absl::StatusOr<Flow> Execute(const Block& block);
  absl::StatusOr<Flow> Execute(const Stmt& stmt);
  absl::StatusOr<Flow> Visit(const TextOut& node);
  absl::StatusOr<Flow> Visit(const Output& node);
  absl::StatusOr<Flow> Visit(const If& node);
  absl::StatusOr<Flow> Visit(const For& node);
  absl::StatusOr<Flow> Visit(const Set& node);
  absl::StatusOr<Flow> Visit(const SetBlock& node);
  absl::StatusOr<Flow> Visit(const Macro& node);
  absl::StatusOr<Flow> Visit(const CallBlock& node);
  absl::StatusOr<Flow> Visit(const FilterBlock& node);
  absl::StatusOr<Flow> Visit(const With& node);
  absl::StatusOr<Flow> Visit(const Break&) { return Flow::kBreak; }
  absl::StatusOr<Flow> Visit(const Continue&) { return Flow::kContinue; }
  absl::StatusOr<std::vector<Value>> LoopItems(const For& node);
  // Renders a block in its own scope into a text of its own.
  absl::StatusOr<Text> Capture(const Block& block);
  absl::Status Print(const Value& value);
  absl::Status CheckOutput() const;
  absl::Status Assign(const Target& target, Value value);
  absl::StatusOr<Callable*> MakeMacro(const MacroDefinition& definition);
  absl::StatusOr<Value> CallMacro(const Callable& callable, Args args, const Value* caller);
  absl::Status BindParameters(const MacroDefinition& macro, Args& args, const Value* caller);

  // Expressions (evaluate.cc).
  absl::StatusOr<Value> Evaluate(const Expr& expr);
  absl::StatusOr<Value> Visit(const Literal& node, int line) {
    (void)line;
    return node.value;
  }
  absl::StatusOr<Value> Visit(const NameRef& node, int line);
  absl::StatusOr<Value> Visit(const ListLiteral& node, int line);
  absl::StatusOr<Value> Visit(const DictLiteral& node, int line);
  absl::StatusOr<Value> Visit(const Unary& node, int line);
  absl::StatusOr<Value> Visit(const Chain& node, int line);
  absl::StatusOr<Value> Visit(const Concat& node, int line);
  absl::StatusOr<Value> Visit(const Logic& node, int line);
  absl::StatusOr<Value> Visit(const Compare& node, int line);
  absl::StatusOr<Value> Visit(const Conditional& node, int line);
  absl::StatusOr<Value> Visit(const Attribute& node, int line);
  absl::StatusOr<Value> Visit(const Subscript& node, int line);
  absl::StatusOr<Value> Visit(const Slice& node, int line);
  absl::StatusOr<Value> Visit(const Call& node, int line) { return EvaluateCall(node, line, nullptr); }
  absl::StatusOr<Value> Visit(const FilterCall& node, int line);
  absl::StatusOr<Value> Visit(const TestCall& node, int line);
  absl::StatusOr<Value> EvaluateCall(const Call& node, int line, const Value* caller);
  absl::StatusOr<Args> EvaluateArguments(const CallArguments& arguments);
  absl::StatusOr<Value> ApplyFilter(const FilterCall& node, int line, const Value& input);
  // Runs a block's text through a chain of filters whose innermost input is that text.
  absl::StatusOr<Value> FilterText(const Expr& filter, Value text);

  Value* FindVariable(NameId id);
  void SetVariable(NameId id, Value value);
  Scope* PushScope(Scope* parent);
  void PopScope(Scope* outer);
  absl::Status EnterFrame() const;

  const Ast& ast_;
  Runtime& runtime_;
  std::deque<Scope> scopes_;
  std::vector<Scope*> free_scopes_;
  Scope* globals_ = nullptr;
  Scope* scope_ = nullptr;
  Text* out_ = nullptr;
  const Value* block_text_ = nullptr;  // input of the innermost filter of a filter block
  int line_ = 1;
  int frames_ = 0;
  int macros_ = 0;
};

class Interpreter::Frame {
 public:
  explicit Frame(Interpreter& interpreter) : interpreter_(interpreter) { ++interpreter_.frames_; }
  ~Frame() { --interpreter_.frames_; }

 private:
  Interpreter& interpreter_;
};

}  // namespace dovetail::model::jinja
