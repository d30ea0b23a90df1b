#pragma once
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "model/tokenizer/detokenizer.h"
#include "model/tokenizer/stop_strings.h"
#include "requests/generation.h"
#include "server/openai/json.h"
#include "server/openai/response_spec.h"
#include "server/openai/served_model.h"

namespace dovetail::server {

// A shown token with its log probabilities; `text_offset` is where its text begins, in code points of the choice's
// text.
struct ShownLogprob {
  proto::PositionLogprobs position;
  size_t text_offset = 0;
};

// One choice: engine tokens in, shown text out. Ends itself when a stop string completes in its content, or where its
// one call ends that may not be followed by another; what the engine still sends then is dropped.
// Threads: thread-compatible; a value.
class Choice {
 public:
  Choice(const ServedModel& model, const ResponseSpec& spec, size_t echoed_code_points);

  struct Delta {
    std::string text;     // where the answer is not taken apart
    AnswerPieces pieces;  // where it is (ResponseSpec::answer)
    std::vector<TokenId> tokens;
    std::vector<ShownLogprob> logprobs;
    int counted = 0;              // tokens that usage counts
    bool finished = false;        // by this update
    bool stop_in_engine = false;  // a stop string: the engine does not know yet
  };
  Delta Add(const requests::GenerationUpdate& update);

  bool finished() const { return finished_; }
  const std::string& finish_reason() const { return finish_reason_; }  // "stop", "length" or "tool_calls"
  const Json& stop_reason() const { return stop_reason_; }             // the stop string, the stop token id, or null
  int completion_tokens() const { return completion_tokens_; }
  int reasoning_tokens() const { return reasoning_tokens_; }
  double cumulative_logprob() const { return cumulative_logprob_; }

 private:
  void AddToken(const requests::GenerationUpdate& update, size_t i, Delta& delta);
  void Finish(const requests::GenerationUpdate& update, Delta& delta);
  bool ended_here() const { return (matcher_ && matcher_->match()) || last_call_ended_; }
  std::string Watch(std::string text);
  void Take(std::string_view text, Delta& delta);
  void Flush(Delta& delta);
  void TakeApart(const AnswerPieces& pieces, Delta& delta);

  const ResponseSpec& spec_;
  const size_t echoed_;
  std::optional<model::IncrementalDetokenizer> detokenizer_;
  std::optional<model::StopMatcher> matcher_;
  std::unique_ptr<AnswerParser> parser_;  // null: the text is shown as it stands
  bool called_ = false, last_call_ended_ = false;
  int completion_tokens_ = 0, reasoning_tokens_ = 0;
  double cumulative_logprob_ = 0;
  bool finished_ = false;
  std::string finish_reason_;
  Json stop_reason_;
};

}  // namespace dovetail::server
