#include "compute_worker/tuned_options.h"

#include <algorithm>

#include "compute_worker/cpu/prompt_states.h"
#include "compute_worker/gpu_links.h"
#include "compute_worker/prompt_scratch_size.h"

namespace dovetail::compute {
namespace {

constexpr int64_t kMostStateBytes = int64_t{512} << 20;
constexpr int64_t kMostStateSlots = 64;

int StateSlotsOf(const proto::AttentionTable& table) {
  const int64_t slot_bytes = PromptStates::SlotBytes(table);
  return slot_bytes == 0 ? 0 : static_cast<int>(std::min(kMostStateSlots, kMostStateBytes / slot_bytes));
}

}  // namespace

ComputeWorkerOptions Tuned(ComputeWorkerOptions options, const ComputeWorkerTuning& tuning,
                           const proto::AttentionTable& table) {
  options.prompt_tokens = tuning.prompt_tokens;
  options.gather_piece_bytes = tuning.gather_piece_bytes;
  options.hand_over_at_end = tuning.hand_over_at_end;
  options.key_values_in_flight = tuning.hand_over_at_end ? table.op_count() : tuning.key_values_in_flight;
  options.deterministic = tuning.deterministic && tuning.dense != nullptr;
  if (tuning.dense != nullptr) {
    // Unless it is asked for, prompts of steps between GPUs are attended where the blocks are: both GPUs work then.
    // Those of models with linear states go through the hosts in any case.
    const bool linked = tuning.exchange.links != nullptr && !tuning.prompt_scratch_bytes && !tuning.prompts_here &&
                        !table.has_linear() && GpuLinks::Supports(table).ok();
    const bool shares = tuning.shared_gpu != nullptr;
    const bool elsewhere = linked || (shares && !tuning.attends_elsewhere) || options.deterministic;
    options.prompt_blocks =
        elsewhere ? 0 : tuning.dense->PromptBlocks(table, options.max_step_tokens, tuning.prompt_scratch_bytes);
    options.hosts_apart = shares && tuning.attends_elsewhere;
    options.rank_rows = options.rank_ring = options.rank_switch = options.prompt_blocks > 0;
    options.head_partials = proto::HeadPartials::kOfTokens;
    options.rank_rows_on_device = tuning.rank_rows_on_device;
    options.linear_prompts = tuning.linear_prompts && !linked && !shares && tuning.dense->RunsLinearPrompts(table).ok();
    options.state_slots = options.linear_prompts ? StateSlotsOf(table) : 0;
    return options;
  }
  options.prompt_blocks =
      PromptScratchBlocks(table, options.max_step_tokens, tuning.prompt_scratch_bytes, tuning.kv_storage);
  options.linear_prompts = tuning.linear_prompts;
  options.rank_rows = options.rank_ring = options.rank_switch = options.rank_queries = true;
  options.rank_state_switch = options.linear_prompts;
  options.state_slots = StateSlotsOf(table);
  return options;
}

}  // namespace dovetail::compute
