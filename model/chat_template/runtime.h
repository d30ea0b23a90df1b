#pragma once
#include <deque>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "absl/time/time.h"
#include "base/status.h"
#include "model/chat_template/limits.h"
#include "model/chat_template/value.h"

// What the interpreter and its built-ins share during one rendering: the step budget, the heap and the limits.

namespace dovetail::model::jinja {

struct MacroDefinition;
struct Scope;
struct Args;
class Runtime;

using Filter = absl::StatusOr<Value> (*)(Runtime& runtime, const Value& self, const Args& args);
using Test = absl::StatusOr<bool> (*)(Runtime& runtime, const Value& self, const Args& args);
using Function = absl::StatusOr<Value> (*)(Runtime& runtime, const Args& args);

// Something a template can call. Exactly one of macro, method and function is set.
struct Callable {
  std::string name;
  const MacroDefinition* macro = nullptr;
  Scope* closure = nullptr;  // where the macro was defined
  Filter method = nullptr;   // called with `self`
  Value self;
  Function function = nullptr;
};

// Arguments of a call, evaluated.
struct Args {
  std::vector<Value> positional;
  std::vector<std::pair<std::string, Value>> named;
};

// Arguments assigned to parameter names, Python's way. `names` must have at most kMax entries.
// Threads: thread-compatible.
class BoundArgs {
 public:
  static constexpr size_t kMax = 6;
  // kInvalidArgument for an unknown or repeated name, too many arguments, or fewer than `required`.
  static absl::StatusOr<BoundArgs> Bind(const char* callee, const Args& args, std::initializer_list<const char*> names,
                                        size_t required = 0);
  // Null when not given.
  const Value* operator[](size_t i) const { return values_[i]; }
  bool Truthy(size_t i, bool otherwise) const { return values_[i] ? values_[i]->Truthy() : otherwise; }
  absl::StatusOr<int64_t> Integer(size_t i, int64_t otherwise) const;

 private:
  const char* callee_ = "";
  const Value* values_[kMax] = {};
};

// Owned by one Render call. Every method that makes something charges for it first and fails with kResourceExhausted
// when the template's budget or a size limit is spent.
// Threads: thread-compatible.
class Runtime {
 public:
  static constexpr size_t kAttributes = 256;

  Runtime(const TemplateLimits& limits, size_t steps, size_t string_bytes_max, absl::Time now, absl::TimeZone zone)
      : limits_(limits),
        steps_(steps),
        steps_left_(steps),
        string_bytes_max_(string_bytes_max),
        now_(now),
        zone_(zone) {}
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  const TemplateLimits& limits() const { return limits_; }
  size_t string_bytes_max() const { return string_bytes_max_; }
  size_t steps_used() const { return steps_ - steps_left_; }
  absl::Time now() const { return now_; }
  absl::TimeZone zone() const { return zone_; }

  absl::Status Charge(size_t steps = 1) {
    if (steps > steps_left_) return OutOfSteps();
    steps_left_ -= steps;
    return absl::OkStatus();
  }
  absl::Status ChargeBytes(size_t bytes) { return Charge(1 + bytes / 64); }
  // Charges for building a string of `bytes`, and refuses one that is too long. Call it before building.
  absl::Status ChargeString(size_t bytes);
  absl::Status ChargeItems(size_t items);

  absl::StatusOr<Value> NewString(Text text);
  absl::StatusOr<Value> NewString(std::string bytes, bool is_input) {
    return NewString(Text(std::move(bytes), is_input));
  }
  absl::StatusOr<List*> NewList(size_t reserve = 0, bool is_tuple = false);
  absl::StatusOr<Value> NewTuple(Value first, Value second);
  absl::StatusOr<Dict*> NewDict();
  absl::StatusOr<Namespace*> NewNamespace();
  absl::StatusOr<Callable*> NewCallable();
  absl::StatusOr<LoopState*> NewLoop();
  absl::Status Push(List& list, Value item);
  absl::Status Insert(Dict& dict, Value key, Value value);  // kInvalidArgument for a key that cannot be one
  absl::Status SetAttribute(Namespace& space, std::string_view name, Value value);  // at most kAttributes of them
  // A name that lives as long as this object.
  const std::string* Keep(std::string_view name);

 private:
  absl::Status OutOfSteps();

  const TemplateLimits& limits_;
  const size_t steps_;
  size_t steps_left_;
  const size_t string_bytes_max_;
  const absl::Time now_;
  const absl::TimeZone zone_;
  std::deque<List> lists_;
  std::deque<Dict> dicts_;
  std::deque<Namespace> namespaces_;
  std::deque<Callable> callables_;
  std::deque<LoopState> loops_;
  std::deque<std::string> names_;
};

// The error of using an undefined value: "'x' is undefined" or "'dict object' has no attribute 'x'".
absl::Status UndefinedError(const Value& value);
// UndefinedError for an undefined value, else "<type> object <what>".
absl::Status TypeError(const Value& value, const std::string& what);

}  // namespace dovetail::model::jinja
