#pragma once
#include <string>

namespace dovetail::cli {

// The first thing that a process of a role does, before it begins a thread. Names the process "dt-" and `name`, as ps,
// ss and top show it, forbids core dumps (they would hold prompts and keys), and raises the soft limit of open files to
// the hard one.
// Threads: the main thread, before any other thread begins.
void BeginRole(const std::string& name);

}  // namespace dovetail::cli
