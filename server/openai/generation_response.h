#pragma once
#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "requests/generation.h"
#include "server/openai/choice.h"
#include "server/openai/logprobs_json.h"
#include "server/openai/response_spec.h"
#include "server/openai/served_model.h"
#include "server/openai/shaped_answer.h"
#include "server/openai/usage_totals.h"

namespace dovetail::server {

// The answer to one generation request as it grows: engine updates in, SSE frames or one JSON body out. A state machine
// without I/O.
//
// Choice c of prompt p has the index p * n + c. Frames follow the OpenAI API: in chat first the role, last a
// finish_reason without content; the same id everywhere; usage null until an extra chunk at the end when asked for;
// "data: [DONE]" after a success only. After a failure the last frame is {"error": ...}. Other APIs' frames and bodies
// are those of a ShapedAnswer, and the body of vectors is that of embeddings.h.
// Threads: thread-compatible.
class GenerationResponse {
 public:
  GenerationResponse(std::shared_ptr<const ServedModel> model, ResponseSpec spec);
  GenerationResponse(const GenerationResponse&) = delete;  // choices refer to the spec
  GenerationResponse& operator=(const GenerationResponse&) = delete;

  struct StopChoice {
    int prompt = 0;
    int choice = 0;
  };
  struct Effects {
    std::string frames;             // to send now (stream)
    int tokens = 0;                 // that usage counts, of this update
    std::vector<StopChoice> stops;  // to tell the engine
    bool done = false;              // everything is known: frames are complete, or Body() is
  };
  // Of the engine request for prompt `prompt`. Updates after the end change nothing.
  Effects OnUpdate(int prompt, const requests::GenerationUpdate& update);

  // Ends the response from outside (drain). The frame to send when streaming.
  std::string Fail(absl::Status why);

  bool done() const { return done_; }
  const absl::Status& failure() const { return failure_; }  // not OK: the response is this error
  std::string Body() const;                                 // requires done(), failure().ok(), not streaming

  UsageTotals usage() const;
  const ResponseSpec& spec() const { return spec_; }
  std::string FinishReason(int prompt, int choice) const {
    return prompts_[prompt].choices[choice].state.finish_reason();
  }

 private:
  struct HeldCall {
    std::string id, name, arguments;
  };
  struct ChoiceOutput {  // what Body() shows, and whether a stream's choice began
    explicit ChoiceOutput(Choice choice) : state(std::move(choice)) {}
    Choice state;
    bool began = false;
    int calls = 0;  // that began
    std::string text, reasoning;
    std::vector<HeldCall> held_calls;
    std::vector<TokenId> tokens;
    std::vector<ShownLogprob> logprobs;
  };
  struct Prompt {
    std::vector<ChoiceOutput> choices;
    std::vector<proto::PositionLogprobs> logprobs;
    std::vector<float> pooled;
    std::string echo_text;
    int prompt_tokens = 0;
    int cached_tokens = 0;
  };

  int Index(int prompt, int choice) const { return prompt * spec_.n + choice; }
  void Hold(int prompt, int choice, Choice::Delta delta);
  void Stream(int prompt, int choice, Choice::Delta delta, Effects& effects);
  void StreamChat(int prompt, int choice, const Choice::Delta& delta, Effects& effects);
  // The deltas of a chat's chunks.
  std::vector<Json> ChatDeltas(int prompt, int choice, const Choice::Delta& delta);
  std::string IdOf(const AnswerPiece& piece, int prompt, int choice);
  void TellProgress(int prompt, const requests::GenerationUpdate& update, Effects& effects);
  void BeginChoice(int prompt, int choice, Choice::Delta& delta, Effects& effects);
  void AppendChunk(Json choice, std::string& frames, const Json* extra = nullptr) const;
  void AppendFrame(const Json& json, std::string& frames) const;
  Json ChunkHead() const;
  std::vector<std::vector<float>> Vectors() const;
  Json UsageJson() const;
  static Json MessageJson(const ChoiceOutput& output);
  Json ChoiceJson(int prompt, const ChoiceOutput& output, int index) const;
  Json LogprobsOrNull(std::span<const ShownLogprob> shown) const;
  std::vector<ShownLogprob> EchoedLogprobs(int prompt) const;
  std::vector<const ChoiceOutput*> Shown(const Prompt& prompt) const;
  static bool EndsInFailure(const Prompt& prompt, const requests::GenerationUpdate& update);
  static bool Finished(const Prompt& prompt);
  void CheckDone(Effects& effects);

  const std::shared_ptr<const ServedModel> model_;
  const ResponseSpec spec_;
  const LogprobsJson logprobs_json_;
  const std::unique_ptr<ShapedAnswer> shaped_;  // null: the answer has the shape of OpenAI's completions
  std::vector<Prompt> prompts_;
  const absl::Time begun_;
  bool done_ = false;
  absl::Status failure_;
};

}  // namespace dovetail::server
