#pragma once
#include <string>

namespace dovetail::cli {

// The first thing that a process of a role does, before it begins a thread. Names the process "dt-" and `name`, as ps,
// ss and top show it, and forbids core dumps: they would hold prompts and keys.
void BeginRole(const std::string& name);

}  // namespace dovetail::cli
