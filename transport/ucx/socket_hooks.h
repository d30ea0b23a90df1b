#pragma once
#include <sys/socket.h>
#include <sys/types.h>

// The socket calls of the C library, past the wrappers of socket_hooks.cc. As the calls of the same name: the result,
// and errno.
// Threads: thread-safe, as the calls of the same name.

namespace dovetail::transport::ucx::unwrapped {

int Close(int fd);
ssize_t Receive(int fd, void* data, size_t bytes, int flags);
ssize_t Send(int fd, const void* data, size_t bytes, int flags);

}  // namespace dovetail::transport::ucx::unwrapped
