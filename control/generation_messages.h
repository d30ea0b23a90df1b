#pragma once
#include "base/status.h"
#include "proto/control/dovetail_control.pb.h"
#include "requests/generation.h"

// Generation requests and updates between servers and the scheduler. FromProto checks counts and kinds; what a value
// may be for this model is checked by the scheduler, as for embedded requests.
// Errors: kInvalidArgument names the field and its limit.
// Threads: pure.

namespace dovetail::control {

inline constexpr int kMaxPromptTokens = 1 << 22;  // of one message (kMaxMessageBytes)

void ToProto(const requests::GenerationRequest& request, v1::GenerationRequest& out);
absl::StatusOr<requests::GenerationRequest> FromProto(const v1::GenerationRequest& in);

void ToProto(const requests::GenerationUpdate& update, v1::Update& out);
absl::StatusOr<requests::GenerationUpdate> FromProto(const v1::Update& in);

}  // namespace dovetail::control
