#pragma once
#include <memory>

#include "base/status.h"
#include "model/checkpoint.h"
#include "server/grpc/tokenizer_call.h"

namespace dovetail::cli {

// The tokenizer's files of a checkpoint's folder as one archive: tokenizer.json and its kin, chat templates, and the
// two configs by which readers know the kind of tokenizer. Errors:  kFailedPrecondition: the model has no such files (a
// GGUF file holds its tokenizer itself); kResourceExhausted:
//          they have more than kMaxTokenizerBytes. Others name the file.
// Blocks:  on files
// Threads: pure
absl::StatusOr<std::shared_ptr<const server::TokenizerArchive>> TokenizerFilesOf(const model::Checkpoint& checkpoint);

inline constexpr size_t kMaxTokenizerBytes = size_t{256} << 20;

}  // namespace dovetail::cli
