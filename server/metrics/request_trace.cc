#include "server/metrics/request_trace.h"

#include <cmath>

namespace dovetail::server {
namespace {

// As OpenTelemetry's TraceIdRatioBased: the lower half of the id decides, so that all that see the trace agree.
bool Sampled(uint64_t trace_low, double rate) { return std::ldexp(static_cast<double>(trace_low >> 11), -53) < rate; }

}  // namespace

RequestTrace BeginTrace(const TraceOptions& options, std::optional<std::string_view> traceparent) {
  if (options.sink == nullptr) return {};
  TraceContext context;
  const auto parent = traceparent ? ParseTraceparent(*traceparent) : std::nullopt;
  if (parent) {
    context = *parent;
  } else {
    context.trace_high = NewSpanId();
    context.trace_low = NewSpanId();
    context.sampled = Sampled(context.trace_low, options.sample_rate);
  }
  if (!context.sampled) return {};
  context.span = NewSpanId();
  return {options.sink, context, parent ? parent->span : 0};
}

}  // namespace dovetail::server
