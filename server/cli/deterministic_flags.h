#pragma once
#include <vector>

#include "base/status.h"
#include "server/cli/engine_flags.h"

// --deterministic (docs/operations.md).
// Errors: kInvalidArgument, naming the flag that does not go with it, and what does.
// Threads: for the main thread.

namespace dovetail::cli {

void AddDeterministicFlag(CLI::App& command, EngineFlags& flags);

// Where layers run on a GPU. `attends_on_cpu`: some attention worker does.
absl::Status CheckDeterministic(const EngineFlags& flags, bool attends_on_cpu);

// Of an engine in this process, once its devices are open; `places` are those of --attention-device.
absl::Status CheckDeterministicPlaces(const EngineFlags& flags, const RunningEngine& engine,
                                      const std::vector<engine::EmbeddedClusterOptions::AttentionPlace>& places);

}  // namespace dovetail::cli
