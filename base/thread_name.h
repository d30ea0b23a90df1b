#pragma once
#include <string_view>

namespace dovetail {

// Names the calling thread, as debuggers, top and /proc show it; of a process's first thread it is the process's name.
// The kernel keeps 15 bytes. Threads that the calling thread starts have the same name until they are named.
// Errors: none.
// Threads: thread-safe; it names the calling thread only.
void NameThread(std::string_view name);

}  // namespace dovetail
