#include <algorithm>
#include <cmath>
#include <string>

#include "scheduler/core/limits.h"
#include "scheduler/core/scheduler.h"

namespace dovetail::scheduler {
namespace {

absl::Status CheckRange(const char* flag, int64_t value, int64_t least, int64_t most) {
  if (value >= least && value <= most) return absl::OkStatus();
  return InvalidArgument(flag, ": ", value, " is not in ", least, "..", most);
}

}  // namespace

void SchedulerOptions::ChooseStepTokens(bool on_gpu) {
  if (prefill_rank_tokens == 0)
    prefill_rank_tokens = on_gpu && prefill_ranks == 0 ? kRankTokensOfGpu : kRankTokensOfCpu;
  if (max_num_batched_tokens != 0) return;
  const int least = enable_chunked_prefill ? max_num_seqs : std::max(max_num_seqs, max_model_len);
  max_num_batched_tokens =
      std::min(std::max(on_gpu ? kStepTokensOfGpu : kStepTokensOfCpu, least), proto::kMaxStepTokens);
}

absl::Status SchedulerOptions::Validate() const {
  DT_RETURN_IF_ERROR(CheckRange("--max-num-seqs", max_num_seqs, 1, proto::kMaxStepEntries));
  DT_RETURN_IF_ERROR(CheckRange("--max-num-batched-tokens", max_num_batched_tokens, 1, proto::kMaxStepTokens));
  DT_RETURN_IF_ERROR(
      CheckRange("--max-model-len", max_model_len, 1, int64_t{proto::kMaxSequenceBlocks} * kSegmentTokens));
  DT_RETURN_IF_ERROR(CheckRange("--max-num-queued-reqs", max_queued_requests, 1, kMaxQueuedRequests));
  DT_RETURN_IF_ERROR(CheckRange("--replay-one-in", replay_one_in, 0, 1 << 30));
  DT_RETURN_IF_ERROR(CheckRange("--prefill-ranks", prefill_ranks, 0, proto::kMaxPrefillRanks));
  DT_RETURN_IF_ERROR(CheckRange("--prefill-rank-tokens", prefill_rank_tokens, kSegmentTokens, proto::kMaxStepTokens));
  DT_RETURN_IF_ERROR(CheckRange("--micro-batches", micro_batches, 1, kMaxMicroBatches));
  if (!std::isfinite(prefill_itl_budget.seconds) || prefill_itl_budget.seconds < 0)
    return InvalidArgument("--prefill-itl-budget: ", 1e3 * prefill_itl_budget.seconds,
                           " ms is no time; give milliseconds, auto, or 0 for none");
  if (step_timeout <= absl::ZeroDuration()) {
    return InvalidArgument("--step-timeout: ", absl::FormatDuration(step_timeout), " is no time to wait");
  }
  if (run_ahead && (micro_batches != 1 || adapt_micro_batches)) {
    return InvalidArgument("--run-ahead: goes with --micro-batches 1 only, not with ", micro_batches);
  }
  if (max_num_batched_tokens < max_num_seqs) {
    return InvalidArgument(
        "--max-num-batched-tokens: ", max_num_batched_tokens, " is less than --max-num-seqs ", max_num_seqs,
        ", so not every running sequence could get a token in a step; raise the one or lower the other");
  }
  if (!enable_chunked_prefill && max_num_batched_tokens < max_model_len) {
    return InvalidArgument("--max-num-batched-tokens: ", max_num_batched_tokens, " is less than --max-model-len ",
                           max_model_len, ", so without --enable-chunked-prefill the longest prompt would fit no step");
  }
  if (placement > PlacementPolicy::kTiers) {
    return InvalidArgument("--placement: ", static_cast<int>(placement),
                           " is none of request, heads, tokens, mixed and tiers");
  }
  if (token_shard_tokens < kSegmentTokens || token_shard_tokens % kSegmentTokens != 0) {
    return InvalidArgument("--token-shard-tokens: ", token_shard_tokens, " is not a positive multiple of ",
                           kSegmentTokens);
  }
  if (attention.op_count() < 1 || attention.group_count() < 1) {
    return InvalidArgument("attention: the table has no attention op; build it from the model's config");
  }
  return absl::OkStatus();
}

}  // namespace dovetail::scheduler
