#include <algorithm>

#include "model/chat_template/builtins.h"
#include "model/chat_template/format.h"
#include "model/chat_template/operators.h"
#include "model/chat_template/text_ops.h"
#include "model/chat_template/unicode.h"

// Methods of strings, lists, dicts and loops.

namespace dovetail::model::jinja {
namespace {

using Result = absl::StatusOr<Value>;

// The string argument at `i`; null when absent or none. `storage` keeps the view.
absl::StatusOr<const std::string_view*> OptionalView(const BoundArgs& args, size_t i, std::string_view& storage) {
  if (!args[i] || args[i]->IsNone()) return nullptr;
  if (!args[i]->IsString()) return TypeError(*args[i], "cannot be used where a str is needed");
  storage = args[i]->view();
  return &storage;
}

absl::StatusOr<const Text*> NeededText(const BoundArgs& args, size_t i) {
  if (!args[i]->IsString()) return TypeError(*args[i], "cannot be used where a str is needed");
  return &args[i]->text();
}

template <Side side>
Result StripMethod(Runtime& runtime, const Value& self, const Args& args) {
  DT_ASSIGN_OR_RETURN(const auto bound, BoundArgs::Bind("strip", args, {"chars"}));
  std::string_view storage;
  DT_ASSIGN_OR_RETURN(const std::string_view* characters, OptionalView(bound, 0, storage));
  DT_RETURN_IF_ERROR(runtime.Charge(1 + (self.text().size() + 4 * storage.size()) / 16));
  return runtime.NewString(Strip(self.text(), side, characters));
}

template <bool from_right>
Result SplitMethod(Runtime& runtime, const Value& self, const Args& args) {
  DT_ASSIGN_OR_RETURN(const auto bound, BoundArgs::Bind("split", args, {"sep", "maxsplit"}));
  std::string_view storage;
  DT_ASSIGN_OR_RETURN(const std::string_view* separator, OptionalView(bound, 0, storage));
  DT_ASSIGN_OR_RETURN(const int64_t limit, bound.Integer(1, -1));
  DT_RETURN_IF_ERROR(runtime.ChargeBytes(self.text().Cost()));
  auto pieces = from_right ? SplitFromRight(runtime, self.text(), separator, limit)
                           : Split(runtime, self.text(), separator, limit);
  if (!pieces.ok()) return pieces.status();
  return TextList(runtime, *std::move(pieces));
}

Result SplitLinesMethod(Runtime& runtime, const Value& self, const Args& args) {
  DT_ASSIGN_OR_RETURN(const auto bound, BoundArgs::Bind("splitlines", args, {"keepends"}));
  DT_RETURN_IF_ERROR(runtime.ChargeBytes(self.text().Cost()));
  DT_ASSIGN_OR_RETURN(auto lines, SplitLines(runtime, self.text(), bound.Truthy(0, false)));
  return TextList(runtime, std::move(lines));
}

template <bool from_right>
Result PartitionMethod(Runtime& runtime, const Value& self, const Args& args) {
  DT_ASSIGN_OR_RETURN(const auto bound, BoundArgs::Bind("partition", args, {"sep"}, 1));
  DT_ASSIGN_OR_RETURN(const Text* separator, NeededText(bound, 0));
  if (separator->empty()) return InvalidArgument("empty separator");
  DT_RETURN_IF_ERROR(runtime.ChargeBytes((from_right ? 8 : 1) * self.text().Cost()));
  const Text& text = self.text();
  const size_t at =
      from_right ? FindLastBytes(text.view(), separator->view()) : FindBytes(text.view(), separator->view());
  if (at == std::string_view::npos) {
    if (from_right) return TextList(runtime, {Text(), Text(), text}, true);
    return TextList(runtime, {text, Text(), Text()}, true);
  }
  const size_t after = at + separator->size();
  return TextList(runtime, {text.Slice(0, at), text.Slice(at, after), text.Slice(after, text.size())}, true);
}

// startswith and endswith: one string or a tuple of them.
template <bool at_end>
Result AffixMethod(Runtime& runtime, const Value& self, const Args& args) {
  DT_ASSIGN_OR_RETURN(const auto bound, BoundArgs::Bind(at_end ? "endswith" : "startswith", args, {"affix"}, 1));
  const Value& wanted = *bound[0];
  const auto matches = [&](const Value& affix) {
    return affix.IsString() && (at_end ? self.view().ends_with(affix.view()) : self.view().starts_with(affix.view()));
  };
  if (wanted.IsString()) {
    DT_RETURN_IF_ERROR(runtime.ChargeBytes(wanted.text().size()));
    return Value(matches(wanted));
  }
  if (!wanted.IsList() || !wanted.list().is_tuple) return TypeError(wanted, "is not a str or a tuple of str");
  DT_RETURN_IF_ERROR(runtime.Charge(wanted.list().items.size() * (1 + self.text().size() / 64)));
  return Value(std::any_of(wanted.list().items.begin(), wanted.list().items.end(), matches));
}

Result RemovePrefixMethod(Runtime& runtime, const Value& self, const Args& args) {
  DT_ASSIGN_OR_RETURN(const auto bound, BoundArgs::Bind("removeprefix", args, {"prefix"}, 1));
  DT_ASSIGN_OR_RETURN(const Text* prefix, NeededText(bound, 0));
  if (!self.view().starts_with(prefix->view())) return self;
  return runtime.NewString(self.text().Slice(prefix->size(), self.text().size()));
}

Result RemoveSuffixMethod(Runtime& runtime, const Value& self, const Args& args) {
  DT_ASSIGN_OR_RETURN(const auto bound, BoundArgs::Bind("removesuffix", args, {"suffix"}, 1));
  DT_ASSIGN_OR_RETURN(const Text* suffix, NeededText(bound, 0));
  if (!self.view().ends_with(suffix->view())) return self;
  return runtime.NewString(self.text().Slice(0, self.text().size() - suffix->size()));
}

Result ReplaceMethod(Runtime& runtime, const Value& self, const Args& args) {
  DT_ASSIGN_OR_RETURN(const auto bound, BoundArgs::Bind("replace", args, {"old", "new", "count"}, 2));
  DT_ASSIGN_OR_RETURN(const Text* from, NeededText(bound, 0));
  DT_ASSIGN_OR_RETURN(const Text* to, NeededText(bound, 1));
  DT_ASSIGN_OR_RETURN(const int64_t limit, bound.Integer(2, -1));
  DT_RETURN_IF_ERROR(runtime.ChargeBytes(self.text().Cost()));
  DT_ASSIGN_OR_RETURN(Text text, Replace(runtime, self.text(), from->view(), *to, limit));
  return runtime.NewString(std::move(text));
}

template <std::string (*map)(std::string_view)>
Result CaseMethod(Runtime& runtime, const Value& self, const Args& args) {
  DT_RETURN_IF_ERROR(BoundArgs::Bind("upper", args, {}).status());
  DT_RETURN_IF_ERROR(runtime.Charge(self.text().Cost() / 8));
  return runtime.NewString(MapRuns(self.text(), map));
}

template <Text (*map)(const Text&)>
Result TextMethod(Runtime& runtime, const Value& self, const Args& args) {
  DT_RETURN_IF_ERROR(BoundArgs::Bind("title", args, {}).status());
  DT_RETURN_IF_ERROR(runtime.Charge(self.text().Cost() / 4));
  return runtime.NewString(map(self.text()));
}

// find and index, from either side. Positions are code points.
template <bool from_right, bool must_exist>
Result FindMethodOf(Runtime& runtime, const Value& self, const Args& args) {
  DT_ASSIGN_OR_RETURN(const auto bound, BoundArgs::Bind("find", args, {"sub", "start", "end"}, 1));
  DT_ASSIGN_OR_RETURN(const Text* what, NeededText(bound, 0));
  DT_RETURN_IF_ERROR(runtime.ChargeBytes((from_right ? 8 : 3) * self.text().size()));
  const auto length = static_cast<int64_t>(CountCodePoints(self.view()));
  DT_ASSIGN_OR_RETURN(int64_t begin, bound.Integer(1, 0));
  DT_ASSIGN_OR_RETURN(int64_t end, bound.Integer(2, length));
  begin = std::clamp<int64_t>(begin < 0 ? begin + length : begin, 0, length);
  end = std::clamp<int64_t>(end < 0 ? end + length : end, 0, length);
  const size_t from = OffsetOfCodePoint(self.view(), static_cast<size_t>(begin));
  const std::string_view window = self.view().substr(0, OffsetOfCodePoint(self.view(), static_cast<size_t>(end)));
  size_t found = from_right ? FindLastBytes(window, what->view()) : FindBytes(window, what->view(), from);
  if (found != std::string_view::npos && found < from) found = std::string_view::npos;
  if (found != std::string_view::npos) return Value(static_cast<int64_t>(CountCodePoints(window.substr(0, found))));
  if (must_exist) return InvalidArgument("substring not found");
  return Value(int64_t{-1});
}

Result CountMethod(Runtime& runtime, const Value& self, const Args& args) {
  DT_ASSIGN_OR_RETURN(const auto bound, BoundArgs::Bind("count", args, {"sub"}, 1));
  DT_ASSIGN_OR_RETURN(const Text* what, NeededText(bound, 0));
  DT_RETURN_IF_ERROR(runtime.Charge(1 + self.text().size() / 4));
  if (what->empty()) return Value(static_cast<int64_t>(CountCodePoints(self.view())) + 1);
  int64_t count = 0;
  for (size_t at = 0; (at = FindBytes(self.view(), what->view(), at)) != std::string_view::npos; at += what->size())
    ++count;
  return Value(count);
}

Result JoinMethod(Runtime& runtime, const Value& self, const Args& args) {
  DT_ASSIGN_OR_RETURN(const auto bound, BoundArgs::Bind("join", args, {"iterable"}, 1));
  DT_ASSIGN_OR_RETURN(const std::vector<Value> items, Iterate(runtime, *bound[0]));
  return Join(runtime, items, self.text(), /*only_strings=*/true);
}

Result FormatMethod(Runtime& runtime, const Value& self, const Args& args) {
  DT_ASSIGN_OR_RETURN(Text text, FormatBraces(runtime, self.text(), args));
  return runtime.NewString(std::move(text));
}

template <bool left, bool right>
Result PadMethod(Runtime& runtime, const Value& self, const Args& args) {
  DT_ASSIGN_OR_RETURN(const auto bound, BoundArgs::Bind("center", args, {"width", "fillchar"}, 1));
  DT_ASSIGN_OR_RETURN(const int64_t width, bound.Integer(0, 0));
  std::string_view fill = " ";
  DT_RETURN_IF_ERROR(OptionalView(bound, 1, fill).status());
  if (CountCodePoints(fill) != 1) return InvalidArgument("the fill character must be exactly one character long");
  DT_RETURN_IF_ERROR(runtime.ChargeBytes(self.text().Cost()));
  DT_ASSIGN_OR_RETURN(Text text, PadTo(runtime, self.text(), width, fill, left, right));
  return runtime.NewString(std::move(text));
}

Result ZeroFillMethod(Runtime& runtime, const Value& self, const Args& args) {
  DT_ASSIGN_OR_RETURN(const auto bound, BoundArgs::Bind("zfill", args, {"width"}, 1));
  DT_ASSIGN_OR_RETURN(const int64_t width, bound.Integer(0, 0));
  const Text& text = self.text();
  const size_t sign = text.view().starts_with('-') || text.view().starts_with('+') ? 1 : 0;
  DT_ASSIGN_OR_RETURN(const Text digits,
                      PadTo(runtime, text.Slice(sign, text.size()), width - static_cast<int64_t>(sign), "0",
                            /*left=*/true, /*right=*/false));
  Text out = text.Slice(0, sign);
  out.Append(digits);
  return runtime.NewString(std::move(out));
}

// True if the string is not empty and every code point satisfies the predicate.
template <bool (*predicate)(char32_t)>
Result AllMethod(Runtime& runtime, const Value& self, const Args& args) {
  DT_RETURN_IF_ERROR(BoundArgs::Bind("isalpha", args, {}).status());
  DT_RETURN_IF_ERROR(runtime.Charge(self.text().size() / 8));
  for (size_t at = 0; at < self.text().size();) {
    if (!predicate(DecodeAt(self.view(), at))) return Value(false);
  }
  return Value(!self.text().empty());
}

bool IsAlphaOrDigit(char32_t c) { return IsAlpha(c) || IsDigit(c); }

// True if there is a cased letter and none of the other case.
template <bool (*wanted)(char32_t), bool (*other)(char32_t)>
Result CasedMethod(Runtime& runtime, const Value& self, const Args& args) {
  DT_RETURN_IF_ERROR(BoundArgs::Bind("isupper", args, {}).status());
  DT_RETURN_IF_ERROR(runtime.Charge(self.text().size() / 8));
  bool found = false;
  for (size_t at = 0; at < self.text().size();) {
    const char32_t c = DecodeAt(self.view(), at);
    if (other(c)) return Value(false);
    found |= wanted(c);
  }
  return Value(found);
}

Result ListAppend(Runtime& runtime, const Value& self, const Args& args) {
  DT_ASSIGN_OR_RETURN(const auto bound, BoundArgs::Bind("append", args, {"item"}, 1));
  DT_RETURN_IF_ERROR(runtime.Push(self.list(), *bound[0]));
  return Value(None{});
}

Result ListExtend(Runtime& runtime, const Value& self, const Args& args) {
  DT_ASSIGN_OR_RETURN(const auto bound, BoundArgs::Bind("extend", args, {"items"}, 1));
  DT_ASSIGN_OR_RETURN(const std::vector<Value> items, Iterate(runtime, *bound[0]));
  for (const Value& item : items) DT_RETURN_IF_ERROR(runtime.Push(self.list(), item));
  return Value(None{});
}

Result ListInsert(Runtime& runtime, const Value& self, const Args& args) {
  DT_ASSIGN_OR_RETURN(const auto bound, BoundArgs::Bind("insert", args, {"index", "item"}, 2));
  DT_ASSIGN_OR_RETURN(int64_t index, bound.Integer(0, 0));
  auto& items = self.list().items;
  const auto length = static_cast<int64_t>(items.size());
  index = std::clamp<int64_t>(index < 0 ? index + length : index, 0, length);
  const Value item = *bound[1];
  DT_RETURN_IF_ERROR(runtime.Charge(items.size()));
  DT_RETURN_IF_ERROR(runtime.Push(self.list(), item));
  std::rotate(items.begin() + index, items.end() - 1, items.end());
  return Value(None{});
}

Result ListPop(Runtime& runtime, const Value& self, const Args& args) {
  DT_ASSIGN_OR_RETURN(const auto bound, BoundArgs::Bind("pop", args, {"index"}));
  DT_ASSIGN_OR_RETURN(int64_t index, bound.Integer(0, -1));
  auto& items = self.list().items;
  const auto length = static_cast<int64_t>(items.size());
  if (index < 0) index += length;
  if (index < 0 || index >= length)
    return InvalidArgument(length == 0 ? "pop from empty list" : "pop index out of range");
  DT_RETURN_IF_ERROR(runtime.Charge(static_cast<size_t>(length - index)));
  Value item = items[static_cast<size_t>(index)];
  items.erase(items.begin() + index);
  return item;
}

Result ListIndex(Runtime& runtime, const Value& self, const Args& args) {
  DT_ASSIGN_OR_RETURN(const auto bound, BoundArgs::Bind("index", args, {"item"}, 1));
  const auto& items = self.list().items;
  for (size_t i = 0; i < items.size(); ++i) {
    DT_ASSIGN_OR_RETURN(const bool same, Equal(runtime, items[i], *bound[0]));
    if (same) return Value(static_cast<int64_t>(i));
  }
  return InvalidArgument("the value is not in the list");
}

Result ListCount(Runtime& runtime, const Value& self, const Args& args) {
  DT_ASSIGN_OR_RETURN(const auto bound, BoundArgs::Bind("count", args, {"item"}, 1));
  int64_t count = 0;
  for (const Value& item : self.list().items) {
    DT_ASSIGN_OR_RETURN(const bool same, Equal(runtime, item, *bound[0]));
    count += same;
  }
  return Value(count);
}

Result ListCopy(Runtime& runtime, const Value& self, const Args& args) {
  DT_RETURN_IF_ERROR(BoundArgs::Bind("copy", args, {}).status());
  DT_RETURN_IF_ERROR(runtime.ChargeItems(self.list().items.size()));
  DT_ASSIGN_OR_RETURN(List * copy, runtime.NewList(0, self.list().is_tuple));
  copy->items = self.list().items;
  return Value(copy);
}

Result DictGet(Runtime& runtime, const Value& self, const Args& args) {
  DT_ASSIGN_OR_RETURN(const auto bound, BoundArgs::Bind("get", args, {"key", "default"}, 1));
  DT_RETURN_IF_ERROR(runtime.ChargeBytes(bound[0]->IsString() ? bound[0]->text().size() : 0));
  if (const Value* found = self.dict().Find(*bound[0])) return *found;
  return bound[1] ? *bound[1] : Value(None{});
}

enum class Part { kKeys, kValues, kItems };
template <Part part>
Result DictParts(Runtime& runtime, const Value& self, const Args& args) {
  DT_RETURN_IF_ERROR(BoundArgs::Bind("items", args, {}).status());
  DT_RETURN_IF_ERROR(runtime.ChargeItems(self.dict().size()));
  DT_ASSIGN_OR_RETURN(List * out, runtime.NewList(self.dict().size()));
  for (const auto& [key, value] : self.dict().entries()) {
    if (part == Part::kItems) {
      DT_ASSIGN_OR_RETURN(Value pair, runtime.NewTuple(key, value));
      out->items.push_back(std::move(pair));
    } else {
      out->items.push_back(part == Part::kKeys ? key : value);
    }
  }
  return Value(out);
}

Result DictCopy(Runtime& runtime, const Value& self, const Args& args) {
  DT_RETURN_IF_ERROR(BoundArgs::Bind("copy", args, {}).status());
  DT_RETURN_IF_ERROR(runtime.Charge(4 * self.dict().size()));
  DT_ASSIGN_OR_RETURN(Dict * copy, runtime.NewDict());
  *copy = self.dict();
  return Value(copy);
}

Result LoopCycle(Runtime&, const Value& self, const Args& args) {
  if (args.positional.empty()) return InvalidArgument("no items for cycling given");
  return args.positional[self.loop().index0 % args.positional.size()];
}

Result LoopChanged(Runtime& runtime, const Value& self, const Args& args) {
  DT_ASSIGN_OR_RETURN(List * now, runtime.NewList(args.positional.size(), /*is_tuple=*/true));
  now->items = args.positional;
  LoopState& loop = self.loop();
  bool changed = true;
  if (loop.has_last_changed) {
    DT_ASSIGN_OR_RETURN(const bool same, Equal(runtime, loop.last_changed, Value(now)));
    changed = !same;
  }
  loop.has_last_changed = true;
  loop.last_changed = Value(now);
  return Value(changed);
}

struct Entry {
  std::string_view name;
  Filter method;
};

constexpr Entry kStringMethods[] = {
    {"split", SplitMethod<false>},
    {"rsplit", SplitMethod<true>},
    {"splitlines", SplitLinesMethod},
    {"strip", StripMethod<Side::kBoth>},
    {"lstrip", StripMethod<Side::kLeft>},
    {"rstrip", StripMethod<Side::kRight>},
    {"startswith", AffixMethod<false>},
    {"endswith", AffixMethod<true>},
    {"removeprefix", RemovePrefixMethod},
    {"removesuffix", RemoveSuffixMethod},
    {"replace", ReplaceMethod},
    {"upper", CaseMethod<ToUpper>},
    {"lower", CaseMethod<ToLower>},
    {"casefold", CaseMethod<ToLower>},
    {"title", TextMethod<Title>},
    {"capitalize", TextMethod<Capitalize>},
    {"find", FindMethodOf<false, false>},
    {"rfind", FindMethodOf<true, false>},
    {"index", FindMethodOf<false, true>},
    {"rindex", FindMethodOf<true, true>},
    {"count", CountMethod},
    {"join", JoinMethod},
    {"format", FormatMethod},
    {"partition", PartitionMethod<false>},
    {"rpartition", PartitionMethod<true>},
    {"center", PadMethod<true, true>},
    {"ljust", PadMethod<false, true>},
    {"rjust", PadMethod<true, false>},
    {"zfill", ZeroFillMethod},
    {"isalpha", AllMethod<IsAlpha>},
    {"isdigit", AllMethod<IsDigit>},
    {"isdecimal", AllMethod<IsDigit>},
    {"isnumeric", AllMethod<IsDigit>},
    {"isalnum", AllMethod<IsAlphaOrDigit>},
    {"isspace", AllMethod<IsSpace>},
    {"isupper", CasedMethod<IsUpper, IsLower>},
    {"islower", CasedMethod<IsLower, IsUpper>},
};

constexpr Entry kListMethods[] = {{"pop", ListPop}, {"copy", ListCopy}};
constexpr Entry kSequenceMethods[] = {{"index", ListIndex}, {"count", ListCount}};
constexpr Entry kListMutators[] = {{"append", ListAppend}, {"extend", ListExtend}, {"insert", ListInsert}};
constexpr Entry kDictMethods[] = {{"get", DictGet},
                                  {"items", DictParts<Part::kItems>},
                                  {"keys", DictParts<Part::kKeys>},
                                  {"values", DictParts<Part::kValues>},
                                  {"copy", DictCopy}};
constexpr Entry kLoopMethods[] = {{"cycle", LoopCycle}, {"changed", LoopChanged}};

template <size_t n>
Filter Lookup(const Entry (&table)[n], std::string_view name) {
  for (const Entry& entry : table) {
    if (entry.name == name) return entry.method;
  }
  return nullptr;
}

}  // namespace

Filter FindStringMethod(std::string_view name) { return Lookup(kStringMethods, name); }
Filter FindDictMethod(std::string_view name) { return Lookup(kDictMethods, name); }
Filter FindLoopMethod(std::string_view name) { return Lookup(kLoopMethods, name); }

Filter FindListMethod(std::string_view name, bool is_tuple, const TemplateLimits& limits) {
  if (Filter method = Lookup(kSequenceMethods, name)) return method;
  if (is_tuple) return nullptr;
  if (Filter method = Lookup(kListMethods, name)) return method;
  return limits.allow_list_mutation ? Lookup(kListMutators, name) : nullptr;
}

bool IsUnsafeMethod(const Value& object, std::string_view name) {
  static constexpr std::string_view kDict[] = {"clear", "pop", "popitem", "setdefault", "update"};
  static constexpr std::string_view kList[] = {"append", "reverse", "insert", "sort", "extend", "remove", "clear"};
  const auto in = [&](const auto& table) {
    return std::find(std::begin(table), std::end(table), name) != std::end(table);
  };
  return (object.IsDict() && in(kDict)) || (object.IsList() && !object.list().is_tuple && in(kList));
}

}  // namespace dovetail::model::jinja
