#include "model/chat_template/runtime.h"

namespace dovetail::model::jinja {

absl::StatusOr<BoundArgs> BoundArgs::Bind(const char* callee, const Args& args,
                                          std::initializer_list<const char*> names, size_t required) {
  BoundArgs bound;
  bound.callee_ = callee;
  if (args.positional.size() > names.size()) {
    return InvalidArgument(callee, "() takes at most ", names.size(), " arguments, got ", args.positional.size());
  }
  for (size_t i = 0; i < args.positional.size(); ++i) bound.values_[i] = &args.positional[i];
  for (const auto& [name, value] : args.named) {
    size_t i = 0;
    for (const char* known : names) {
      if (name == known) break;
      ++i;
    }
    if (i == names.size()) return InvalidArgument(callee, "() got an unexpected keyword argument '", name, "'");
    if (bound.values_[i]) return InvalidArgument(callee, "() got multiple values for argument '", name, "'");
    bound.values_[i] = &value;
  }
  for (size_t i = 0; i < required; ++i) {
    if (!bound.values_[i]) return InvalidArgument(callee, "() missing the argument '", *(names.begin() + i), "'");
  }
  return bound;
}

absl::StatusOr<int64_t> BoundArgs::Integer(size_t i, int64_t otherwise) const {
  if (!values_[i]) return otherwise;
  if (values_[i]->IsInteger()) return values_[i]->integer();
  if (values_[i]->IsUndefined()) return UndefinedError(*values_[i]);
  return InvalidArgument(callee_, "(): argument ", i + 1, " must be an int, not ", TypeName(*values_[i]));
}

absl::Status Runtime::OutOfSteps() {
  steps_left_ = 0;
  return ResourceExhausted("the template ran for more than its ", steps_,
                           " steps; it loops too long for this conversation");
}

absl::Status Runtime::ChargeString(size_t bytes) {
  if (bytes > string_bytes_max_) {
    return ResourceExhausted("the template built a string of ", bytes, " bytes; at most ", string_bytes_max_,
                             " are allowed for this conversation");
  }
  return ChargeBytes(bytes);
}

absl::Status Runtime::ChargeItems(size_t items) {
  if (items > limits_.list_items) {
    return ResourceExhausted("the template built a list of ", items, " items; at most ", limits_.list_items,
                             " are allowed");
  }
  return Charge(items);
}

absl::StatusOr<Value> Runtime::NewString(Text text) {
  if (text.size() > string_bytes_max_) return ChargeString(text.size());
  DT_RETURN_IF_ERROR(ChargeBytes(text.Cost()));
  return Value(std::make_shared<const Text>(std::move(text)));
}

absl::StatusOr<List*> Runtime::NewList(size_t reserve, bool is_tuple) {
  DT_RETURN_IF_ERROR(Charge());
  if (reserve > limits_.list_items) return ChargeItems(reserve);
  List& list = lists_.emplace_back();
  list.items.reserve(reserve);
  list.is_tuple = is_tuple;
  return &list;
}

absl::StatusOr<Value> Runtime::NewTuple(Value first, Value second) {
  DT_ASSIGN_OR_RETURN(List * tuple, NewList(2, /*is_tuple=*/true));
  tuple->items.push_back(std::move(first));
  tuple->items.push_back(std::move(second));
  return Value(tuple);
}

absl::StatusOr<Dict*> Runtime::NewDict() {
  DT_RETURN_IF_ERROR(Charge());
  return &dicts_.emplace_back();
}

absl::StatusOr<Namespace*> Runtime::NewNamespace() {
  DT_RETURN_IF_ERROR(Charge());
  return &namespaces_.emplace_back();
}

absl::StatusOr<Callable*> Runtime::NewCallable() {
  DT_RETURN_IF_ERROR(Charge());
  return &callables_.emplace_back();
}

absl::StatusOr<LoopState*> Runtime::NewLoop() {
  DT_RETURN_IF_ERROR(Charge());
  return &loops_.emplace_back();
}

absl::Status Runtime::Push(List& list, Value item) {
  if (list.items.size() >= limits_.list_items) return ChargeItems(list.items.size() + 1);
  DT_RETURN_IF_ERROR(Charge());
  list.items.push_back(std::move(item));
  return absl::OkStatus();
}

absl::Status Runtime::Insert(Dict& dict, Value key, Value value) {
  if (key.IsUndefined()) return UndefinedError(key);
  if (!Dict::IsHashable(key)) return InvalidArgument("a ", TypeName(key), " cannot be the key of a dict");
  if (dict.size() >= limits_.list_items) return ChargeItems(dict.size() + 1);
  DT_RETURN_IF_ERROR(ChargeBytes(key.IsString() ? 64 + key.text().size() : 64));
  dict.Set(std::move(key), std::move(value));
  return absl::OkStatus();
}

absl::Status Runtime::SetAttribute(Namespace& space, std::string_view name, Value value) {
  if (space.attributes.size() >= kAttributes && !space.Find(name)) {
    return ResourceExhausted("a namespace has more than ", kAttributes, " attributes");
  }
  DT_RETURN_IF_ERROR(Charge(1 + space.attributes.size() / 16));
  space.Set(name, std::move(value));
  return absl::OkStatus();
}

const std::string* Runtime::Keep(std::string_view name) { return &names_.emplace_back(name); }

absl::Status UndefinedError(const Value& value) {
  const Undefined& undefined = value.undefined();
  if (!undefined.name) return InvalidArgument("the value is undefined");
  if (undefined.unsafe) {
    return InvalidArgument("access to attribute '", *undefined.name, "' of '", undefined.owner, "' object is unsafe");
  }
  if (!undefined.owner) return InvalidArgument("'", *undefined.name, "' is undefined");
  return InvalidArgument("'", undefined.owner, " object' has no attribute '", *undefined.name, "'");
}

absl::Status TypeError(const Value& value, const std::string& what) {
  if (value.IsUndefined()) return UndefinedError(value);
  return InvalidArgument("'", TypeName(value), "' object ", what);
}

}  // namespace dovetail::model::jinja
