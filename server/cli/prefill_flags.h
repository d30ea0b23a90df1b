#pragma once
#include <cstdint>
#include <optional>

#include "base/status.h"
#include "proto/attention_spec.h"
#include "server/cli/engine_flags.h"

// What the flags of prompts over several compute workers say against each other, against the model, and against the
// device: --prefill-ranks, --prefill-rank-tokens, --prefill-exchange.
//   Errors: kInvalidArgument names the flag, what is wrong, and what can be asked for.
//   Threads: pure.

namespace dovetail::cli {

// Of the scheduler. `compute_workers`: as many as there will be; nothing: any number may join.
absl::Status CheckPrefillRanks(const EngineFlags& flags, std::optional<int> compute_workers);

// Of a prompt that must have as many ranks as the flags say: it is long enough for them.
absl::Status CheckPromptForRanks(const EngineFlags& flags, int64_t tokens);

// Of a model, and of whether its compute workers run on GPUs, and on one that holds the KV cache, too.
absl::Status CheckPrefillExchange(const EngineFlags& flags, const proto::AttentionTable& table, bool on_gpu,
                                  bool cache_on_its_gpu);

}  // namespace dovetail::cli
