#pragma once
#include <filesystem>
#include <memory>

#include "base/status.h"
#include "model/checkpoint.h"

namespace dovetail::model {

// A model of which only the shape is known: `folder` holds config.json, and all weights are zeros that take no memory
// and no disk (a file with a hole, removed when this returns). For measuring, with weights made on the device. A
// tokenizer and other texts that lie in `folder` are the model's.
// Errors: those of OpenCheckpoint; kResourceExhausted when no temporary file can be made.
// Threads: thread-safe; blocks on the disk.
absl::StatusOr<std::unique_ptr<Checkpoint>> OpenDummyCheckpoint(const std::filesystem::path& folder);

}  // namespace dovetail::model
