#pragma once
#include <memory>
#include <optional>
#include <string_view>

#include "base/span_sink.h"

namespace dovetail::server {

// Where traces of requests go, and which are taken.
// Threads: thread-compatible; a value.
struct TraceOptions {
  std::shared_ptr<SpanSink> sink;  // null: none are
  double sample_rate = 1;          // of requests that bring no traceparent, 0..1; others' own flag decides
};

// The server's span of one request.
// Threads: thread-compatible; a value.
struct RequestTrace {
  std::shared_ptr<SpanSink> sink;  // null: not sampled
  TraceContext context;            // what is done for the request is done under this: its span is the request's own
  uint64_t parent = 0;             // 0: the trace begins here
};

// `traceparent`: what the client sent under that name. One that is malformed counts as none.
// Threads: thread-safe.
RequestTrace BeginTrace(const TraceOptions& options, std::optional<std::string_view> traceparent);

}  // namespace dovetail::server
