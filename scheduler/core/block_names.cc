#include "scheduler/core/block_names.h"

#include <algorithm>
#include <array>

#include "scheduler/core/block_hasher.h"

namespace dovetail::scheduler {

bool BlockNames::MayLookUp(const Sequence& sequence) const {
  const GenerationRequest& params = sequence.params();
  if (!caching_ || !params.use_prefix_cache) return false;
  const bool needs_prompt_logprobs = params.prompt_logprobs >= 0 && sequence.choice == 0 &&
                                     sequence.request->prompt_logprobs_next < sequence.prompt_size();
  return !needs_prompt_logprobs;
}

uint32_t BlockNames::Usable(const Sequence& sequence) const {
  if (!MayLookUp(sequence)) return 0;
  // At least one token is computed: the one whose logits choose the next, or the last before a fork.
  Position most = sequence.prefill_end() - 1;
  const GenerationRequest& params = sequence.params();
  if (params.logits_last > 0 && sequence.choice == 0 && !sequence.request->prompt_logits_done) {
    most = std::min(most, sequence.prompt_size() - params.logits_last);
  }
  const RequestState::Pooled pooled = sequence.request->pooled_range();
  const Position owed = std::max(pooled.begin, sequence.request->pooled_next);
  if (owed < pooled.end) most = std::min(most, owed);
  return static_cast<uint32_t>(std::max<Position>(0, most) / kSegmentTokens);
}

const proto::BlockHash& BlockNames::NameOf(Sequence& sequence, int64_t block) {
  const int64_t prompt_blocks = sequence.prompt_size() / kSegmentTokens;
  RequestState& request = *sequence.request;
  std::array<TokenId, kSegmentTokens> tokens;
  const auto chain = [&](std::vector<proto::BlockHash>& hashes, int64_t first, int64_t at) {
    while (static_cast<int64_t>(hashes.size()) <= at - first) {
      const int64_t next = first + static_cast<int64_t>(hashes.size());
      const proto::BlockHash& previous = next == 0 ? request.chain_seed : NameOf(sequence, next - 1);
      for (int i = 0; i < kSegmentTokens; ++i) tokens[i] = sequence.token(next * kSegmentTokens + i);
      hashes.push_back(NextBlockHash(proto::BlockHash(previous), tokens));
    }
  };
  if (block < prompt_blocks) {
    chain(request.prompt_hashes, 0, block);
    return request.prompt_hashes[block];
  }
  chain(sequence.output_hashes, prompt_blocks, block);
  return sequence.output_hashes[block - prompt_blocks];
}

void BlockNames::Append(Sequence& sequence, int64_t first, int64_t end, std::vector<proto::BlockHash>& out) const {
  if (!caching_) return;
  for (int64_t block = first; block < end; ++block) {
    out.push_back(NameOf(sequence, block));
    if (directory_ != nullptr) TellDirectory(sequence, block);
  }
}

void BlockNames::TellDirectory(Sequence& sequence, int64_t block) const {
  // A copy: naming one block may move the others.
  const proto::BlockHash name = NameOf(sequence, block);
  const proto::BlockHash* const parent = block > 0 ? &NameOf(sequence, block - 1) : nullptr;
  directory_->Name(name, parent, block, sequence.params(), [&] {
    std::vector<TokenId> tokens(kSegmentTokens);
    for (int i = 0; i < kSegmentTokens; ++i) tokens[i] = sequence.token(block * kSegmentTokens + i);
    return tokens;
  });
}

}  // namespace dovetail::scheduler
