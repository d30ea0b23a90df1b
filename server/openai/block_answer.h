#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "server/openai/choice.h"
#include "server/openai/response_spec.h"
#include "server/openai/shaped_answer.h"

namespace dovetail::server {

// A part of an answer, as the Responses and the Messages API have them.
struct AnswerBlock {
  enum class Kind { kText, kThought, kCall };
  Kind kind = Kind::kText;
  int index = 0;
  std::string call_id, name;  // of a call
  std::string text;           // so far; of a call: its arguments
  bool cut_off = false;       // the answer's length ended it
};

// An answer as blocks, in the order in which the model wrote them. What its frames and its body look like is said by
// the API's own class. Without I/O.
// Threads: thread-compatible.
class BlockAnswer : public ShapedAnswer {
 public:
  explicit BlockAnswer(const ResponseSpec& spec) : spec_(spec) {}  // which outlives it

  std::string Add(const Choice::Delta& delta) final;
  std::string Finish(const AnswerEnd& end) final;
  std::string Fail(const absl::Status& why) final;

 protected:
  virtual std::string OnBegin() = 0;
  virtual std::string OnBlockBegins(const AnswerBlock& block) = 0;
  virtual std::string OnText(const AnswerBlock& block, std::string_view text) = 0;
  virtual std::string OnBlockEnds(const AnswerBlock& block) = 0;
  virtual std::string OnEnd() = 0;
  virtual std::string OnFailure(const absl::Status& why) = 0;

  const ResponseSpec& spec() const { return spec_; }
  const std::vector<AnswerBlock>& blocks() const { return blocks_; }
  const AnswerEnd& end() const { return end_; }
  bool cut_off() const { return end_.finish_reason == "length"; }
  static std::string Event(std::string_view type, const Json& data);

 private:
  void Open(AnswerBlock::Kind kind, const AnswerPiece& piece, std::string& frames);
  void Grow(AnswerBlock::Kind kind, const AnswerPiece& piece, std::string& frames);
  void Close(std::string& frames);

  const ResponseSpec& spec_;
  bool begun_ = false;
  bool open_ = false;  // the last block may grow
  int calls_ = 0;
  std::vector<AnswerBlock> blocks_;
  AnswerEnd end_;
};

}  // namespace dovetail::server
