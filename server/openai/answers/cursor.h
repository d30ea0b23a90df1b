#pragma once
#include <cstddef>
#include <string>
#include <string_view>

namespace dovetail::server {

enum class Found {
  kYes,
  kNo,
  kMore,  // the text ends before it is decided
};

// Reads the beginning of a text that may go on. Once something is not there, or not decided, the rest of the calls do
// nothing. What is decided of a text is decided the same of every longer one.
// Threads: thread-compatible.
class Cursor {
 public:
  // `last`: nothing follows the text, so that everything is decided. The text outlives the cursor.
  Cursor(std::string_view text, bool last) : text_(text), last_(last) {}

  Found found() const { return found_; }
  bool ok() const { return found_ == Found::kYes; }
  size_t at() const { return at_; }
  size_t committed() const { return committed_; }
  void Commit() {  // what was read so far is taken, whatever follows
    if (ok()) committed_ = at_;
  }
  void Refuse() {
    if (ok()) found_ = Found::kNo;
  }
  void Wait() {  // more text decides
    if (ok()) Lacks();
  }

  void Spaces();
  void Literal(std::string_view text);
  bool Try(std::string_view text);          // reads it if it is there
  bool Sees(std::string_view text);         // reads nothing
  std::string Until(std::string_view end);  // reads `end`, too
  std::string Name();                       // of a function: 1 to 64 of A-Z a-z 0-9 _ - .
  std::string JsonString();                 // decoded
  std::string JsonValue();                  // any; its text

 private:
  std::string_view rest() const { return text_.substr(at_); }
  void Lacks() { found_ = last_ ? Found::kNo : Found::kMore; }

  const std::string_view text_;
  const bool last_;
  size_t at_ = 0, committed_ = 0;
  Found found_ = Found::kYes;
};

inline constexpr size_t kMaxFunctionName = 64;
// Whether a function may have this name.
bool IsFunctionName(std::string_view name);

}  // namespace dovetail::server
