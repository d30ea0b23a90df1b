#pragma once
#include <memory>
#include <string>

#include "compute_worker/compute_worker_node.h"
#include "control/worker_main.h"
#include "kernels/device.h"
#include "server/cli/cluster_commands.h"

namespace dovetail::cli {

// What a process needs to be a compute worker, alone or in a pair: its model is loaded, and its device measured.
// Threads: thread-compatible.
struct ComputeRole {
  std::unique_ptr<kernels::Device> device;
  ModelOnDevice loaded;
  std::shared_ptr<tracing::OtlpExporter> spans;
  compute::ComputeWorkerTuning tuning;  // refers to the others
  control::WorkerMainOptions options;
  control::WorkerMain::ConnectorFactory connectors;
  bool warned = false;  // of what this host has too little of

  // Once it has joined, so that refusals are one line.
  void WarnOfWhatIsShort(const ComputeWorkerFlags& flags);
};

// Without opening a file, a device or a port. Errors: kInvalidArgument names the flag.
// Threads: pure.
absl::Status CheckComputeWorkerFlags(const ComputeWorkerFlags& flags);

// `service`: as traces name it. `name`: of the worker. Blocks while the model is loaded.
// Errors: those of the model, the device and the flags, which the message names.
absl::StatusOr<std::unique_ptr<ComputeRole>> PrepareComputeRole(const ComputeWorkerFlags& flags,
                                                                const std::string& service, const std::string& name);

}  // namespace dovetail::cli
