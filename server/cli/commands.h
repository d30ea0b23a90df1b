#pragma once
#include <string>
#include <vector>

#include "base/status.h"
#include "server/cli/engine_flags.h"

// The commands of the `dovetail` binary. Each returns when it is done; errors are printed by main().

namespace dovetail::cli {

struct LogitsFlags {
  EngineFlags engine;
  std::string ids;
  int last = 0;    // 0: all positions
  int greedy = 0;
  std::string out;
};
// Writes the float32 logits [last, vocab] of the last positions as .npy and prints {"greedy_ids": [...]}.
absl::Status RunLogits(const LogitsFlags& flags);

}  // namespace dovetail::cli
