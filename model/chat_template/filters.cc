#include <algorithm>
#include <cmath>

#include "model/chat_template/builtins.h"
#include "model/chat_template/operators.h"
#include "model/chat_template/python_repr.h"
#include "model/chat_template/text_ops.h"
#include "model/chat_template/unicode.h"

// Filters over sequences, dicts and numbers. Those over strings are in filters_text.cc.

namespace dovetail::model::jinja {
namespace {

using Result = absl::StatusOr<Value>;

Result NewListOf(Runtime& runtime, std::vector<Value> items) {
  DT_RETURN_IF_ERROR(runtime.ChargeItems(items.size()));
  DT_ASSIGN_OR_RETURN(List * list, runtime.NewList());
  list->items = std::move(items);
  return Value(list);
}

// "a.b.0" or an integer, read step by step as Jinja's make_attrgetter does.
Result ReadPath(Runtime& runtime, Value value, const Value& path) {
  if (!path.IsString()) return GetItem(runtime, value, path);
  std::string_view rest = path.view();
  while (true) {
    const size_t dot = std::min(rest.find('.'), rest.size());
    const std::string part(rest.substr(0, dot));
    const bool is_index =
        !part.empty() && part.size() < 10 && part.find_first_not_of("0123456789") == std::string::npos;
    const Value key = is_index ? Value(int64_t{std::stoll(part)}) : Value::String(part);
    DT_ASSIGN_OR_RETURN(value, GetItem(runtime, value, key));
    if (dot == rest.size()) return value;
    rest.remove_prefix(dot + 1);
  }
}

// The attribute of `value` that `path` names, or the value itself without a path.
Result KeyOf(Runtime& runtime, const Value& value, const Value* path) {
  if (!path || path->IsNone()) return value;
  return ReadPath(runtime, value, *path);
}

// Strings compare without case unless asked to.
Result Folded(Runtime& runtime, Value value, bool case_sensitive) {
  if (case_sensitive || !value.IsString()) return value;
  DT_RETURN_IF_ERROR(runtime.Charge(value.text().size() / 8));
  return runtime.NewString(MapRuns(value.text(), ToLower));
}

struct Keyed {
  Value key, value;
};

// Stable merge sort by Less. Written out because a comparison can fail and each costs a step.
absl::Status SortKeyed(Runtime& runtime, std::vector<Keyed>& items, bool reverse) {
  std::vector<Keyed> other(items.size());
  for (size_t width = 1; width < items.size(); width *= 2) {
    for (size_t begin = 0; begin < items.size(); begin += 2 * width) {
      const size_t middle = std::min(begin + width, items.size()), end = std::min(begin + 2 * width, items.size());
      size_t left = begin, right = middle;
      for (size_t out = begin; out < end; ++out) {
        bool take_right = left == middle;
        if (left < middle && right < end) {
          DT_ASSIGN_OR_RETURN(take_right, reverse ? Less(runtime, items[left].key, items[right].key)
                                                  : Less(runtime, items[right].key, items[left].key));
        }
        other[out] = std::move(take_right ? items[right++] : items[left++]);
      }
    }
    items.swap(other);
  }
  return absl::OkStatus();
}

Result SortValues(Runtime& runtime, const std::vector<Value>& values, const Value* path, bool case_sensitive,
                  bool reverse) {
  std::vector<Keyed> keyed;
  for (const Value& value : values) {
    DT_ASSIGN_OR_RETURN(Value key, KeyOf(runtime, value, path));
    DT_ASSIGN_OR_RETURN(key, Folded(runtime, std::move(key), case_sensitive));
    keyed.push_back({std::move(key), value});
  }
  DT_RETURN_IF_ERROR(SortKeyed(runtime, keyed, reverse));
  std::vector<Value> out;
  for (Keyed& item : keyed) out.push_back(std::move(item.value));
  return NewListOf(runtime, std::move(out));
}

Result SortFilter(Runtime& runtime, const Value& self, const Args& args) {
  DT_ASSIGN_OR_RETURN(const auto bound, BoundArgs::Bind("sort", args, {"reverse", "case_sensitive", "attribute"}));
  DT_ASSIGN_OR_RETURN(const std::vector<Value> values, Iterate(runtime, self));
  return SortValues(runtime, values, bound[2], bound.Truthy(1, false), bound.Truthy(0, false));
}

Result ItemsFilter(Runtime& runtime, const Value& self, const Args& args) {
  if (self.IsUndefined()) return NewListOf(runtime, {});
  if (!self.IsDict()) return InvalidArgument("Can only get item pairs from a mapping.");
  return FindDictMethod("items")(runtime, self, args);
}

Result DictSortFilter(Runtime& runtime, const Value& self, const Args& args) {
  DT_ASSIGN_OR_RETURN(const auto bound, BoundArgs::Bind("dictsort", args, {"case_sensitive", "by", "reverse"}));
  if (!self.IsDict()) return TypeError(self, "is not a mapping");
  const bool by_value = bound[1] && bound[1]->IsString() && bound[1]->view() == "value";
  if (bound[1] && !by_value && !(bound[1]->IsString() && bound[1]->view() == "key")) {
    return InvalidArgument("You can only sort by either \"key\" or \"value\"");
  }
  DT_ASSIGN_OR_RETURN(const Value pairs, FindDictMethod("items")(runtime, self, {}));
  const Value part(int64_t{by_value});
  return SortValues(runtime, pairs.list().items, &part, bound.Truthy(0, false), bound.Truthy(2, false));
}

Result LengthFilter(Runtime& runtime, const Value& self, const Args& args) {
  DT_RETURN_IF_ERROR(BoundArgs::Bind("length", args, {}).status());
  if (self.IsString()) DT_RETURN_IF_ERROR(runtime.ChargeBytes(self.text().size()));
  DT_ASSIGN_OR_RETURN(const int64_t length, Length(self));
  return Value(length);
}

Result DefaultFilter(Runtime&, const Value& self, const Args& args) {
  DT_ASSIGN_OR_RETURN(const auto bound, BoundArgs::Bind("default", args, {"default_value", "boolean"}));
  const bool replace = self.IsUndefined() || (bound.Truthy(1, false) && !self.Truthy());
  if (!replace) return self;
  return bound[0] ? *bound[0] : Value::String("");
}

Result ListFilter(Runtime& runtime, const Value& self, const Args& args) {
  DT_RETURN_IF_ERROR(BoundArgs::Bind("list", args, {}).status());
  DT_ASSIGN_OR_RETURN(std::vector<Value> values, Iterate(runtime, self));
  return NewListOf(runtime, std::move(values));
}

template <bool last>
Result EndFilter(Runtime& runtime, const Value& self, const Args& args) {
  DT_RETURN_IF_ERROR(BoundArgs::Bind(last ? "last" : "first", args, {}).status());
  DT_ASSIGN_OR_RETURN(const std::vector<Value> values, Iterate(runtime, self));
  if (values.empty())
    return Value(Undefined{runtime.Keep(last ? "last item of an empty sequence" : "first item of an empty sequence")});
  return last ? values.back() : values.front();
}

Result ReverseFilter(Runtime& runtime, const Value& self, const Args& args) {
  DT_RETURN_IF_ERROR(BoundArgs::Bind("reverse", args, {}).status());
  const Value back(int64_t{-1});
  if (self.IsString()) return GetSlice(runtime, self, nullptr, nullptr, &back);
  DT_ASSIGN_OR_RETURN(std::vector<Value> values, Iterate(runtime, self));
  std::reverse(values.begin(), values.end());
  return NewListOf(runtime, std::move(values));
}

Result JoinFilter(Runtime& runtime, const Value& self, const Args& args) {
  DT_ASSIGN_OR_RETURN(const auto bound, BoundArgs::Bind("join", args, {"d", "attribute"}));
  DT_ASSIGN_OR_RETURN(std::vector<Value> values, Iterate(runtime, self));
  if (bound[1]) {
    for (Value& value : values) {
      DT_ASSIGN_OR_RETURN(value, KeyOf(runtime, value, bound[1]));
    }
  }
  Text separator;
  if (bound[0]) {
    DT_ASSIGN_OR_RETURN(separator, ToText(runtime, *bound[0]));
  }
  return Join(runtime, values, separator, /*only_strings=*/false);
}

Args Tail(const Args& args, size_t from) {
  Args tail{{}, args.named};
  for (size_t i = from; i < args.positional.size(); ++i) tail.positional.push_back(args.positional[i]);
  return tail;
}

// select, reject (by_attribute false) and selectattr, rejectattr.
template <bool by_attribute, bool keep>
Result SelectFilter(Runtime& runtime, const Value& self, const Args& args) {
  constexpr size_t kTestAt = by_attribute ? 1 : 0;
  if (by_attribute && args.positional.empty()) return InvalidArgument("selectattr: missing the attribute");
  Test test = nullptr;
  if (args.positional.size() > kTestAt) {
    const Value& name = args.positional[kTestAt];
    test = name.IsString() ? FindTest(name.view()) : nullptr;
    if (!test)
      return InvalidArgument("No test named '", name.IsString() ? std::string(name.view()) : TypeName(name), "'");
  }
  const Args rest = Tail(args, kTestAt + 1);
  if (!self.Truthy()) return NewListOf(runtime, {});  // Jinja does not even look at what it would iterate
  DT_ASSIGN_OR_RETURN(const std::vector<Value> values, Iterate(runtime, self));
  std::vector<Value> out;
  for (const Value& value : values) {
    DT_ASSIGN_OR_RETURN(const Value subject, KeyOf(runtime, value, by_attribute ? &args.positional[0] : nullptr));
    bool passed = subject.Truthy();
    if (test) {
      DT_ASSIGN_OR_RETURN(passed, test(runtime, subject, rest));
    }
    if (passed == keep) out.push_back(value);
  }
  return NewListOf(runtime, std::move(out));
}

Result MapFilter(Runtime& runtime, const Value& self, const Args& args) {
  if (!self.Truthy()) return NewListOf(runtime, {});
  DT_ASSIGN_OR_RETURN(std::vector<Value> values, Iterate(runtime, self));
  if (args.positional.empty()) {
    DT_ASSIGN_OR_RETURN(const auto bound, BoundArgs::Bind("map", args, {"attribute", "default"}));
    if (!bound[0]) return InvalidArgument("map requires a filter argument");
    for (Value& value : values) {
      DT_ASSIGN_OR_RETURN(value, ReadPath(runtime, value, *bound[0]));
      if (value.IsUndefined() && bound[1]) value = *bound[1];
    }
    return NewListOf(runtime, std::move(values));
  }
  const Value& name = args.positional[0];
  const Filter filter = name.IsString() ? FindFilter(name.view()) : nullptr;
  if (!filter)
    return InvalidArgument("No filter named '", name.IsString() ? std::string(name.view()) : TypeName(name), "'");
  if (filter == &MapFilter) return InvalidArgument("map cannot be mapped over a sequence");
  const Args rest = Tail(args, 1);
  for (Value& value : values) {
    DT_RETURN_IF_ERROR(runtime.Charge());
    DT_ASSIGN_OR_RETURN(value, filter(runtime, value, rest));
  }
  return NewListOf(runtime, std::move(values));
}

Result UniqueFilter(Runtime& runtime, const Value& self, const Args& args) {
  DT_ASSIGN_OR_RETURN(const auto bound, BoundArgs::Bind("unique", args, {"case_sensitive", "attribute"}));
  DT_ASSIGN_OR_RETURN(const std::vector<Value> values, Iterate(runtime, self));
  DT_ASSIGN_OR_RETURN(Dict * seen, runtime.NewDict());
  std::vector<Value> out;
  for (const Value& value : values) {
    DT_ASSIGN_OR_RETURN(Value key, KeyOf(runtime, value, bound[1]));
    DT_ASSIGN_OR_RETURN(key, Folded(runtime, std::move(key), bound.Truthy(0, false)));
    if (seen->Find(key)) continue;
    DT_RETURN_IF_ERROR(runtime.Insert(*seen, std::move(key), Value(true)));
    out.push_back(value);
  }
  return NewListOf(runtime, std::move(out));
}

Result GroupByFilter(Runtime& runtime, const Value& self, const Args& args) {
  DT_ASSIGN_OR_RETURN(const auto bound,
                      BoundArgs::Bind("groupby", args, {"attribute", "default", "case_sensitive"}, 1));
  DT_ASSIGN_OR_RETURN(const Value sorted, SortFilter(runtime, self, Args{{}, {{"attribute", *bound[0]}}}));
  std::vector<Value> groups;
  for (const Value& value : sorted.list().items) {
    DT_ASSIGN_OR_RETURN(Value key, KeyOf(runtime, value, bound[0]));
    if (key.IsUndefined() && bound[1]) key = *bound[1];
    bool same = false;
    if (!groups.empty()) {
      DT_ASSIGN_OR_RETURN(same, Equal(runtime, groups.back().list().items[0], key));
    }
    if (!same) {
      DT_ASSIGN_OR_RETURN(List * members, runtime.NewList());
      DT_ASSIGN_OR_RETURN(Value group, runtime.NewTuple(std::move(key), Value(members)));
      groups.push_back(std::move(group));
    }
    DT_RETURN_IF_ERROR(runtime.Push(groups.back().list().items[1].list(), value));
  }
  return NewListOf(runtime, std::move(groups));
}

Result BatchFilter(Runtime& runtime, const Value& self, const Args& args) {
  DT_ASSIGN_OR_RETURN(const auto bound, BoundArgs::Bind("batch", args, {"linecount", "fill_with"}, 1));
  DT_ASSIGN_OR_RETURN(const int64_t size, bound.Integer(0, 1));
  if (size < 1 || static_cast<size_t>(size) > runtime.limits().list_items)
    return InvalidArgument("batch: bad size ", size);
  DT_ASSIGN_OR_RETURN(const std::vector<Value> values, Iterate(runtime, self));
  std::vector<Value> out;
  for (const Value& value : values) {
    if (out.empty() || static_cast<int64_t>(out.back().list().items.size()) == size) {
      DT_ASSIGN_OR_RETURN(List * row, runtime.NewList());
      out.push_back(Value(row));
    }
    out.back().list().items.push_back(value);
  }
  while (bound[1] && !out.empty() && static_cast<int64_t>(out.back().list().items.size()) < size) {
    DT_RETURN_IF_ERROR(runtime.Push(out.back().list(), *bound[1]));
  }
  return NewListOf(runtime, std::move(out));
}

template <bool want_max>
Result ExtremeFilter(Runtime& runtime, const Value& self, const Args& args) {
  DT_ASSIGN_OR_RETURN(const auto bound,
                      BoundArgs::Bind(want_max ? "max" : "min", args, {"case_sensitive", "attribute"}));
  DT_ASSIGN_OR_RETURN(const std::vector<Value> values, Iterate(runtime, self));
  if (values.empty()) return Value(Undefined{runtime.Keep("extreme of an empty sequence")});
  Value best, best_key;
  for (size_t i = 0; i < values.size(); ++i) {
    DT_ASSIGN_OR_RETURN(Value key, KeyOf(runtime, values[i], bound[1]));
    DT_ASSIGN_OR_RETURN(key, Folded(runtime, std::move(key), bound.Truthy(0, false)));
    bool better = i == 0;
    if (i > 0) {
      DT_ASSIGN_OR_RETURN(better, want_max ? Less(runtime, best_key, key) : Less(runtime, key, best_key));
    }
    if (!better) continue;
    best = values[i];
    best_key = std::move(key);
  }
  return best;
}

Result SumFilter(Runtime& runtime, const Value& self, const Args& args) {
  DT_ASSIGN_OR_RETURN(const auto bound, BoundArgs::Bind("sum", args, {"attribute", "start"}));
  DT_ASSIGN_OR_RETURN(const std::vector<Value> values, Iterate(runtime, self));
  Value total = bound[1] ? *bound[1] : Value(int64_t{0});
  for (const Value& value : values) {
    DT_ASSIGN_OR_RETURN(const Value term, KeyOf(runtime, value, bound[0]));
    DT_ASSIGN_OR_RETURN(total, Apply(runtime, BinaryOp::kAdd, total, term));
  }
  return total;
}

Result IntFilter(Runtime& runtime, const Value& self, const Args& args) {
  DT_ASSIGN_OR_RETURN(const auto bound, BoundArgs::Bind("int", args, {"default", "base"}));
  const Value otherwise = bound[0] ? *bound[0] : Value(int64_t{0});
  DT_ASSIGN_OR_RETURN(const int64_t base, bound.Integer(1, 10));
  if (base != 0 && (base < 2 || base > 36)) return InvalidArgument("int: the base must be 0 or 2 to 36");
  if (self.IsUndefined()) return UndefinedError(self);
  if (self.IsInteger()) return Value(self.integer());
  if (self.IsNumber()) {
    if (!(std::abs(self.number()) < 9.2e18)) return otherwise;
    return Value(static_cast<int64_t>(self.number()));
  }
  if (!self.IsString()) return otherwise;
  DT_RETURN_IF_ERROR(runtime.ChargeBytes(self.text().size()));
  const std::string text(Strip(self.text(), Side::kBoth).view());
  char* end = nullptr;
  errno = 0;
  const int64_t integer = std::strtoll(text.c_str(), &end, static_cast<int>(base));
  if (!text.empty() && *end == '\0' && errno == 0) return Value(integer);
  const double number = std::strtod(text.c_str(), &end);
  if (!text.empty() && *end == '\0' && base == 10 && std::abs(number) < 9.2e18)
    return Value(static_cast<int64_t>(number));
  return otherwise;
}

Result FloatFilter(Runtime& runtime, const Value& self, const Args& args) {
  DT_ASSIGN_OR_RETURN(const auto bound, BoundArgs::Bind("float", args, {"default"}));
  if (self.IsUndefined()) return UndefinedError(self);
  if (self.IsNumber()) return Value(self.number());
  if (self.IsString()) {
    DT_RETURN_IF_ERROR(runtime.ChargeBytes(self.text().size()));
    const std::string text(Strip(self.text(), Side::kBoth).view());
    char* end = nullptr;
    const double number = std::strtod(text.c_str(), &end);
    if (!text.empty() && *end == '\0') return Value(number);
  }
  return bound[0] ? *bound[0] : Value(0.0);
}

Result AbsFilter(Runtime&, const Value& self, const Args& args) {
  DT_RETURN_IF_ERROR(BoundArgs::Bind("abs", args, {}).status());
  if (!self.IsNumber()) return TypeError(self, "has no absolute value");
  if (self.IsInteger()) return self.integer() < 0 ? Negate(self) : Value(self.integer());
  return Value(std::abs(self.number()));
}

Result RoundFilter(Runtime&, const Value& self, const Args& args) {
  DT_ASSIGN_OR_RETURN(const auto bound, BoundArgs::Bind("round", args, {"precision", "method"}));
  DT_ASSIGN_OR_RETURN(const int64_t precision, bound.Integer(0, 0));
  if (!self.IsNumber()) return TypeError(self, "cannot be rounded");
  if (precision < -300 || precision > 300) return InvalidArgument("round: precision ", precision, " is out of range");
  const std::string_view method = bound[1] && bound[1]->IsString() ? bound[1]->view() : "common";
  const double scale = std::pow(10.0, static_cast<double>(precision));
  if (method == "ceil") return Value(std::ceil(self.number() * scale) / scale);
  if (method == "floor") return Value(std::floor(self.number() * scale) / scale);
  if (method != "common") return InvalidArgument("method must be common, ceil or floor");
  if (self.IsInteger() && precision >= 0) return Value(self.integer());
  if (precision <= 0) {
    const double rounded = std::nearbyint(self.number() * scale) / scale;
    return self.IsInteger() && std::abs(rounded) < 9e18 ? Value(static_cast<int64_t>(rounded)) : Value(rounded);
  }
  char digits[400];
  std::snprintf(digits, sizeof digits, "%.*f", static_cast<int>(std::min<int64_t>(precision, 60)), self.number());
  return Value(std::strtod(digits, nullptr));
}

struct Entry {
  std::string_view name;
  Filter filter;
};

constexpr Entry kFilters[] = {
    {"abs", AbsFilter},
    {"batch", BatchFilter},
    {"count", LengthFilter},
    {"d", DefaultFilter},
    {"default", DefaultFilter},
    {"dictsort", DictSortFilter},
    {"first", EndFilter<false>},
    {"float", FloatFilter},
    {"groupby", GroupByFilter},
    {"int", IntFilter},
    {"items", ItemsFilter},
    {"join", JoinFilter},
    {"last", EndFilter<true>},
    {"length", LengthFilter},
    {"list", ListFilter},
    {"map", MapFilter},
    {"max", ExtremeFilter<true>},
    {"min", ExtremeFilter<false>},
    {"reject", SelectFilter<false, false>},
    {"rejectattr", SelectFilter<true, false>},
    {"reverse", ReverseFilter},
    {"round", RoundFilter},
    {"select", SelectFilter<false, true>},
    {"selectattr", SelectFilter<true, true>},
    {"sort", SortFilter},
    {"sum", SumFilter},
    {"unique", UniqueFilter},
};

}  // namespace

Filter FindFilter(std::string_view name) {
  for (const Entry& entry : kFilters) {
    if (entry.name == name) return entry.filter;
  }
  return FindTextFilter(name);
}

}  // namespace dovetail::model::jinja
