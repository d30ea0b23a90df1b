#include <algorithm>

#include "model/chat_template/builtins.h"
#include "model/chat_template/operators.h"
#include "model/chat_template/unicode.h"

// Reading parts of values: attributes, subscripts, slices, iteration.

namespace dovetail::model::jinja {
namespace {

Value MissingAttribute(const Value& object, const std::string* name) {
  return Value(Undefined{name, TypeName(object), IsUnsafeMethod(object, *name)});
}

absl::StatusOr<Value> LoopAttribute(Runtime& runtime, const Value& object, const std::string& name) {
  const LoopState& loop = object.loop();
  const auto index0 = static_cast<int64_t>(loop.index0), length = static_cast<int64_t>(loop.length);
  if (name == "index") return Value(index0 + 1);
  if (name == "index0") return Value(index0);
  if (name == "first") return Value(index0 == 0);
  if (name == "last") return Value(index0 + 1 == length);
  if (name == "length") return Value(length);
  if (name == "revindex") return Value(length - index0);
  if (name == "revindex0") return Value(length - index0 - 1);
  if (name == "previtem") return loop.previous;
  if (name == "nextitem") return loop.next;
  if (name == "depth") return Value(int64_t{1});  // only recursive loops, which we refuse, have more
  if (name == "depth0") return Value(int64_t{0});
  return MissingAttribute(object, runtime.Keep(name));
}

// Python's slice.indices(): the first index, and how many are taken.
struct Range {
  int64_t begin = 0, step = 1;
  size_t count = 0;
};

absl::StatusOr<int64_t> SliceBound(const Value* bound, int64_t otherwise) {
  if (!bound || bound->IsNone()) return otherwise;
  if (bound->IsInteger()) return bound->integer();
  if (bound->IsUndefined()) return UndefinedError(*bound);
  return InvalidArgument("slice indices must be integers or None, not ", TypeName(*bound));
}

absl::StatusOr<Range> ResolveSlice(int64_t length, const Value* begin, const Value* end, const Value* step) {
  Range range;
  DT_ASSIGN_OR_RETURN(range.step, SliceBound(step, 1));
  if (range.step == 0) return InvalidArgument("slice step cannot be zero");
  range.step = std::clamp<int64_t>(range.step, -length - 1, length + 1);
  const int64_t low = range.step > 0 ? 0 : -1, high = range.step > 0 ? length : length - 1;
  constexpr int64_t kAbsent = INT64_MIN;
  const auto clamp = [&](int64_t i, int64_t otherwise) {
    if (i == kAbsent) return otherwise;
    return std::clamp(i < 0 ? i + length : i, low, high);
  };
  DT_ASSIGN_OR_RETURN(const int64_t first, SliceBound(begin, kAbsent));
  DT_ASSIGN_OR_RETURN(const int64_t last, SliceBound(end, kAbsent));
  range.begin = clamp(first, range.step > 0 ? low : high);
  const int64_t stop = clamp(last, range.step > 0 ? high : low);
  const int64_t span = range.step > 0 ? stop - range.begin : range.begin - stop;
  const int64_t stride = std::abs(range.step);
  range.count = span > 0 ? static_cast<size_t>((span + stride - 1) / stride) : 0;
  return range;
}

absl::StatusOr<Value> SliceString(Runtime& runtime, const Text& text, const Value* begin, const Value* end,
                                  const Value* step) {
  DT_RETURN_IF_ERROR(runtime.ChargeBytes(2 * text.Cost()));
  DT_ASSIGN_OR_RETURN(const Range range,
                      ResolveSlice(static_cast<int64_t>(CountCodePoints(text.view())), begin, end, step));
  if (range.count == 0) return runtime.NewString(Text());
  if (range.step == 1) {
    const size_t from = OffsetOfCodePoint(text.view(), static_cast<size_t>(range.begin));
    const size_t bytes = OffsetOfCodePoint(text.view().substr(from), range.count);
    return runtime.NewString(text.Slice(from, from + bytes));
  }
  DT_RETURN_IF_ERROR(runtime.Charge(text.size() / 8));
  std::vector<size_t> offsets;  // of each code point, and the end
  for (size_t at = 0; at < text.size(); DecodeAt(text.view(), at)) offsets.push_back(at);
  offsets.push_back(text.size());
  Text out;
  for (size_t i = 0; i < range.count; ++i) {
    const auto at = static_cast<size_t>(range.begin + static_cast<int64_t>(i) * range.step);
    out.Append(text.view().substr(offsets[at], offsets[at + 1] - offsets[at]), text.IsInputAt(offsets[at]));
  }
  return runtime.NewString(std::move(out));
}

absl::StatusOr<Value> ItemAt(Runtime& runtime, const Value& object, int64_t index) {
  if (object.IsList()) {
    const auto& items = object.list().items;
    const auto length = static_cast<int64_t>(items.size());
    if (index < 0) index += length;
    if (index >= 0 && index < length) return items[static_cast<size_t>(index)];
    return Value();
  }
  const Text& text = object.text();
  DT_RETURN_IF_ERROR(runtime.ChargeBytes(text.size()));
  const auto length = static_cast<int64_t>(CountCodePoints(text.view()));
  if (index < 0) index += length;
  if (index < 0 || index >= length) return Value();
  const size_t from = OffsetOfCodePoint(text.view(), static_cast<size_t>(index));
  return runtime.NewString(text.Slice(from, from + CodePointBytes(static_cast<unsigned char>(text.view()[from]))));
}

}  // namespace

Filter FindMethod(Runtime& runtime, const Value& object, std::string_view name) {
  switch (object.kind()) {
    case Kind::kString: return FindStringMethod(name);
    case Kind::kList: return FindListMethod(name, object.list().is_tuple, runtime.limits());
    case Kind::kDict: return FindDictMethod(name);
    case Kind::kLoop: return FindLoopMethod(name);
    default: return nullptr;
  }
}

absl::StatusOr<Value> GetAttribute(Runtime& runtime, const Value& object, const std::string& name) {
  if (object.IsUndefined()) return UndefinedError(object);
  if (Filter method = FindMethod(runtime, object, name)) {
    DT_ASSIGN_OR_RETURN(Callable * bound, runtime.NewCallable());
    bound->name = name;
    bound->method = method;
    bound->self = object;
    return Value(bound);
  }
  if (object.kind() == Kind::kLoop) return LoopAttribute(runtime, object, name);
  if (object.kind() == Kind::kCallable && object.callable().macro && name == "name") {
    return runtime.NewString(object.callable().name, /*is_input=*/false);
  }
  const Value* found = nullptr;
  if (object.kind() == Kind::kNamespace) found = object.space().Find(name);
  if (object.IsDict() && !IsUnsafeMethod(object, name)) found = object.dict().Find(name);
  return found ? *found : MissingAttribute(object, &name);
}

absl::StatusOr<Value> GetItem(Runtime& runtime, const Value& object, const Value& key) {
  if (object.IsUndefined()) return UndefinedError(object);
  if (key.IsString()) DT_RETURN_IF_ERROR(runtime.ChargeBytes(key.text().size()));
  if (object.IsDict()) {
    if (const Value* found = object.dict().Find(key)) return *found;
  }
  if ((object.IsList() || object.IsString()) && key.IsInteger()) {
    DT_ASSIGN_OR_RETURN(Value item, ItemAt(runtime, object, key.integer()));
    if (item.IsUndefined()) return MissingAttribute(object, runtime.Keep(std::to_string(key.integer())));
    return item;
  }
  if (key.IsString()) return GetAttribute(runtime, object, *runtime.Keep(key.view()));
  return Value(Undefined{runtime.Keep(TypeName(key)), TypeName(object), false});
}

absl::StatusOr<Value> GetSlice(Runtime& runtime, const Value& object, const Value* begin, const Value* end,
                               const Value* step) {
  if (object.IsString()) return SliceString(runtime, object.text(), begin, end, step);
  if (!object.IsList()) {
    if (object.IsUndefined()) return UndefinedError(object);
    return Value(Undefined{runtime.Keep("slice"), TypeName(object), false});
  }
  const auto& items = object.list().items;
  DT_ASSIGN_OR_RETURN(const Range range, ResolveSlice(static_cast<int64_t>(items.size()), begin, end, step));
  DT_RETURN_IF_ERROR(runtime.ChargeItems(range.count));
  DT_ASSIGN_OR_RETURN(List * out, runtime.NewList(range.count, object.list().is_tuple));
  for (size_t i = 0; i < range.count; ++i) {
    out->items.push_back(items[static_cast<size_t>(range.begin + static_cast<int64_t>(i) * range.step)]);
  }
  return Value(out);
}

absl::StatusOr<std::vector<Value>> Iterate(Runtime& runtime, const Value& value) {
  std::vector<Value> out;
  switch (value.kind()) {
    case Kind::kUndefined: return out;
    case Kind::kList: DT_RETURN_IF_ERROR(runtime.ChargeItems(value.list().items.size())); return value.list().items;
    case Kind::kDict:
      DT_RETURN_IF_ERROR(runtime.ChargeItems(value.dict().size()));
      for (const auto& [key, unused] : value.dict().entries()) out.push_back(key);
      return out;
    case Kind::kString: {
      const Text& text = value.text();
      DT_RETURN_IF_ERROR(runtime.ChargeItems(CountCodePoints(text.view())));
      for (size_t at = 0; at < text.size();) {
        const size_t begin = at;
        DecodeAt(text.view(), at);
        DT_ASSIGN_OR_RETURN(Value character, runtime.NewString(text.Slice(begin, at)));
        out.push_back(std::move(character));
      }
      return out;
    }
    default: return InvalidArgument("'", TypeName(value), "' object is not iterable");
  }
}

absl::StatusOr<int64_t> Length(const Value& value) {
  switch (value.kind()) {
    case Kind::kUndefined: return 0;
    case Kind::kString: return static_cast<int64_t>(CountCodePoints(value.view()));
    case Kind::kList: return static_cast<int64_t>(value.list().items.size());
    case Kind::kDict: return static_cast<int64_t>(value.dict().size());
    default: return InvalidArgument("object of type '", TypeName(value), "' has no len()");
  }
}

}  // namespace dovetail::model::jinja
