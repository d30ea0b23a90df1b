#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "model/chat_template/text.h"

// The values of a template. Numbers and strings are immutable; containers are owned by the Heap of one rendering and
// referred to by raw pointers, so that a template which ties containers into a ring leaks nothing.
// Threads: thread-compatible; values of one rendering belong to its thread.

namespace dovetail::model::jinja {

class Dict;
struct List;
struct Namespace;
struct Callable;
struct LoopState;

// Why a value is undefined, for the error that using it raises. The strings outlive the rendering.
struct Undefined {
  const std::string* name = nullptr;
  const char* owner = nullptr;  // type of the object that lacks the attribute; null for a variable
  bool unsafe = false;          // the attribute exists in Jinja but its sandbox refuses it
};
struct None {};

enum class Kind { kUndefined, kNone, kBool, kInt, kDouble, kString, kList, kDict, kNamespace, kCallable, kLoop };

class Value {
 public:
  Value() = default;  // undefined
  Value(Undefined undefined) : data_(undefined) {}
  Value(None none) : data_(none) {}
  Value(bool value) : data_(value) {}
  Value(int64_t value) : data_(value) {}
  Value(double value) : data_(value) {}
  Value(std::shared_ptr<const Text> text) : data_(std::move(text)) {}
  Value(List* list) : data_(list) {}
  Value(Dict* dict) : data_(dict) {}
  Value(Namespace* space) : data_(space) {}
  Value(Callable* callable) : data_(callable) {}
  Value(LoopState* loop) : data_(loop) {}
  Value(const char*) = delete;  // would become bool

  // A string outside any budget: literals of a parsed template, constants.
  static Value String(std::string bytes, bool is_input = false) {
    return Value(std::make_shared<const Text>(std::move(bytes), is_input));
  }

  Kind kind() const { return static_cast<Kind>(data_.index()); }
  bool IsUndefined() const { return kind() == Kind::kUndefined; }
  bool IsNone() const { return kind() == Kind::kNone; }
  bool IsString() const { return kind() == Kind::kString; }
  bool IsList() const { return kind() == Kind::kList; }
  bool IsDict() const { return kind() == Kind::kDict; }
  bool IsInteger() const { return kind() == Kind::kInt || kind() == Kind::kBool; }  // bool is an int, as in Python
  bool IsNumber() const { return IsInteger() || kind() == Kind::kDouble; }

  // Each requires the kind it names.
  const Undefined& undefined() const { return std::get<Undefined>(data_); }
  bool boolean() const { return std::get<bool>(data_); }
  int64_t integer() const { return kind() == Kind::kBool ? int64_t{boolean()} : std::get<int64_t>(data_); }
  double number() const { return kind() == Kind::kDouble ? std::get<double>(data_) : static_cast<double>(integer()); }
  const Text& text() const { return *std::get<std::shared_ptr<const Text>>(data_); }
  std::string_view view() const { return text().view(); }
  List& list() const { return *std::get<List*>(data_); }
  Dict& dict() const { return *std::get<Dict*>(data_); }
  Namespace& space() const { return *std::get<Namespace*>(data_); }
  Callable& callable() const { return *std::get<Callable*>(data_); }
  LoopState& loop() const { return *std::get<LoopState*>(data_); }

  bool Truthy() const;

 private:
  std::variant<Undefined, None, bool, int64_t, double, std::shared_ptr<const Text>, List*, Dict*, Namespace*, Callable*,
               LoopState*>
      data_;
};

struct List {
  std::vector<Value> items;
  bool is_tuple = false;
};

// Keys in insertion order. A key is a string, a number, a bool or none; 1, 1.0 and true are the same key, as in Python.
class Dict {
 public:
  using Entry = std::pair<Value, Value>;

  static bool IsHashable(const Value& key) { return key.IsString() || key.IsNumber() || key.IsNone(); }

  const std::vector<Entry>& entries() const { return entries_; }
  size_t size() const { return entries_.size(); }
  const Value* Find(std::string_view key) const;
  const Value* Find(const Value& key) const;
  void Set(Value key, Value value);  // requires IsHashable(key)

 private:
  static std::string Encode(const Value& key);
  const Value* FindEncoded(const std::string& key) const;

  std::vector<Entry> entries_;
  absl::flat_hash_map<std::string, size_t> index_;  // empty until the dict outgrows a scan
};

struct Namespace {
  std::vector<std::pair<std::string, Value>> attributes;
  const Value* Find(std::string_view name) const;
  void Set(std::string_view name, Value value);
};

// The `loop` variable of a for statement.
struct LoopState {
  size_t index0 = 0;
  size_t length = 0;
  Value previous, next;
  bool has_last_changed = false;
  Value last_changed;  // arguments of the last loop.changed(...)
};

// Python's name of the type, as its error messages spell it.
const char* TypeName(const Value& value);

}  // namespace dovetail::model::jinja
