#pragma once
#include <string_view>

#include "model/chat_template/runtime.h"

// The tables of what a template may call. Nothing outside them is reachable.
// Threads: pure look-ups in immutable tables; what they find has the rule of the Runtime that it is called with.

namespace dovetail::model::jinja {

// Each returns null for an unknown name.
Filter FindFilter(std::string_view name);
Filter FindTextFilter(std::string_view name);  // the part of FindFilter's table about strings
Test FindTest(std::string_view name);
Function FindGlobal(std::string_view name);
Filter FindStringMethod(std::string_view name);
Filter FindListMethod(std::string_view name, bool is_tuple, const TemplateLimits& limits);
Filter FindDictMethod(std::string_view name);
Filter FindLoopMethod(std::string_view name);

// Whether Python has such a method but Jinja's sandbox refuses it.
bool IsUnsafeMethod(const Value& object, std::string_view name);

// A call of raise_exception: the only error whose text is the template's own. IsRaised tells it from the others.
absl::Status RaisedError(std::string_view message);
bool IsRaised(const absl::Status& status);

}  // namespace dovetail::model::jinja
