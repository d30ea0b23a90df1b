#pragma once
#include <string>
#include <vector>

#include "base/status.h"
#include "kernels/cuda/backend_abi.h"
#include "server/cli/cluster_commands.h"

namespace dovetail::cli {

// Where `dovetail up` puts layers and attention.
// Threads: thread-compatible; a value.
struct Layout {
  bool pairs = false;                  // each device has layers, and attention of its own sequences (ADR 88)
  std::vector<std::string> layers;     // devices of compute workers, or of pairs
  std::vector<std::string> attention;  // of attention workers; none: they are in pairs
  std::string why;                     // for the log
};

struct GpuOfMachine {
  std::string name;  // cuda:N
  kernels::cuda::DeviceInfo info;
};

// `asked`: auto, pairs or split. `gpus`: at least one, each once.
// Errors:  kInvalidArgument names --layout and what would do.
// Threads: pure.
absl::StatusOr<Layout> ChooseLayout(const std::string& asked, const std::vector<GpuOfMachine>& gpus);

// --gpus: `all`, or a list as cuda:0,cuda:1. Asks the driver what they are, and takes no memory of them.
// Errors:  kInvalidArgument, kFailedPrecondition: the message names --gpus.
// Threads: the main thread only.
absl::StatusOr<std::vector<GpuOfMachine>> GpusOf(const std::string& list);

// Sets what --gpus and --layout come to in the other flags of devices, and says why in the log. True: pairs.
// Errors:  kInvalidArgument, kFailedPrecondition: the message names the flag.
// Threads: the main thread only.
absl::StatusOr<bool> ApplyLayout(UpFlags& flags);

}  // namespace dovetail::cli
