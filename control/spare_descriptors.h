#pragma once

namespace grpc {
class ServerBuilder;
}

// A process that listens with gRPC always has descriptors left.
//
// gRPC 1.51 accepts connections without a limit, and stops listening for good once accept4() fails for want of a
// descriptor: strangers that open connections and leave would end a scheduler for all that come later. So the call
// passes through a wrapper, as UCX's calls do (transport/ucx/socket_hooks.cc). A connection whose descriptor is one of
// the last kSpareDescriptors is closed at once, and the want of a descriptor is told as "nothing to accept".
//
// Threads: thread-safe.

namespace dovetail::control {

inline constexpr int kSpareDescriptors = 32;  // below the soft limit of open files

// To be called for every gRPC server of the process: it links the wrapper. A connection that has not begun to speak
// after 10 s is closed.
void BoundConnections(grpc::ServerBuilder& builder);

}  // namespace dovetail::control
