#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace dovetail {

// Where in a distributed trace a piece of work belongs.
// Source: W3C Trace Context, level 1
// Threads: thread-compatible; a value.
struct TraceContext {
  uint64_t trace_high = 0, trace_low = 0;  // the trace's id; both 0: there is none
  uint64_t span = 0;                       // the span under which the work is done
  bool sampled = false;                    // its spans are recorded

  bool operator==(const TraceContext&) const = default;
};

// Reads a `traceparent` header: "00-" 32 digits "-" 16 digits "-" 2 digits, all lower-case hexadecimal. A later version
// is read as far as it begins in this way; nullopt for anything else, as the recommendation says.
// Threads: thread-safe.
std::optional<TraceContext> ParseTraceparent(std::string_view header);

std::string TraceIdText(const TraceContext& context);  // 32 digits
std::string SpanIdText(uint64_t span);                 // 16 digits

// Random, not 0.
// Threads: thread-safe.
uint64_t NewSpanId();

}  // namespace dovetail
