#pragma once
#include <algorithm>
#include <chrono>
#include <limits>

namespace dovetail::engine {

// The least seconds of one call of `run`, of at least three and of those that `seconds` hold: what else the machine
// does only adds to a time.
// Threads: thread-safe; `run` is called on the calling thread.
template <typename Run>
double BestSeconds(double seconds, Run&& run) {
  using Clock = std::chrono::steady_clock;
  const auto since = [](Clock::time_point begin) {
    return std::chrono::duration<double>(Clock::now() - begin).count();
  };
  double best = std::numeric_limits<double>::infinity();
  const auto begin = Clock::now();
  for (int calls = 0; calls < 3 || since(begin) < seconds; ++calls) {
    const auto before = Clock::now();
    run();
    best = std::min(best, since(before));
  }
  return best;
}

}  // namespace dovetail::engine
