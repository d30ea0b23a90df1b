#pragma once
#include <nlohmann/json.hpp>
#include <string>

#include "base/status.h"

namespace dovetail::loadgen {

// The object that a line of JSON lines holds. kInvalidArgument names `place` and says where in the line it stops being
// JSON (NaN and Infinity are none).
// Threads: pure.
absl::StatusOr<nlohmann::json> ParseJsonLine(const std::string& line, const std::string& place);

}  // namespace dovetail::loadgen
