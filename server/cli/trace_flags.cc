#include "server/cli/trace_flags.h"

#include <cstdlib>

#include "server/cli/command_line.h"
#include "server/version.h"

namespace dovetail::cli {

void AddTraceFlags(CLI::App& command, TraceFlags& flags) {
  command
      .add_option("--otlp-traces-endpoint", flags.endpoint,
                  "Send traces to this OpenTelemetry collector by OTLP over HTTP, as http://127.0.0.1:4318/v1/traces; "
                  "else nowhere")
      ->type_name("URL")
      ->group("Traces");
}

void AddSampleRateFlag(CLI::App& command, double& rate) {
  command
      .add_option("--otlp-traces-sample-rate", rate,
                  "Which part of the requests is traced, 0 to 1, of those without a traceparent; others say it "
                  "themselves")
      ->check(Number(0, 1))
      ->type_name("RATE")
      ->group("Traces");
}

absl::Status CheckTraceFlags(const TraceFlags& flags) {
  return flags.endpoint.empty() ? absl::OkStatus() : tracing::ParseEndpoint(flags.endpoint).status();
}

absl::StatusOr<std::shared_ptr<tracing::OtlpExporter>> MakeExporter(const TraceFlags& flags, const std::string& service,
                                                                    const std::string& instance) {
  if (flags.endpoint.empty()) return nullptr;
  DT_ASSIGN_OR_RETURN(const http_client::Url endpoint, tracing::ParseEndpoint(flags.endpoint));
  const char* const named = std::getenv("OTEL_SERVICE_NAME");
  const std::string name = named != nullptr && *named != '\0' ? named : service;
  return std::make_shared<tracing::OtlpExporter>(endpoint, tracing::Resource{name, instance, kVersion});
}

std::vector<std::string> ArgumentsOf(const TraceFlags& flags) {
  if (flags.endpoint.empty()) return {};
  return {"--otlp-traces-endpoint", flags.endpoint};
}

}  // namespace dovetail::cli
