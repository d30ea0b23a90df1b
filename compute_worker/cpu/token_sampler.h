#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "base/status.h"
#include "compute_worker/cpu/token_history.h"
#include "grammar/grammar_states.h"
#include "kernels/device.h"
#include "kernels/op_context.h"
#include "kernels/sampling.h"
#include "model/loaded_model.h"
#include "proto/step_plan.h"

namespace dovetail::compute {

// The end of a step: final norm and head for the rows that need logits, then the choice of tokens, log probabilities
// and whatever else the plan asked to see. Rows go through in chunks of kRowsAtOnce, so that a long prompt's logits
// never lie in memory all at once. Other devices say where logits come from and where rows become tokens.
// Threads: reactor-owned.
class TokenSampler {
 public:
  static constexpr int kRowsAtOnce = 64;

  TokenSampler(const model::LoadedModel& model, kernels::Device& device, kernels::Stream& stream,
               int rows_at_once = kRowsAtOnce);
  virtual ~TokenSampler() = default;

  // residual: [rows of the plan, hidden]. Fills result.entries, one per plan entry. An entry that cannot be sampled
  // says so in its own status; an error is one of the whole step.
  absl::Status Run(const proto::StepPlan& plan, const float* residual, proto::StepResult& result);

  // DenseBackend::PendingGrammars.
  std::vector<SequenceId> PendingGrammars(const proto::StepPlan& plan);

 protected:
  // One row of logits and what it is for.
  struct LogitsRow {
    int entry = 0;
    int64_t row = 0;  // of the step
    bool sample = false;
    TokenId scored_token = -1;  // prompt_logprobs: the token that follows
    bool return_logits = false;
    bool failed = false;  // NaN logits
    std::vector<kernels::TokenCount> counts;
    std::vector<kernels::TokenBias> bias;
    std::vector<int32_t> banned;
    std::vector<uint32_t> mask;  // the tokens that a grammar lets follow, a bit each; empty: all
    proto::PositionLogprobs prompt_logprobs;
  };

  // Room for `most` rows.
  virtual absl::Status Reserve(size_t most);
  // Of rows [first, first + count) of rows(), to logits().
  virtual absl::Status ComputeLogits(const proto::StepPlan& plan, const float* residual, size_t first, size_t count,
                                     const proto::StepResult& result);
  // `count` rows of the step from `first` on, after the final norm as it is loaded: with logits_scale in its weights.
  // Returns: [count, hidden] on the host, the caller's to change until the next call
  //   Requires: 1 <= count <= the rows that go through at once
  virtual absl::StatusOr<float*> HiddenStates(const float* residual, int64_t first, int64_t count);
  // Makes tokens and log probabilities of them.
  virtual void HandleRows(const proto::StepPlan& plan, size_t first, size_t count, proto::StepResult& result);

  void CollectRows(const proto::StepPlan& plan);
  // Sums up the hidden states that entries ask for.
  absl::Status Pool(const proto::StepPlan& plan, const float* residual, proto::StepResult& result);
  // False: the sequence cannot go on by its grammar.
  bool FillMask(const proto::StepEntry& entry, LogitsRow& row);
  void FillSamplingInputs(const proto::StepPlan& plan, proto::StepResult& result);
  kernels::SamplingParams ParamsOf(const proto::StepEntry& entry, const LogitsRow& row) const;
  static void Store(const absl::StatusOr<kernels::SampleResult>& sampled, bool logprobs, proto::EntryResult& result);
  void HandleRow(const proto::StepPlan& plan, LogitsRow& row, float* logits, std::span<std::byte> scratch,
                 proto::EntryResult& result) const;
  void SampleInto(const proto::StepEntry& entry, const LogitsRow& row, std::span<float> logits,
                  std::span<std::byte> scratch, proto::EntryResult& result) const;

  const model::LoadedModel& model_;
  kernels::Device& device_;
  kernels::Stream& stream_;
  const kernels::OpContext context_;
  const int64_t vocab_;
  const size_t rows_at_once_;
  TokenHistory history_;
  grammar::GrammarStates grammars_;
  std::vector<LogitsRow> rows_;
  std::unique_ptr<kernels::Buffer> gathered_, logits_, gemm_scratch_, sampling_scratch_, hidden_states_;
};

}  // namespace dovetail::compute
