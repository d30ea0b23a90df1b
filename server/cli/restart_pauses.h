#pragma once
#include <algorithm>
#include <map>
#include <string>

#include "absl/time/time.h"

namespace dovetail::cli {

// When a process that ended is started again: soon, and later and later while it ends soon after its start each time.
// Threads: thread-compatible; a value.
class RestartPauses {
 public:
  static constexpr absl::Duration kFirst = absl::Milliseconds(200);
  static constexpr absl::Duration kLongest = absl::Seconds(10);
  static constexpr absl::Duration kQuickEnd = absl::Seconds(3);  // of a life
  static constexpr int kQuickEndsOfOneThatStaysUp = 2;           // in a row

  void Started(const std::string& name, absl::Time now) { lives_[name].started = now; }

  // It ended: how long to wait before another is started.
  absl::Duration Ended(const std::string& name, absl::Time now) {
    Life& life = lives_[name];
    life.quick_ends = now - life.started < kQuickEnd ? life.quick_ends + 1 : 0;
    absl::Duration pause = kFirst;
    for (int i = kQuickEndsOfOneThatStaysUp; i < life.quick_ends && pause < kLongest; ++i) pause *= 2;
    return std::min(pause, kLongest);
  }

  // Its ends in a row that came soon after its start.
  int QuickEnds(const std::string& name) const {
    const auto life = lives_.find(name);
    return life == lives_.end() ? 0 : life->second.quick_ends;
  }
  bool StaysUp(const std::string& name) const { return QuickEnds(name) <= kQuickEndsOfOneThatStaysUp; }

 private:
  struct Life {
    absl::Time started = absl::InfinitePast();
    int quick_ends = 0;
  };
  std::map<std::string, Life> lives_;
};

}  // namespace dovetail::cli
