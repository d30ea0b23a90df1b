#pragma once
#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace dovetail::server {

// A part of a model's answer, as clients see it.
struct AnswerPiece {
  enum class Kind { kContent, kReasoning, kCallBegins, kArguments, kCallEnds };
  Kind kind = Kind::kContent;
  std::string text;  // of content, reasoning or arguments (a piece of JSON); the function's name where a call begins
  std::string id;    // where a call begins: the model's own id of it, if its format has one
};

// Pieces in order, neighbours of one kind joined.
// Threads: thread-compatible; a value.
class AnswerPieces {
 public:
  void Add(AnswerPiece::Kind kind, std::string_view text, std::string id = {}) {
    const bool whole = kind == AnswerPiece::Kind::kCallBegins || kind == AnswerPiece::Kind::kCallEnds;
    if (!whole && text.empty()) return;
    if (!whole && !all_.empty() && all_.back().kind == kind)
      all_.back().text += text;
    else
      all_.push_back({kind, std::string(text), std::move(id)});
  }
  void Content(std::string_view text) { Add(AnswerPiece::Kind::kContent, text); }
  void Reasoning(std::string_view text) { Add(AnswerPiece::Kind::kReasoning, text); }

  const std::vector<AnswerPiece>& all() const { return all_; }

 private:
  std::vector<AnswerPiece> all_;
};

// Takes the text of one answer apart as it comes: thoughts, content and calls of functions. How the text is cut into
// pushes changes nothing in what comes out. What is no valid call is content: no text is lost, except white space
// around calls and thoughts, and the format's own marks. Text that is not decided yet is held back, a few KiB at most.
// Arguments are what the model wrote: JSON where the model keeps to its format.
// Threads: thread-compatible.
class AnswerParser {
 public:
  virtual ~AnswerParser() = default;
  virtual void Push(std::string_view text, AnswerPieces& out) = 0;
  // The end of the answer: what was held back comes out.
  virtual void Finish(AnswerPieces& out) = 0;
  // Whether the text after what was pushed is a thought's, as far as is known.
  virtual bool thinking() const { return false; }
};

inline constexpr size_t kMaxUndecided = 4096;  // bytes that a parser holds back before it decides that they are content

inline bool IsSpace(char c) { return c == ' ' || c == '\n' || c == '\r' || c == '\t'; }

// The length of `text` without the white space at its end.
inline size_t LengthTrimmed(std::string_view text) {
  size_t length = text.size();
  while (length > 0 && IsSpace(text[length - 1])) --length;
  return length;
}

// How many bytes at the end of `text` are a beginning of `marker`, but not all of it.
inline size_t PartialMarker(std::string_view text, std::string_view marker) {
  for (size_t length = std::min(text.size(), marker.size() - 1); length > 0; --length)
    if (text.substr(text.size() - length) == marker.substr(0, length)) return length;
  return 0;
}

}  // namespace dovetail::server
