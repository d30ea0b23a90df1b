#pragma once
#include <cstddef>
#include <string_view>

namespace dovetail::server {

// Where a JSON value ends that comes in pieces. It looks at strings and brackets alone: what is no JSON ends somewhere,
// too, or nowhere.
// Threads: thread-compatible.
class JsonExtent {
 public:
  // How many bytes of `text` belong to the value; all of them, unless it is done.
  size_t Read(std::string_view text) {
    size_t i = 0;
    while (i < text.size() && !done_)
      if (Step(text[i])) ++i;
    return i;
  }
  bool done() const { return done_; }
  bool is_word() const { return state_ == State::kWord; }  // a number, true, false, null: ended by what follows it

 private:
  enum class State { kBegin, kWord, kNested, kString, kEscape };

  // False: the byte is not the value's.
  bool Step(char c) {
    switch (state_) {
      case State::kString:
        if (c == '\\') state_ = State::kEscape;
        if (c == '"') {
          state_ = State::kNested;
          done_ = depth_ == 0;
        }
        return true;
      case State::kEscape: state_ = State::kString; return true;
      case State::kWord:
        done_ = c == ',' || c == '}' || c == ']' || c == ' ' || c == '\n' || c == '\r' || c == '\t' || c == ':';
        return !done_;
      default: break;
    }
    if (c == '"') {
      state_ = State::kString;
    } else if (c == '{' || c == '[') {
      state_ = State::kNested;
      ++depth_;
    } else if (state_ == State::kNested) {
      if (c == '}' || c == ']') done_ = --depth_ == 0;
    } else if (c == '}' || c == ']' || c == ',' || c == ':') {
      done_ = true;  // no value begins so
      return false;
    } else {
      state_ = State::kWord;
    }
    return true;
  }

  State state_ = State::kBegin;
  size_t depth_ = 0;
  bool done_ = false;
};

}  // namespace dovetail::server
