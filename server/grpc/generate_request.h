#pragma once
#include "base/status.h"
#include "proto/control/vllm_engine.pb.h"
#include "server/openai/prepare.h"

namespace dovetail::server {

// A checked generation request: what the HTTP API would make of the same fields. Errors name the field
// (kInvalidArgument), or are kUnimplemented for what is not served; NeedsCompiling as Prepare has it.
// Threads: pure.
absl::StatusOr<PreparedGeneration> PrepareGrpcRequest(const vllm::grpc::engine::GenerateRequest& request,
                                                      const ServedModel& model, const RequestContext& context);

// Likewise what /v1/embeddings would make of it.
absl::StatusOr<PreparedGeneration> PrepareGrpcRequest(const vllm::grpc::engine::EmbedRequest& request,
                                                      const ServedModel& model, const RequestContext& context);

}  // namespace dovetail::server
