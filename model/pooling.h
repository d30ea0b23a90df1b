#pragma once
#include <string>

#include "base/status.h"
#include "model/checkpoint.h"

namespace dovetail::model {

// How a model that makes vectors of texts averages hidden states, by its files: `pooling_type` of a GGUF file, or
// sentence-transformers' 1_Pooling/config.json.
// Returns: "mean", "last", "cls", or what the files say that is none of these; empty: they say nothing
// Errors: those of reading the file
// Threads: thread-safe; blocks on files
absl::StatusOr<std::string> PoolingOf(const Checkpoint& checkpoint);

// Where a folder has the second of these; the other one is its base name among files that travel without folders.
inline constexpr const char* kPoolingFile = "1_Pooling/config.json";
inline constexpr const char* kFlatPoolingFile = "1_Pooling_config.json";
inline constexpr const char* kGgufPoolingSuffix = ".pooling_type";  // behind the architecture

}  // namespace dovetail::model
