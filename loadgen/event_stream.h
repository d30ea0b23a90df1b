#pragma once
#include <cstddef>
#include <functional>
#include <string>
#include <string_view>

#include "base/status.h"

namespace dovetail::loadgen {

// Takes a body of server-sent events apart, however it was cut into pieces: the data of each event, comments and other
// fields left out.
// Source: WHATWG HTML, "Server-sent events".
// Threads: thread-compatible.
class EventStream {
 public:
  static constexpr size_t kMaxEventBytes = size_t{16} << 20;

  // Calls `take` for every event that `bytes` completes. kDataLoss for an event beyond kMaxEventBytes.
  absl::Status Add(std::string_view bytes, const std::function<void(std::string_view data)>& take);

  // Whether bytes of an event that is not complete have come.
  bool partial() const { return !line_.empty() || has_data_; }

 private:
  void TakeLine(std::string_view line, const std::function<void(std::string_view)>& take);

  std::string line_;  // not complete yet
  std::string data_;
  bool has_data_ = false;
};

}  // namespace dovetail::loadgen
