#pragma once
#include <CLI/CLI.hpp>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "server/metrics/request_trace.h"
#include "tracing/otlp_exporter.h"

namespace dovetail::cli {

// Where a role sends its spans of sampled traces.
// Threads: thread-compatible; a value.
struct TraceFlags {
  std::string endpoint;  // empty: nowhere
};
void AddTraceFlags(CLI::App& command, TraceFlags& flags);
absl::Status CheckTraceFlags(const TraceFlags& flags);  // kInvalidArgument names the flag

// Null without an endpoint. `service`: dovetail-scheduler and so on, unless OTEL_SERVICE_NAME names another;
// `instance`: which of them.
// Threads: thread-safe; reads the environment.
absl::StatusOr<std::shared_ptr<tracing::OtlpExporter>> MakeExporter(const TraceFlags& flags, const std::string& service,
                                                                    const std::string& instance);

void AddSampleRateFlag(CLI::App& command, double& rate);

// The flags again, for another process.
std::vector<std::string> ArgumentsOf(const TraceFlags& flags);

}  // namespace dovetail::cli
