#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "base/ids.h"
#include "base/status.h"

namespace dovetail {

// What a node did and when, to show what ran at the same time: the last kMostSpans of it. Recording neither allocates
// nor locks.
// Threads: thread-compatible; one thread adds spans, and they are read after it has stopped.
class Trace {
 public:
  static constexpr size_t kMostSpans = 1 << 16;

  struct Span {
    const char* what = "";  // a literal
    absl::Time begin;
    absl::Duration duration;  // zero: an instant
    StepId step;
    MicroBatchId micro_batch;
    int op = -1;  // attention op, or piece of the dense program
  };

  // `process` names the node.
  explicit Trace(std::string process) : process_(std::move(process)) { spans_.reserve(kMostSpans); }

  void Add(const Span& span) {
    if (spans_.size() < kMostSpans) {
      spans_.push_back(span);
    } else {
      spans_[next_++ % kMostSpans] = span;
    }
  }

  // In the order in which they were added.
  std::vector<Span> Spans() const;
  const std::string& process() const { return process_; }

 private:
  const std::string process_;
  std::vector<Span> spans_;
  size_t next_ = 0;
};

// A Chrome trace (chrome://tracing, ui.perfetto.dev): a process per node, a row per micro-batch.
std::string ChromeTrace(const std::vector<const Trace*>& traces);

// kUnavailable: the file cannot be written. An empty path: nothing happens.
// Threads: called when nothing adds to the traces any more; blocks on the file.
absl::Status WriteChromeTrace(const std::string& path, const std::vector<const Trace*>& traces);

}  // namespace dovetail
