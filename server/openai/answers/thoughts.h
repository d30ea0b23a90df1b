#pragma once
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "server/openai/answers/answer_parser.h"

namespace dovetail::server {

// How a family of models marks its thoughts.
// Threads: immutable.
struct ThoughtFormat {
  std::string_view name;
  std::string_view open, close;  // empty: the messages of gpt-oss, which harmony.h reads
};

// Null: there is no such format.
// Threads: pure.
const ThoughtFormat* FindThoughtFormat(std::string_view name);
std::vector<std::string> ThoughtFormatNames();

// The format that a chat template knows.
// Null: none.
const ThoughtFormat* ThoughtFormatOf(std::string_view chat_template);

// A thought at the beginning of an answer, and the answer behind it for `answer` to read (null: all of it is content).
// `begun`: the prompt has opened the thought. White space around a thought is dropped.
// Threads: thread-compatible.
class ThoughtParser : public AnswerParser {
 public:
  ThoughtParser(const ThoughtFormat& format, bool begun, std::unique_ptr<AnswerParser> answer);
  void Push(std::string_view text, AnswerPieces& out) override;
  void Finish(AnswerPieces& out) override;
  bool thinking() const override { return state_ == State::kThought || state_ == State::kOpened; }

 private:
  enum class State { kBegin, kOpened, kThought, kClosed, kAnswer };

  void Run(bool last, AnswerPieces& out);
  // False: they need more text.
  bool Begin(bool last);
  bool Thought(bool last, AnswerPieces& out);
  bool SkipSpaces(State next);
  void Answer(AnswerPieces& out);

  const ThoughtFormat format_;
  const std::unique_ptr<AnswerParser> answer_;
  State state_;
  std::string held_;
};

}  // namespace dovetail::server
