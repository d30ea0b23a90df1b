#include "tracing/otlp_json.h"

#include <algorithm>
#include <nlohmann/json.hpp>

namespace dovetail::tracing {
namespace {

using Json = nlohmann::ordered_json;

// opentelemetry.proto.trace.v1
constexpr int kSpanKindInternal = 1, kSpanKindServer = 2;
constexpr int kStatusError = 2;

Json AttributeJson(const char* key, const std::string& value) {
  return {{"key", key}, {"value", {{"stringValue", value}}}};
}
Json AttributeJson(const char* key, int64_t value) {
  return {{"key", key}, {"value", {{"intValue", std::to_string(value)}}}};  // 64 bits travel as text
}
Json AttributeJson(const char* key, double value) { return {{"key", key}, {"value", {{"doubleValue", value}}}}; }

std::string Nanoseconds(absl::Time time) { return std::to_string(absl::ToUnixNanos(time)); }

Json SpanJson(const Span& span, absl::Duration to_time_of_day) {
  Json json = {{"traceId", TraceIdText(span.parent)}, {"spanId", SpanIdText(span.id != 0 ? span.id : NewSpanId())}};
  if (span.parent.span != 0) json["parentSpanId"] = SpanIdText(span.parent.span);
  json["name"] = span.name;
  json["kind"] = span.of_server ? kSpanKindServer : kSpanKindInternal;
  json["startTimeUnixNano"] = Nanoseconds(span.begin + to_time_of_day);
  json["endTimeUnixNano"] = Nanoseconds(std::max(span.begin, span.end) + to_time_of_day);
  json["attributes"] = Json::array();
  for (const SpanAttribute& attribute : span.attributes)
    json["attributes"].push_back(
        std::visit([&](const auto& value) { return AttributeJson(attribute.key, value); }, attribute.value));
  if (!span.error.empty()) json["status"] = {{"code", kStatusError}, {"message", span.error}};
  return json;
}

}  // namespace

std::string OtlpJson(const Resource& resource, const std::vector<Span>& spans, absl::Duration to_time_of_day) {
  Json list = Json::array();
  for (const Span& span : spans) list.push_back(SpanJson(span, to_time_of_day));
  const Json body = {
      {"resourceSpans",
       Json::array({{{"resource",
                      {{"attributes", Json::array({AttributeJson("service.name", resource.service),
                                                   AttributeJson("service.instance.id", resource.instance),
                                                   AttributeJson("service.version", resource.version)})}}},
                     {"scopeSpans", Json::array({{{"scope", {{"name", "dovetail"}}}, {"spans", list}}})}}})}};
  return body.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace dovetail::tracing
