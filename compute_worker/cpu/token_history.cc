#include "compute_worker/cpu/token_history.h"

#include <algorithm>

namespace dovetail::compute {

absl::Status TokenHistory::Update(const proto::StepEntry& entry) {
  auto it = sequences_.find(entry.sequence);
  if (it == sequences_.end()) {
    if (!entry.history_given && entry.ctx_len > 0)
      return FailedPrecondition("sequence ", entry.sequence.value(), ": penalties need its first ", entry.ctx_len,
                                " tokens, which this worker does not know");
    if (sequences_.size() >= kMaxSequences) {
      sequences_.erase(lru_.back());
      lru_.pop_back();
    }
    lru_.push_front(entry.sequence);
    it = sequences_.emplace(entry.sequence, Sequence{{}, 0, lru_.begin()}).first;
  } else {
    lru_.splice(lru_.begin(), lru_, it->second.used);
  }
  Sequence& sequence = it->second;
  if (entry.history_given) sequence.tokens = entry.history;
  if (static_cast<Position>(sequence.tokens.size()) < entry.ctx_len)
    return FailedPrecondition("sequence ", entry.sequence.value(), ": penalties need its first ", entry.ctx_len,
                              " tokens; this worker knows ", sequence.tokens.size());
  sequence.tokens.resize(entry.ctx_len);  // a repeated step brings the same tokens again
  sequence.tokens.insert(sequence.tokens.end(), entry.tokens.begin(), entry.tokens.end());
  // The entry counts within what it brings: all tokens, or the new ones.
  if (entry.history_given) {
    sequence.prompt_tokens = entry.prompt_tokens;
  } else if (entry.prompt_tokens > 0) {
    sequence.prompt_tokens = static_cast<int32_t>(entry.ctx_len) + entry.prompt_tokens;
  }
  return absl::OkStatus();
}

std::span<const TokenId> TokenHistory::Output(SequenceId id) const {
  const Sequence& sequence = sequences_.at(id);
  const size_t prompt = std::min<size_t>(sequence.prompt_tokens, sequence.tokens.size());
  return std::span<const TokenId>(sequence.tokens).subspan(prompt);
}

std::span<const kernels::TokenCount> TokenHistory::Counts(SequenceId id) {
  const Sequence& sequence = sequences_.at(id);
  index_.clear();
  counts_.clear();
  for (size_t i = 0; i < sequence.tokens.size(); ++i) {
    const auto [it, fresh] = index_.try_emplace(sequence.tokens[i], counts_.size());
    if (fresh) counts_.push_back(kernels::TokenCount{sequence.tokens[i], 0});
    if (static_cast<int32_t>(i) >= sequence.prompt_tokens) ++counts_[it->second].generated;
  }
  return counts_;
}

}  // namespace dovetail::compute
