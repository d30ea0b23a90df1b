#pragma once
#include <memory>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/status.h"
#include "control/messages.h"
#include "model/checkpoint.h"

namespace dovetail::engine {

// What a compute worker tells a cluster about the model that it has loaded, and the files that servers need of it:
// tokenizer and chat templates. `files` is filled in. Errors name the file.
// Threads: thread-safe; blocks on files.
absl::StatusOr<control::ModelSummary> SummarizeModel(const model::Checkpoint& checkpoint, DType kv_dtype,
                                                     uint64_t weight_bytes, std::vector<control::TextFile>& files,
                                                     DType state_dtype = DType::kF32);

// The same model for a server: a checkpoint without weights, whose tokenizer, templates and generation defaults are
// read as a local one's. Files lie in `folder`, which must exist and stay.
// Threads: thread-safe; blocks on files.
absl::StatusOr<std::unique_ptr<model::Checkpoint>> OpenRemoteModel(const control::ModelSummary& summary,
                                                                   const std::vector<control::TextFile>& files,
                                                                   const std::string& folder);

}  // namespace dovetail::engine
