#include "model/chat_template/operators.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "model/chat_template/builtins.h"
#include "model/chat_template/format.h"
#include "model/chat_template/text_ops.h"
#include "model/chat_template/unicode.h"

namespace dovetail::model::jinja {
namespace {

const char* Symbol(BinaryOp op) {
  static constexpr const char* kSymbols[] = {"+", "-", "*", "/", "//", "%", "**"};
  return kSymbols[static_cast<int>(op)];
}

absl::Status Overflow() { return InvalidArgument("integer overflow: the template's integers have 64 bits"); }
absl::Status DivisionByZero() { return InvalidArgument("division by zero"); }

absl::StatusOr<Value> PowerOfIntegers(int64_t base, int64_t exponent) {
  if (exponent < 0) {
    if (base == 0) return DivisionByZero();
    return Value(std::pow(static_cast<double>(base), static_cast<double>(exponent)));
  }
  if (base == 0 || base == 1 || exponent == 0) return Value(int64_t{exponent == 0 || base == 1});
  if (base == -1) return Value(int64_t{exponent % 2 == 0 ? 1 : -1});
  int64_t out = 1;
  for (; exponent > 0; --exponent) {  // overflows after at most 63 rounds
    if (__builtin_mul_overflow(out, base, &out)) return Overflow();
  }
  return Value(out);
}

absl::StatusOr<Value> ApplyIntegers(BinaryOp op, int64_t a, int64_t b) {
  int64_t out = 0;
  switch (op) {
    case BinaryOp::kAdd:
      if (__builtin_add_overflow(a, b, &out)) return Overflow();
      return Value(out);
    case BinaryOp::kSubtract:
      if (__builtin_sub_overflow(a, b, &out)) return Overflow();
      return Value(out);
    case BinaryOp::kMultiply:
      if (__builtin_mul_overflow(a, b, &out)) return Overflow();
      return Value(out);
    case BinaryOp::kDivide:
      if (b == 0) return DivisionByZero();
      return Value(static_cast<double>(a) / static_cast<double>(b));
    case BinaryOp::kFloorDivide:
    case BinaryOp::kModulo: {
      if (b == 0) return DivisionByZero();
      if (b == -1) {
        if (op == BinaryOp::kModulo) return Value(int64_t{0});
        if (a == std::numeric_limits<int64_t>::min()) return Overflow();
      }
      const bool rounds_up = a % b != 0 && (a < 0) != (b < 0);
      return op == BinaryOp::kModulo ? Value(a % b + (rounds_up ? b : 0)) : Value(a / b - rounds_up);
    }
    case BinaryOp::kPower: return PowerOfIntegers(a, b);
  }
  return Overflow();
}

absl::StatusOr<Value> ApplyDoubles(BinaryOp op, double a, double b) {
  switch (op) {
    case BinaryOp::kAdd: return Value(a + b);
    case BinaryOp::kSubtract: return Value(a - b);
    case BinaryOp::kMultiply: return Value(a * b);
    case BinaryOp::kDivide:
      if (b == 0) return DivisionByZero();
      return Value(a / b);
    case BinaryOp::kFloorDivide:
      if (b == 0) return DivisionByZero();
      return Value(std::floor(a / b));
    case BinaryOp::kModulo: {
      if (b == 0) return DivisionByZero();
      const double rest = std::fmod(a, b);
      return Value(rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest);
    }
    case BinaryOp::kPower: return Value(std::pow(a, b));
  }
  return DivisionByZero();
}

absl::StatusOr<Value> RepeatString(Runtime& runtime, const Text& text, int64_t times) {
  const size_t count = times > 0 ? static_cast<size_t>(times) : 0;
  if (!text.empty() && count > runtime.string_bytes_max() / text.size()) {
    return runtime.ChargeString(runtime.string_bytes_max() + 1);
  }
  DT_RETURN_IF_ERROR(runtime.ChargeBytes(count * text.Cost()));
  Text out;
  if (!text.empty()) {
    for (size_t i = 0; i < count; ++i) out.Append(text);
  }
  return runtime.NewString(std::move(out));
}

absl::StatusOr<Value> RepeatList(Runtime& runtime, const List& list, int64_t times) {
  const size_t count = times > 0 && !list.items.empty() ? static_cast<size_t>(times) : 0;
  if (count > runtime.limits().list_items) return runtime.ChargeItems(count);
  DT_RETURN_IF_ERROR(runtime.ChargeItems(count * list.items.size()));
  DT_ASSIGN_OR_RETURN(List * out, runtime.NewList(count * list.items.size(), list.is_tuple));
  for (size_t i = 0; i < count; ++i) out->items.insert(out->items.end(), list.items.begin(), list.items.end());
  return Value(out);
}

absl::StatusOr<Value> AddStrings(Runtime& runtime, const Text& left, const Text& right) {
  DT_RETURN_IF_ERROR(runtime.ChargeString(left.size() + right.size()));
  if (left.is_markup() != right.is_markup()) return AddStrings(runtime, EscapeHtml(left), EscapeHtml(right));
  Text out = left;
  out.Append(right);
  return runtime.NewString(std::move(out));
}

absl::StatusOr<Value> AddLists(Runtime& runtime, const List& left, const List& right) {
  DT_RETURN_IF_ERROR(runtime.ChargeItems(left.items.size() + right.items.size()));
  DT_ASSIGN_OR_RETURN(List * out, runtime.NewList(left.items.size() + right.items.size(), left.is_tuple));
  out->items = left.items;
  out->items.insert(out->items.end(), right.items.begin(), right.items.end());
  return Value(out);
}

}  // namespace

absl::StatusOr<Value> Apply(Runtime& runtime, BinaryOp op, const Value& left, const Value& right) {
  if (left.IsUndefined()) return UndefinedError(left);
  if (op == BinaryOp::kModulo && left.IsString()) {
    DT_ASSIGN_OR_RETURN(Text text, FormatPercent(runtime, left.text(), right));
    return runtime.NewString(std::move(text));
  }
  if (right.IsUndefined()) return UndefinedError(right);
  if (left.IsInteger() && right.IsInteger()) return ApplyIntegers(op, left.integer(), right.integer());
  if (left.IsNumber() && right.IsNumber()) return ApplyDoubles(op, left.number(), right.number());
  if (op == BinaryOp::kAdd && left.IsString() && right.IsString())
    return AddStrings(runtime, left.text(), right.text());
  if (op == BinaryOp::kAdd && left.IsList() && right.IsList() && left.list().is_tuple == right.list().is_tuple) {
    return AddLists(runtime, left.list(), right.list());
  }
  if (op == BinaryOp::kMultiply && (left.IsInteger() || right.IsInteger())) {
    const Value& sequence = left.IsInteger() ? right : left;
    const int64_t times = left.IsInteger() ? left.integer() : right.integer();
    if (sequence.IsString()) return RepeatString(runtime, sequence.text(), times);
    if (sequence.IsList()) return RepeatList(runtime, sequence.list(), times);
  }
  if (op == BinaryOp::kAdd && left.IsString()) {
    return InvalidArgument("can only concatenate str (not \"", TypeName(right), "\") to str");
  }
  return InvalidArgument("unsupported operand type(s) for ", Symbol(op), ": '", TypeName(left), "' and '",
                         TypeName(right), "'");
}

absl::StatusOr<Value> Negate(const Value& value) {
  if (value.IsInteger()) {
    if (value.integer() == std::numeric_limits<int64_t>::min()) return Overflow();
    return Value(-value.integer());
  }
  if (value.IsNumber()) return Value(-value.number());
  if (value.IsUndefined()) return UndefinedError(value);
  return InvalidArgument("bad operand type for unary -: '", TypeName(value), "'");
}

absl::StatusOr<bool> Equal(Runtime& runtime, const Value& left, const Value& right, int depth) {
  if (depth > runtime.limits().value_depth) return ResourceExhausted("compared values are nested too deeply");
  DT_RETURN_IF_ERROR(runtime.Charge());
  if (left.IsInteger() && right.IsInteger()) return left.integer() == right.integer();
  if (left.IsNumber() && right.IsNumber()) return left.number() == right.number();
  if (left.kind() != right.kind()) return false;
  switch (left.kind()) {
    case Kind::kString:
      if (left.text().size() != right.text().size()) return false;
      DT_RETURN_IF_ERROR(runtime.ChargeBytes(left.text().size()));
      return left.view() == right.view();
    case Kind::kList: {
      const List &a = left.list(), &b = right.list();
      if (a.is_tuple != b.is_tuple || a.items.size() != b.items.size()) return false;
      for (size_t i = 0; i < a.items.size(); ++i) {
        DT_ASSIGN_OR_RETURN(const bool same, Equal(runtime, a.items[i], b.items[i], depth + 1));
        if (!same) return false;
      }
      return true;
    }
    case Kind::kDict: {
      if (left.dict().size() != right.dict().size()) return false;
      for (const auto& [key, value] : left.dict().entries()) {
        DT_RETURN_IF_ERROR(runtime.ChargeBytes(key.IsString() ? key.text().size() : 0));
        const Value* other = right.dict().Find(key);
        if (!other) return false;
        DT_ASSIGN_OR_RETURN(const bool same, Equal(runtime, value, *other, depth + 1));
        if (!same) return false;
      }
      return true;
    }
    case Kind::kNamespace: return &left.space() == &right.space();
    case Kind::kCallable: return &left.callable() == &right.callable();
    case Kind::kLoop: return &left.loop() == &right.loop();
    default: return true;  // undefined, none
  }
}

absl::StatusOr<bool> Less(Runtime& runtime, const Value& left, const Value& right, int depth) {
  if (depth > runtime.limits().value_depth) return ResourceExhausted("compared values are nested too deeply");
  DT_RETURN_IF_ERROR(runtime.Charge());
  if (left.IsUndefined()) return UndefinedError(left);
  if (right.IsUndefined()) return UndefinedError(right);
  if (left.IsInteger() && right.IsInteger()) return left.integer() < right.integer();
  if (left.IsNumber() && right.IsNumber()) return left.number() < right.number();
  if (left.IsString() && right.IsString()) {
    DT_RETURN_IF_ERROR(runtime.ChargeBytes(std::min(left.text().size(), right.text().size())));
    return left.view() < right.view();  // the order of UTF-8 bytes is that of code points
  }
  if (left.IsList() && right.IsList() && left.list().is_tuple == right.list().is_tuple) {
    const auto &a = left.list().items, &b = right.list().items;
    for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
      DT_ASSIGN_OR_RETURN(const bool same, Equal(runtime, a[i], b[i], depth + 1));
      if (!same) return Less(runtime, a[i], b[i], depth + 1);
    }
    return a.size() < b.size();
  }
  return InvalidArgument("'<' not supported between instances of '", TypeName(left), "' and '", TypeName(right), "'");
}

