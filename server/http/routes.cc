#include "server/http/routes.h"

namespace dovetail::server {
namespace {

constexpr Route kRoutes[] = {
    {RouteId::kPage, "GET", "/", Scope::kOpen},
    {RouteId::kDocs, "GET", "/docs", Scope::kOpen},
    {RouteId::kOpenApi, "GET", "/openapi.json", Scope::kInference},
    {RouteId::kModels, "GET", "/v1/models", Scope::kInference},
    {RouteId::kModel, "GET", "/v1/models/", Scope::kInference},
    {RouteId::kCompletions, "POST", "/v1/completions", Scope::kInference},
    {RouteId::kLlama, "POST", "/completion", Scope::kInference},
    {RouteId::kLlama, "POST", "/completions", Scope::kInference},
    {RouteId::kInfill, "POST", "/infill", Scope::kInference},
    {RouteId::kApplyTemplate, "POST", "/apply-template", Scope::kInference},
    {RouteId::kProps, "GET", "/props", Scope::kInference},
    {RouteId::kSlots, "GET", "/slots", Scope::kInference},
    {RouteId::kChat, "POST", "/v1/chat/completions", Scope::kInference},
    {RouteId::kChat, "POST", "/chat/completions", Scope::kInference},
    {RouteId::kResponses, "POST", "/v1/responses", Scope::kInference},
    {RouteId::kMessages, "POST", "/v1/messages", Scope::kInference},
    {RouteId::kCountTokens, "POST", "/v1/messages/count_tokens", Scope::kInference},
    {RouteId::kTokenize, "POST", "/tokenize", Scope::kInference},
    {RouteId::kDetokenize, "POST", "/detokenize", Scope::kInference},
    {RouteId::kTokenizerInfo, "GET", "/tokenizer_info", Scope::kInference},
    {RouteId::kHealth, "GET", "/health", Scope::kOpen},
    {RouteId::kLive, "GET", "/live", Scope::kOpen},
    {RouteId::kReady, "GET", "/ready", Scope::kOpen},
    {RouteId::kVersion, "GET", "/version", Scope::kInference},
    {RouteId::kMetrics, "GET", "/metrics", Scope::kMetrics},
};

}  // namespace

std::span<const Route> Routes() { return kRoutes; }

RouteMatch MatchRoute(std::string_view method, std::string_view path) {
  RouteMatch match;
  for (const Route& route : kRoutes) {
    const bool prefix = route.takes_rest();
    if (prefix ? !(path.size() > route.path.size() && path.substr(0, route.path.size()) == route.path)
               : path != route.path)
      continue;
    if (method == route.method || (method == "HEAD" && route.method == "GET")) {
      match.route = &route;
      if (prefix) match.rest = path.substr(route.path.size());
      return match;
    }
    match.allow = route.method == "GET" ? "GET, HEAD" : std::string(route.method);
  }
  return match;
}

}  // namespace dovetail::server
