#pragma once
#include <sys/types.h>

#include <string>
#include <vector>

namespace dovetail::test {

// The ids of this process's threads, in no order.
//   Threads: thread-safe; others may begin and end meanwhile
std::vector<pid_t> Threads();
// As the kernel has it, 15 bytes at most; empty if there is no such thread any more.
//   Threads: thread-safe
std::string NameOfThread(pid_t thread);

}  // namespace dovetail::test
