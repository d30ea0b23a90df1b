#pragma once
#include <memory>
#include <string>

#include "base/status.h"
#include "model/checkpoint.h"
#include "plan/model_work.h"
#include "proto/attention_spec.h"

namespace dovetail::cli {

// Any model that commands take; of a Hugging Face folder, config.json is enough: then its weights are bf16 and zero.
// Threads: thread-safe; blocks on files.
absl::StatusOr<std::unique_ptr<model::Checkpoint>> OpenShape(const std::string& model);

// What a step of it has to do on CPUs, its weights kept as its files have them, K and V in `kv_storage`.
// Errors: those of Find.
// Threads: pure.
absl::StatusOr<plan::ModelWork> WorkOf(const model::Checkpoint& checkpoint, const proto::AttentionTable& attention,
                                       KvStorage kv_storage);

}  // namespace dovetail::cli
