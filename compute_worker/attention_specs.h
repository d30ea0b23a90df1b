#pragma once
#include "base/dtype.h"
#include "base/status.h"
#include "model/config.h"
#include "proto/attention_spec.h"

namespace dovetail::compute {

// What attention workers are told about a model: one spec per attention op, K and V stored as `kv`. Pure. Errors:
// AttentionTable::Build's.
absl::StatusOr<proto::AttentionTable> AttentionTableOf(const model::ModelConfig& config, DType kv);

}  // namespace dovetail::compute
