#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "base/status.h"

// What a spare attention worker and the process that started it say to each other: the spare announces kSpareIsReady,
// and gets the line `serve NAME` on standard input; `serve NAME KV_BYTES` where the worker NAME had so much KV before.

namespace dovetail::cli {

inline constexpr const char* kSpareIsReady = "spare attention worker: ready, waits for a name";
inline constexpr size_t kMostServeLineBytes = 256;

struct SpareOrder {
  std::string name;
  std::optional<uint64_t> kv_bytes;
  bool operator==(const SpareOrder&) const = default;
};

// Threads: pure.
std::string ServeLine(const SpareOrder& order);

// Where a spare waits.
// Threads: Wait() is for one thread; Stop() is thread-safe.
class SpareInput {
 public:
  explicit SpareInput(int file = 0);  // the caller's; read from its first byte
  ~SpareInput();
  SpareInput(const SpareInput&) = delete;
  SpareInput& operator=(const SpareInput&) = delete;

  // Blocks, asleep, until a line comes. Nothing: the input ended without one, or Stop() was called.
  // Errors: kInvalidArgument: another line, or a longer one.
  absl::StatusOr<std::optional<SpareOrder>> Wait();

  // Ends Wait(), also one that begins later.
  void Stop();

 private:
  bool ReadMore(std::string& text) const;

  const int file_, stop_;
};

}  // namespace dovetail::cli
