#pragma once
#include "base/status.h"
#include "proto/control/dovetail_control.pb.h"
#include "requests/cache_events.h"

// What the prefix cache gains and loses, from the scheduler to servers. Of a block that is lost only the name crosses.
// Errors: kInvalidArgument names the field.
// Threads: pure.

namespace dovetail::control {

inline constexpr size_t kCacheEventsPerMessage = 4096;  // about 1.3 MiB

// The events [first, first + kCacheEventsPerMessage) of `events`, a reset only with the first of them.
void ToProto(const requests::CacheEvents& events, size_t first, v1::CacheEvents& out);
absl::StatusOr<requests::CacheEvents> FromProto(const v1::CacheEvents& in);

}  // namespace dovetail::control
