#pragma once
#include <vector>

// The sockets of a UCX worker, of which UCX says nothing: for a worker that is left behind. Stateless: thread-safe, as
// long as no other thread opens a listening socket or closes these. No errors: what cannot be read is not found. Linux
// (proc(5), /proc/PID/fdinfo of an epoll set).

namespace dovetail::transport::ucx {

// The TCP sockets of this process that listen, in ascending order.
std::vector<int> ListeningSockets();

// What an epoll set watches, and what the sets in it watch.
std::vector<int> WatchedBy(int epoll_fd);

// Closes those of `fds` that are TCP sockets, which tells whoever is at their other end. Nobody may use them any
// more.
void CloseTcpSockets(const std::vector<int>& fds);

// Takes the sockets that UCX's own thread accepts connections at away from it, and closes them and what was accepted
// there.
void CloseListeners(const std::vector<int>& listeners);

}  // namespace dovetail::transport::ucx
