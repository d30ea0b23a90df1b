#pragma once
#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "absl/time/time.h"
#include "base/trace_context.h"

// What a process records of traces. The nodes know this contract only; tracing/otlp_exporter.h sends what they record.
// Times are those of base/clock.h.

namespace dovetail {

// Threads: thread-compatible; a value.
struct SpanAttribute {
  const char* key;  // a literal
  std::variant<std::string, int64_t, double> value;
};

// A piece of work of one trace that has ended.
struct Span {
  TraceContext parent;     // parent.span 0: it is the trace's first
  uint64_t id = 0;         // 0: nothing refers to it
  const char* name = "";   // a literal
  bool of_server = false;  // it answers a client
  absl::Time begin, end;
  std::vector<SpanAttribute> attributes;
  std::string error;  // empty: it went well
};

// One sequence's part of one step. A stream of tokens has many a second: they become one span for each second.
struct StepPart {
  TraceContext parent;
  const char* name = "";  // a literal
  absl::Time begin, end;
  int64_t tokens = 0;
  int64_t dense_us = 0, attention_us = 0;  // of the whole step; 0: not known here
};

// A call costs a push into a bounded queue: it never waits, and what finds no room is dropped and counted.
// Threads: thread-safe.
class SpanSink {
 public:
  virtual ~SpanSink() = default;
  virtual void Add(Span span) = 0;
  virtual void AddStep(const StepPart& part) = 0;
};

}  // namespace dovetail
