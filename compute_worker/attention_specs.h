#pragma once
#include "base/dtype.h"
#include "base/status.h"
#include "model/config.h"
#include "proto/attention_spec.h"

namespace dovetail::compute {

// What attention workers are told about a model: one spec per attention op, K and V stored as `kv`, linear states as
// `state` (f32 or bf16).
// Errors: AttentionTable::Build's.
// Threads: pure.
absl::StatusOr<proto::AttentionTable> AttentionTableOf(const model::ModelConfig& config, DType kv,
                                                       DType state = DType::kF32);

}  // namespace dovetail::compute
