#include "model/chat_template/value.h"

#include <cmath>

#include "absl/strings/str_cat.h"

namespace dovetail::model::jinja {
namespace {
constexpr size_t kScanEntries = 8;
}  // namespace

bool Value::Truthy() const {
  switch (kind()) {
    case Kind::kUndefined:
    case Kind::kNone: return false;
    case Kind::kBool: return boolean();
    case Kind::kInt: return integer() != 0;
    case Kind::kDouble: return number() != 0;
    case Kind::kString: return !text().empty();
    case Kind::kList: return !list().items.empty();
    case Kind::kDict: return dict().size() != 0;
    case Kind::kNamespace:
    case Kind::kCallable:
    case Kind::kLoop: return true;
  }
  return false;
}

std::string Dict::Encode(const Value& key) {
  if (key.IsString()) return absl::StrCat("s", std::string(key.view()));
  if (key.IsInteger()) return absl::StrCat("i", key.integer());
  if (key.IsNone()) return "n";
  const double number = key.number();
  if (std::abs(number) < 1e15 && number == std::floor(number)) return absl::StrCat("i", static_cast<int64_t>(number));
  char bytes[sizeof number];
  __builtin_memcpy(bytes, &number, sizeof number);
  return "d" + std::string(bytes, sizeof bytes);
}

const Value* Dict::FindEncoded(const std::string& key) const {
  if (!index_.empty()) {
    const auto found = index_.find(key);
    return found == index_.end() ? nullptr : &entries_[found->second].second;
  }
  for (const auto& [name, value] : entries_) {
    if (Encode(name) == key) return &value;
  }
  return nullptr;
}

const Value* Dict::Find(std::string_view key) const {
  if (!index_.empty()) return FindEncoded("s" + std::string(key));
  for (const auto& [name, value] : entries_) {
    if (name.IsString() && name.view() == key) return &value;
  }
  return nullptr;
}

const Value* Dict::Find(const Value& key) const {
  if (key.IsString()) return Find(key.view());
  return IsHashable(key) ? FindEncoded(Encode(key)) : nullptr;
}

void Dict::Set(Value key, Value value) {
  if (const Value* found = Find(key)) {
    *const_cast<Value*>(found) = std::move(value);
    return;
  }
  entries_.emplace_back(std::move(key), std::move(value));
  if (!index_.empty()) {
    index_.emplace(Encode(entries_.back().first), entries_.size() - 1);
  } else if (entries_.size() > kScanEntries) {
    for (size_t i = 0; i < entries_.size(); ++i) index_.emplace(Encode(entries_[i].first), i);
  }
}

const Value* Namespace::Find(std::string_view name) const {
  for (const auto& [key, value] : attributes) {
    if (key == name) return &value;
  }
  return nullptr;
}

void Namespace::Set(std::string_view name, Value value) {
  for (auto& [key, old] : attributes) {
    if (key == name) {
      old = std::move(value);
      return;
    }
  }
  attributes.emplace_back(name, std::move(value));
}

const char* TypeName(const Value& value) {
  switch (value.kind()) {
    case Kind::kUndefined: return "Undefined";
    case Kind::kNone: return "NoneType";
    case Kind::kBool: return "bool";
    case Kind::kInt: return "int";
    case Kind::kDouble: return "float";
    case Kind::kString: return "str";
    case Kind::kList: return value.list().is_tuple ? "tuple" : "list";
    case Kind::kDict: return "dict";
    case Kind::kNamespace: return "Namespace";
    case Kind::kCallable: return "function";
    case Kind::kLoop: return "LoopContext";
  }
  return "?";
}

}  // namespace dovetail::model::jinja
