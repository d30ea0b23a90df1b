#pragma once
#include <string>
#include <vector>

#include "base/span_sink.h"

namespace dovetail::tracing {

// Which process speaks: OpenTelemetry's resource.
struct Resource {
  std::string service;   // service.name
  std::string instance;  // service.instance.id
  std::string version;   // service.version
};

// The body of an OTLP/HTTP request: ExportTraceServiceRequest of opentelemetry-proto 1.x in its JSON mapping (ids in
// hexadecimal, times as decimal strings of nanoseconds, enums as numbers). Spans without an id get one here.
// `to_time_of_day` is added to every time.
// Source: https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding
// Threads: thread-safe.
std::string OtlpJson(const Resource& resource, const std::vector<Span>& spans, absl::Duration to_time_of_day);

}  // namespace dovetail::tracing
