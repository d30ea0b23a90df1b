#pragma once
#include <cstdint>
#include <utility>

namespace dovetail::transport::ucx {

// Identifies a process of this PID namespace uniquely: its number may be given to another one once it has ended, with a
// later start.
struct ProcessIdentity {
  uint32_t pid = 0;    // 0: unknown
  uint64_t start = 0;  // clock ticks since the host booted
  bool operator==(const ProcessIdentity&) const = default;
};

// Threads: thread-safe.
ProcessIdentity ThisProcess();

// Tells when a process has ended, also before its parent has reaped it. Move-only.
// Threads: thread-compatible.
class ProcessWatch {
 public:
  ProcessWatch() = default;  // watches no process: Ended() stays false
  // Ended() stays false for a process that cannot be watched (unknown, or of another namespace), and is true for one
  // that no longer exists.
  explicit ProcessWatch(const ProcessIdentity& process);
  ~ProcessWatch();
  ProcessWatch(ProcessWatch&& other) noexcept { *this = std::move(other); }
  ProcessWatch& operator=(ProcessWatch&& other) noexcept {
    std::swap(fd_, other.fd_);
    std::swap(ended_, other.ended_);
    return *this;
  }

  bool Ended();                   // a syscall until it is true
  int fd() const { return fd_; }  // readable when it has ended; -1: nothing to wait for

 private:
  int fd_ = -1;
  bool ended_ = false;
};

}  // namespace dovetail::transport::ucx
