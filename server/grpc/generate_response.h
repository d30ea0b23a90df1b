#pragma once
#include <string>
#include <vector>

#include "proto/control/vllm_engine.pb.h"
#include "server/openai/choice.h"
#include "server/openai/prepare.h"

namespace dovetail::server {

// The updates of one request as messages: chunks while it streams, one `complete` for each choice.
// Threads: thread-compatible; a value.
class GenerateResponseBuilder {
 public:
  GenerateResponseBuilder(const ServedModel& model, ResponseSpec spec);

  struct Step {
    std::vector<vllm::grpc::engine::GenerateResponse> messages;
    std::vector<int> stop_choices;  // a stop string completed: the engine does not know yet
    int tokens = 0;                 // that usage counts
  };
  Step Add(const requests::GenerationUpdate& update);

  bool stopped_at_length() const;  // a choice that has ended did

 private:
  struct Output {
    explicit Output(const ServedModel& model, const ResponseSpec& spec) : choice(model, spec, 0) {}
    Choice choice;
    std::vector<TokenId> tokens;
    vllm::grpc::engine::OutputLogProbs logprobs;
    bool complete = false;
  };

  void FillPromptLogprobs(const requests::GenerationUpdate& update);

  const ResponseSpec spec_;
  std::vector<Output> outputs_;
  vllm::grpc::engine::InputLogProbs prompt_logprobs_;
  bool prompt_logprobs_sent_ = false;
};

}  // namespace dovetail::server
