#include "grammar/grammar_states.h"

#include <algorithm>

namespace dovetail::grammar {

// Null: its grammar is being compiled.
GrammarStates::State* GrammarStates::Find(SequenceId sequence, const std::string& source,
                                          std::span<const TokenId> ends) {
  const auto known = states_.find(sequence);
  if (known != states_.end()) {
    lru_.splice(lru_.begin(), lru_, known->second.used);
    return &known->second;
  }
  absl::StatusOr<std::shared_ptr<const Compiled>> compiled = FailedPrecondition("the model has no tokenizer");
  if (compiler_ != nullptr) {
    auto answer = compiler_->Ask(source);
    if (!answer.has_value()) return nullptr;
    compiled = *std::move(answer);
  }
  if (states_.size() >= kMaxSequences) {
    states_.erase(lru_.back());
    lru_.pop_back();
  }
  lru_.push_front(sequence);
  State& state = states_[sequence];
  state.failed = Begin(state, std::move(compiled), ends);
  state.used = lru_.begin();
  return &state;
}

absl::Status GrammarStates::Begin(State& state, absl::StatusOr<std::shared_ptr<const Compiled>> compiled,
                                  std::span<const TokenId> ends) const {
  if (!compiled.ok()) return compiled.status();
  if (ends.empty()) return FailedPrecondition("no token ends its text");
  state.matcher = std::make_unique<Matcher>(*std::move(compiled), ends);
  return absl::OkStatus();
}

bool GrammarStates::Prepare(SequenceId sequence, const std::string& source, std::span<const TokenId> ends) {
  return Find(sequence, source, ends) != nullptr;
}

absl::StatusOr<std::span<const uint32_t>> GrammarStates::Mask(SequenceId sequence, const std::string& source,
                                                              std::span<const TokenId> ends,
                                                              std::span<const TokenId> output) {
  State* const state = Find(sequence, source, ends);
  if (state == nullptr) return FailedPrecondition("sequence ", sequence.value(), ": its grammar is not compiled yet");
  if (!state->failed.ok()) return state->failed;
  const size_t known = state->accepted.size();
  if (known > output.size() || !std::equal(state->accepted.begin(), state->accepted.end(), output.begin())) {
    state->matcher->Reset();
    state->accepted.clear();
  }
  for (size_t i = state->accepted.size(); i < output.size(); ++i) {
    if (state->matcher->ended() || !state->matcher->Accept(output[i]))
      return FailedPrecondition("sequence ", sequence.value(), ": output token ", i, " is outside its grammar");
    state->accepted.push_back(output[i]);
  }
  if (state->matcher->ended()) return FailedPrecondition("sequence ", sequence.value(), ": its text has ended");
  mask_.resize((engine_->vocab_size() + 31) / 32);
  DT_RETURN_IF_ERROR(state->matcher->FillMask(mask_));
  return std::span<const uint32_t>(mask_);
}

}  // namespace dovetail::grammar
