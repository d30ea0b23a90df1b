#pragma once
#include <string>

#include "base/status.h"

namespace dovetail::control {

// gRPC's own log goes to ours, as debugging: what fails comes back as a status, which names the flag and the remedy.
// Threads: thread-safe; the first call counts.
void TameGrpc();

// Why gRPC could not listen at HOST:PORT, in one line: kAlreadyExists when the port is taken, kInvalidArgument for a
// host that is not this one, kFailedPrecondition for a port that this user may not have. May look up a name.
// Threads: thread-safe; blocks while a name is looked up.
absl::Status WhyNotListening(const std::string& flag, const std::string& listen);

}  // namespace dovetail::control