absl::StatusOr<bool> Contains(Runtime& runtime, const Value& container, const Value& item) {
  switch (container.kind()) {
    case Kind::kUndefined: return false;
    case Kind::kString:
      if (!item.IsString()) {
        if (item.IsUndefined()) return UndefinedError(item);
        return InvalidArgument("'in <string>' requires string as left operand, not ", TypeName(item));
      }
      DT_RETURN_IF_ERROR(runtime.ChargeBytes(container.text().size()));
      return FindBytes(container.view(), item.view(), 0) != std::string_view::npos;
    case Kind::kList:
      for (const Value& element : container.list().items) {
        DT_ASSIGN_OR_RETURN(const bool same, Equal(runtime, element, item));
        if (same) return true;
      }
      return false;
    case Kind::kDict:
      DT_RETURN_IF_ERROR(runtime.ChargeBytes(item.IsString() ? item.text().size() : 0));
      return container.dict().Find(item) != nullptr;
    default: return InvalidArgument("argument of type '", TypeName(container), "' is not iterable");
  }
}

absl::StatusOr<bool> ApplyCompare(Runtime& runtime, CompareOp op, const Value& left, const Value& right) {
  absl::StatusOr<bool> result = false;
  bool negate = false;
  switch (op) {
    case CompareOp::kNotEqual: negate = true; [[fallthrough]];
    case CompareOp::kEqual: result = Equal(runtime, left, right); break;
    case CompareOp::kGreaterEqual: negate = true; [[fallthrough]];
    case CompareOp::kLess: result = Less(runtime, left, right); break;
    case CompareOp::kLessEqual: negate = true; [[fallthrough]];
    case CompareOp::kGreater: result = Less(runtime, right, left); break;
    case CompareOp::kNotIn: negate = true; [[fallthrough]];
    case CompareOp::kIn: result = Contains(runtime, right, left); break;
  }
  if (!result.ok()) return result;
  return *result != negate;
}

}  // namespace dovetail::model::jinja
