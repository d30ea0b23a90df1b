#pragma once
#include <cstdint>
#include <string>

#include "control/messages.h"

namespace dovetail::scheduler {

// What an attention worker can answer for at most, for the log: "; at the 61 GB/s that it reads, at most 454 tokens/s
// of sequences at 1024 tokens and 114 at 4096". Where its memory is a host's and the layers are on a GPU, also what
// would raise that. Empty: its rate is not known.
// Units:   `longest` >= 1, in tokens: of the longest sequence that is served.
// Threads: pure.
std::string DecodeLimit(const control::Capabilities& has, const control::ModelSummary& model, int64_t longest,
                        bool layers_on_gpu);

}  // namespace dovetail::scheduler
