#pragma once
#include <memory>
#include <string>

#include "server/openai/answers/answer_parser.h"
#include "server/openai/answers/call_syntax.h"

namespace dovetail::server {

// Content with calls in it, by one format's syntax.
//
// Once a call has begun, its arguments are what the format says they are, even if they turn out to be no JSON: clients
// were told of the call. A head that does not become a call is content.
// Threads: thread-compatible.
class MarkedCalls : public AnswerParser {
 public:
  explicit MarkedCalls(std::unique_ptr<CallSyntax> syntax);
  void Push(std::string_view text, AnswerPieces& out) override;
  void Finish(AnswerPieces& out) override;

 private:
  enum class State { kBare, kContent, kMarked, kNext, kArguments, kTail };

  void Run(bool last, AnswerPieces& out);
  // False: they need more text.
  bool Content(bool last, AnswerPieces& out);
  bool Head(bool last, AnswerPieces& out);
  bool Arguments(bool last, AnswerPieces& out);
  bool Tail(bool last);
  void Begin(const CallHead& head, size_t read, AnswerPieces& out);
  void Drop(size_t bytes) { held_.erase(0, bytes); }

  const std::unique_ptr<CallSyntax> syntax_;
  const std::vector<std::string> markers_;
  State state_;
  std::string held_;
  size_t marker_ = 0, marker_end_ = 0;  // which one stands before the head, and where in held_ it ends
  bool called_ = false;
  std::unique_ptr<ArgumentReader> arguments_;
};

}  // namespace dovetail::server
