#pragma once
#include <vector>

// UCX names a piece of shared memory by the number of its descriptor (/proc/PID/fd/N). A process that is a member again
// makes the same pieces anew, under the same numbers. A peer that still has an earlier address (from a greeting that
// lay in memory while its reader was stopped, for example) would open the new piece: another incarnation's queue, on
// which UCX 1.13 aborts while it is half made (mm_posix.c, "length > 0"). So numbers once used stay out of use for a
// while, and a process that opens one is refused. No errors: a number that cannot be kept is reused. Linux
// (memfd_create(2), F_SEAL_WRITE).
// Threads: thread-safe.

namespace dovetail::transport::ucx {

// The descriptors of this process that are shared memory of UCX, in ascending order.
std::vector<int> SharedMemoryDescriptors();

// Takes those of `numbers` that are free now, for ten minutes or until the next call after them.
void KeepOutOfUse(const std::vector<int>& numbers);

}  // namespace dovetail::transport::ucx
