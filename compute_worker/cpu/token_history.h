#pragma once
#include <cstdint>
#include <list>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "base/ids.h"
#include "base/status.h"
#include "kernels/sampling.h"
#include "proto/step_plan.h"

namespace dovetail::compute {

// The tokens of sequences whose sampling has penalties or a grammar: a cache of what the token log knows, fed by step
// plans, at most kMaxSequences of them, least recently used ones dropped (the scheduler gives the history again after a
// restart).
// Threads: thread-compatible.
class TokenHistory {
 public:
  static constexpr size_t kMaxSequences = 8192;

  // Takes in an entry's history (if given) and its new tokens. kFailedPrecondition: the tokens before ctx_len are not
  // known here.
  absl::Status Update(const proto::StepEntry& entry);

  // The tokens behind the prompt. Valid until the next Update. The sequence was just updated.
  std::span<const TokenId> Output(SequenceId sequence) const;

  // Each token of the sequence once, with how often it was generated. Valid until the next call. The sequence was just
  // updated.
  std::span<const kernels::TokenCount> Counts(SequenceId sequence);

 private:
  struct Sequence {
    std::vector<TokenId> tokens;
    int32_t prompt_tokens = 0;
    std::list<SequenceId>::iterator used;
  };

  absl::flat_hash_map<SequenceId, Sequence> sequences_;
  std::list<SequenceId> lru_;  // front: used last
  absl::flat_hash_map<TokenId, size_t> index_;
  std::vector<kernels::TokenCount> counts_;
};

}  // namespace dovetail::compute
