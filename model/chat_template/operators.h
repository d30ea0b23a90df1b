#pragma once
#include "model/chat_template/ast.h"
#include "model/chat_template/runtime.h"

// Python's operators over template values.
// Errors: kInvalidArgument with Python's text, kResourceExhausted at a limit.
// Threads: as the Runtime: one thread at a time.

namespace dovetail::model::jinja {

absl::StatusOr<Value> Apply(Runtime& runtime, BinaryOp op, const Value& left, const Value& right);
absl::StatusOr<Value> Negate(const Value& value);

absl::StatusOr<bool> Equal(Runtime& runtime, const Value& left, const Value& right, int depth = 0);
// left < right; kInvalidArgument for types without an order.
absl::StatusOr<bool> Less(Runtime& runtime, const Value& left, const Value& right, int depth = 0);
absl::StatusOr<bool> Contains(Runtime& runtime, const Value& container, const Value& item);
absl::StatusOr<bool> ApplyCompare(Runtime& runtime, CompareOp op, const Value& left, const Value& right);

// object[key], falling back to the attribute, as Jinja does; undefined when there is neither.
absl::StatusOr<Value> GetItem(Runtime& runtime, const Value& object, const Value& key);
// object.name: methods first, then items.
absl::StatusOr<Value> GetAttribute(Runtime& runtime, const Value& object, const std::string& name);
// The built-in method of that name, or null.
Filter FindMethod(Runtime& runtime, const Value& object, std::string_view name);
// object[begin:end:step]; each bound null or a value that may be none.
absl::StatusOr<Value> GetSlice(Runtime& runtime, const Value& object, const Value* begin, const Value* end,
                               const Value* step);

// The elements of anything iterable: a list's items, a dict's keys, a string's characters, nothing for undefined.
absl::StatusOr<std::vector<Value>> Iterate(Runtime& runtime, const Value& value);
// Python's len().
absl::StatusOr<int64_t> Length(const Value& value);

}  // namespace dovetail::model::jinja
