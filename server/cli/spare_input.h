#pragma once
#include <cstddef>
#include <optional>
#include <string>

#include "base/status.h"

// What a spare attention worker and the process that started it say to each other: the spare announces kSpareIsReady,
// and gets the line `serve NAME` on standard input.

namespace dovetail::cli {

inline constexpr const char* kSpareIsReady = "spare attention worker: ready, waits for a name";
inline constexpr size_t kMostServeLineBytes = 256;

// Threads: pure.
std::string ServeLine(const std::string& name);

// Where a spare waits.
// Threads: Wait() is for one thread; Stop() is thread-safe.
class SpareInput {
 public:
  explicit SpareInput(int file = 0);  // the caller's; read from its first byte
  ~SpareInput();
  SpareInput(const SpareInput&) = delete;
  SpareInput& operator=(const SpareInput&) = delete;

  // Blocks, asleep, until a line comes: its name. Nothing: the input ended without one, or Stop() was called.
  // Errors: kInvalidArgument: another line, or a longer one.
  absl::StatusOr<std::optional<std::string>> Wait();

  // Ends Wait(), also one that begins later.
  void Stop();

 private:
  bool ReadMore(std::string& text) const;

  const int file_, stop_;
};

}  // namespace dovetail::cli
