#pragma once
#include <string>
#include <vector>

#include "proto/attention_spec.h"
#include "server/cli/engine_flags.h"

namespace dovetail::cli {

// --compute-devices: the GPUs of the compute workers, of one process or of processes of their own.
//   Errors:  name the flag
//   Threads: the main thread only

void AddComputeDevicesFlag(CLI::App& command, EngineFlags& flags);

// Their names; none: the flag was not given.
std::vector<std::string> ComputeDevicesOf(const EngineFlags& flags);

// --compute-workers, or one for each of them.
absl::StatusOr<int> ComputeWorkersOf(const EngineFlags& flags);

// Opens all but the first, which is engine.device, and lets them reach each other's memory. kInvalidArgument: one would
// compute other results than the first.
absl::Status OpenComputeDevices(const EngineFlags& flags, const std::vector<std::string>& gpus,
                                const model::Checkpoint& checkpoint, RunningEngine& engine);

// The weights on all but the first, as they are on that one.
absl::Status LoadOnComputeDevices(const EngineFlags& flags, const model::LoadProgress& progress, RunningEngine& engine);

// --prefill-exchange, of which auto is gather-direct on several GPUs where the model can: from GPU to GPU is faster
// than by way of attention workers.
std::string ExchangeBetweenGpus(const EngineFlags& flags, const proto::AttentionTable& table);
// That, in one process; warns where the KV cache is in its way.
void ChooseExchangeOfGpus(const proto::AttentionTable& table, const RunningEngine& engine, bool pairs,
                          EngineFlags& flags);

}  // namespace dovetail::cli
