#pragma once
#include <cstdint>

#include "scheduler/core/events.h"

namespace dovetail::scheduler {

// A hash of everything that an action says: two recordings of actions are equal if their digests are.
uint64_t DigestOf(const Action& action);

}  // namespace dovetail::scheduler
