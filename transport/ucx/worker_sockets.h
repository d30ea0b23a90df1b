#pragma once
#include <vector>

#include "transport/ucx/socket_guard.h"

// The sockets of a UCX worker that ends, or is left behind.
//
// Errors:  none; what cannot be read is not found.
// Threads: thread-safe, as long as no other thread closes these sockets.
// Source:  Linux: proc(5), /proc/PID/fdinfo of an epoll set.

namespace dovetail::transport::ucx {

// What an epoll set watches, and what the sets in it watch.
std::vector<int> WatchedBy(int epoll_fd);

// How many of `fds` are TCP connections that need not, or no longer, show a ticket (socket_guard.h).
int CountConnections(const std::vector<int>& fds);

// Closes those of `fds` that are TCP sockets; their peers see the connections end. They must not be used afterwards.
void CloseTcpSockets(const std::vector<int>& fds);

// Takes these listeners away from the thread of UCX that accepts connections there, and closes them and the connections
// that were accepted.
void CloseListeners(const std::vector<GuardedListener>& listeners);

}  // namespace dovetail::transport::ucx
