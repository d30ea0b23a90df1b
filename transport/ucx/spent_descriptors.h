#pragma once
#include <vector>

// UCX names a piece of shared memory by the number of its descriptor (/proc/PID/fd/N). A process that is a member again
// makes the same pieces anew, under the same numbers, and who still has an address of before (a greeting that lay in
// memory while its reader was stopped, say) would open what is there now: another incarnation's queue, which UCX 1.13
// aborts on while it is half made (mm_posix.c, "length > 0"). So numbers once used stay out of use for a while, and
// whoever opens one is refused. Stateless: thread-safe; no errors: what cannot be kept is open to reuse, as before.
// Linux (memfd_create(2), F_SEAL_WRITE).

namespace dovetail::transport::ucx {

// The descriptors of this process that are shared memory of UCX, in ascending order.
std::vector<int> SharedMemoryDescriptors();

// Takes those of `numbers` that are free now, for ten minutes or until the next call after them.
void KeepOutOfUse(const std::vector<int>& numbers);

}  // namespace dovetail::transport::ucx
