#include <cmath>

#include "absl/time/time.h"
#include "model/chat_template/builtins.h"
#include "model/chat_template/operators.h"
#include "model/chat_template/python_repr.h"
#include "model/chat_template/unicode.h"

// What follows `is`, and the functions every template can call.

namespace dovetail::model::jinja {
namespace {

using TestResult = absl::StatusOr<bool>;
using Result = absl::StatusOr<Value>;

template <bool (*predicate)(const Value&)>
TestResult KindTest(Runtime&, const Value& self, const Args& args) {
  DT_RETURN_IF_ERROR(BoundArgs::Bind("test", args, {}).status());
  return predicate(self);
}

bool IsDefined(const Value& v) { return !v.IsUndefined(); }
bool IsUndefinedValue(const Value& v) { return v.IsUndefined(); }
bool IsNoneValue(const Value& v) { return v.IsNone(); }
bool IsBoolean(const Value& v) { return v.kind() == Kind::kBool; }
bool IsTrue(const Value& v) { return v.kind() == Kind::kBool && v.boolean(); }
bool IsFalse(const Value& v) { return v.kind() == Kind::kBool && !v.boolean(); }
bool IsIntegerValue(const Value& v) { return v.kind() == Kind::kInt; }
bool IsFloat(const Value& v) { return v.kind() == Kind::kDouble; }
bool IsNumberValue(const Value& v) { return v.IsNumber(); }
bool IsStringValue(const Value& v) { return v.IsString(); }
bool IsMapping(const Value& v) { return v.IsDict(); }
bool IsSequence(const Value& v) { return v.IsString() || v.IsList() || v.IsDict() || v.IsUndefined(); }
bool IsIterable(const Value& v) { return IsSequence(v); }
bool IsCallable(const Value& v) {
  return v.kind() == Kind::kCallable || v.IsUndefined();
}  // undefined too, as in Jinja

TestResult DivisibleBy(Runtime& runtime, const Value& self, const Args& args) {
  DT_ASSIGN_OR_RETURN(const auto bound, BoundArgs::Bind("divisibleby", args, {"num"}, 1));
  DT_ASSIGN_OR_RETURN(const Value rest, Apply(runtime, BinaryOp::kModulo, self, *bound[0]));
  return rest.IsNumber() && rest.number() == 0;
}

template <int wanted>
TestResult Parity(Runtime& runtime, const Value& self, const Args&) {
  DT_ASSIGN_OR_RETURN(const Value rest, Apply(runtime, BinaryOp::kModulo, self, Value(int64_t{2})));
  return rest.IsNumber() && rest.number() == wanted;
}

template <CompareOp op>
TestResult CompareTest(Runtime& runtime, const Value& self, const Args& args) {
  DT_ASSIGN_OR_RETURN(const auto bound, BoundArgs::Bind("test", args, {"other"}, 1));
  return ApplyCompare(runtime, op, self, *bound[0]);
}

TestResult SameAs(Runtime& runtime, const Value& self, const Args& args) {
  DT_ASSIGN_OR_RETURN(const auto bound, BoundArgs::Bind("sameas", args, {"other"}, 1));
  if (self.kind() != bound[0]->kind()) return false;
  if (self.IsList()) return &self.list() == &bound[0]->list();
  if (self.IsDict()) return &self.dict() == &bound[0]->dict();
  return Equal(runtime, self, *bound[0]);
}

template <bool (*wanted)(char32_t), bool (*other)(char32_t)>
TestResult CaseTest(Runtime& runtime, const Value& self, const Args&) {
  DT_ASSIGN_OR_RETURN(const Text text, ToText(runtime, self));
  DT_RETURN_IF_ERROR(runtime.Charge(text.size() / 8));
  bool found = false;
  for (size_t at = 0; at < text.size();) {
    const char32_t c = DecodeAt(text.view(), at);
    if (other(c)) return false;
    found |= wanted(c);
  }
  return found;
}

TestResult FilterExists(Runtime&, const Value& self, const Args&) { return self.IsString() && FindFilter(self.view()); }
TestResult TestExists(Runtime&, const Value& self, const Args&) { return self.IsString() && FindTest(self.view()); }

struct TestEntry {
  std::string_view name;
  Test test;
};

constexpr TestEntry kTests[] = {
    {"defined", KindTest<IsDefined>},
    {"undefined", KindTest<IsUndefinedValue>},
    {"none", KindTest<IsNoneValue>},
    {"boolean", KindTest<IsBoolean>},
    {"true", KindTest<IsTrue>},
    {"false", KindTest<IsFalse>},
    {"integer", KindTest<IsIntegerValue>},
    {"float", KindTest<IsFloat>},
    {"number", KindTest<IsNumberValue>},
    {"string", KindTest<IsStringValue>},
    {"mapping", KindTest<IsMapping>},
    {"sequence", KindTest<IsSequence>},
    {"iterable", KindTest<IsIterable>},
    {"callable", KindTest<IsCallable>},
    {"divisibleby", DivisibleBy},
    {"even", Parity<0>},
    {"odd", Parity<1>},
    {"eq", CompareTest<CompareOp::kEqual>},
    {"equalto", CompareTest<CompareOp::kEqual>},
    {"==", CompareTest<CompareOp::kEqual>},
    {"ne", CompareTest<CompareOp::kNotEqual>},
    {"!=", CompareTest<CompareOp::kNotEqual>},
    {"lt", CompareTest<CompareOp::kLess>},
    {"lessthan", CompareTest<CompareOp::kLess>},
    {"<", CompareTest<CompareOp::kLess>},
    {"le", CompareTest<CompareOp::kLessEqual>},
    {"<=", CompareTest<CompareOp::kLessEqual>},
    {"gt", CompareTest<CompareOp::kGreater>},
    {"greaterthan", CompareTest<CompareOp::kGreater>},
    {">", CompareTest<CompareOp::kGreater>},
    {"ge", CompareTest<CompareOp::kGreaterEqual>},
    {">=", CompareTest<CompareOp::kGreaterEqual>},
    {"in", CompareTest<CompareOp::kIn>},
    {"sameas", SameAs},
    {"upper", CaseTest<IsUpper, IsLower>},
    {"lower", CaseTest<IsLower, IsUpper>},
    {"filter", FilterExists},
    {"test", TestExists},
};

Result NamespaceFunction(Runtime& runtime, const Args& args) {
  DT_ASSIGN_OR_RETURN(Namespace * space, runtime.NewNamespace());
  if (args.positional.size() > 1) return InvalidArgument("namespace() takes at most one positional argument");
  if (!args.positional.empty()) {
    if (!args.positional[0].IsDict()) return TypeError(args.positional[0], "cannot initialize a namespace");
    for (const auto& [key, value] : args.positional[0].dict().entries()) {
      if (!key.IsString()) return InvalidArgument("namespace(): attribute names must be strings");
      DT_RETURN_IF_ERROR(runtime.SetAttribute(*space, key.view(), value));
    }
  }
  for (const auto& [name, value] : args.named) DT_RETURN_IF_ERROR(runtime.SetAttribute(*space, name, value));
  return Value(space);
}

Result DictFunction(Runtime& runtime, const Args& args) {
  DT_ASSIGN_OR_RETURN(Dict * dict, runtime.NewDict());
  if (args.positional.size() > 1) return InvalidArgument("dict() takes at most one positional argument");
  if (!args.positional.empty()) {
    const Value& source = args.positional[0];
    if (source.IsDict()) {
      for (const auto& [key, value] : source.dict().entries()) DT_RETURN_IF_ERROR(runtime.Insert(*dict, key, value));
    } else {
      DT_ASSIGN_OR_RETURN(const std::vector<Value> pairs, Iterate(runtime, source));
      for (const Value& pair : pairs) {
        if (!pair.IsList() || pair.list().items.size() != 2) return InvalidArgument("dict(): elements must be pairs");
        DT_RETURN_IF_ERROR(runtime.Insert(*dict, pair.list().items[0], pair.list().items[1]));
      }
    }
  }
  for (const auto& [name, value] : args.named) DT_RETURN_IF_ERROR(runtime.Insert(*dict, Value::String(name), value));
  return Value(dict);
}

Result RangeFunction(Runtime& runtime, const Args& args) {
  DT_ASSIGN_OR_RETURN(const auto bound, BoundArgs::Bind("range", args, {"start", "stop", "step"}, 1));
  DT_ASSIGN_OR_RETURN(const int64_t first, bound.Integer(0, 0));
  DT_ASSIGN_OR_RETURN(const int64_t second, bound.Integer(1, 0));
  DT_ASSIGN_OR_RETURN(const int64_t step, bound.Integer(2, 1));
  if (step == 0) return InvalidArgument("range() arg 3 must not be zero");
  const int64_t begin = bound[1] ? first : 0, end = bound[1] ? second : first;
  const double span = (static_cast<double>(end) - static_cast<double>(begin)) / static_cast<double>(step);
  const double count = std::ceil(std::max(span, 0.0));
  if (count > static_cast<double>(runtime.limits().range_items)) {
    return ResourceExhausted("range() has ", count, " items; at most ", runtime.limits().range_items, " are allowed");
  }
  DT_RETURN_IF_ERROR(runtime.ChargeItems(static_cast<size_t>(count)));
  DT_ASSIGN_OR_RETURN(List * list, runtime.NewList(static_cast<size_t>(count)));
  for (int64_t i = 0; i < static_cast<int64_t>(count); ++i) list->items.push_back(Value(begin + i * step));
  return Value(list);
}

Result RaiseFunction(Runtime& runtime, const Args& args) {
  DT_ASSIGN_OR_RETURN(const auto bound, BoundArgs::Bind("raise_exception", args, {"message"}, 1));
  DT_ASSIGN_OR_RETURN(const Text text, ToText(runtime, *bound[0]));
  return RaisedError(text.view().substr(0, OffsetOfCodePoint(text.view(), 1000)));
}

// Formats `now`. Only plain strftime directives, each at most two characters, so that no width makes the result long.
Result TimeFunction(Runtime& runtime, const Args& args) {
  DT_ASSIGN_OR_RETURN(const auto bound, BoundArgs::Bind("strftime_now", args, {"format"}, 1));
  if (!bound[0]->IsString()) return TypeError(*bound[0], "is not a strftime format");
  const std::string_view format = bound[0]->view();
  if (format.size() > 1000) return ResourceExhausted("strftime_now: the format is longer than 1000 bytes");
  for (size_t at = 0; at < format.size(); ++at) {
    if (format[at] != '%') continue;
    ++at;
    if (at < format.size() && (format[at] == '-' || format[at] == '_')) ++at;
    static constexpr std::string_view kDirectives = "aAbBcCdDeFgGhHIjklmMnpPrRsStTuUVwWxXyYzZ%";
    if (at >= format.size() || kDirectives.find(format[at]) == std::string_view::npos) {
      return InvalidArgument("strftime_now: unsupported directive in '", std::string(format), "'");
    }
  }
  const std::string text = absl::FormatTime(std::string(format), runtime.now(), runtime.zone());
  return runtime.NewString(text, bound[0]->text().HasInput());
}

struct GlobalEntry {
  std::string_view name;
  Function function;
};

constexpr GlobalEntry kGlobals[] = {
    {"namespace", NamespaceFunction},   {"dict", DictFunction},         {"range", RangeFunction},
    {"raise_exception", RaiseFunction}, {"strftime_now", TimeFunction},
};

constexpr char kRaisedPayload[] = "dovetail/raise_exception";

}  // namespace

Test FindTest(std::string_view name) {
  for (const TestEntry& entry : kTests) {
    if (entry.name == name) return entry.test;
  }
  return nullptr;
}

Function FindGlobal(std::string_view name) {
  for (const GlobalEntry& entry : kGlobals) {
    if (entry.name == name) return entry.function;
  }
  return nullptr;
}

absl::Status RaisedError(std::string_view message) {
  absl::Status status = InvalidArgument(std::string(message));
  status.SetPayload(kRaisedPayload, absl::Cord());
  return status;
}

bool IsRaised(const absl::Status& status) { return status.GetPayload(kRaisedPayload).has_value(); }

}  // namespace dovetail::model::jinja
