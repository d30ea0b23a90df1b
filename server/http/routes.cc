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
    {RouteId::kEmbeddings, "POST", "/v1/embeddings", Scope::kInference},
    {RouteId::kLlamaEmbeddings, "POST", "/embedding", Scope::kInference},
    {RouteId::kLlamaEmbeddings, "POST", "/embeddings", Scope::kInference},
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

struct NotServed {
  std::string_view path;  // and what lies below it
  std::string_view why;
};

constexpr std::string_view kNoPooling = "Vectors of texts are made at /v1/embeddings alone.";
constexpr std::string_view kNoRanking = "Documents are not ranked here: this server generates text and embeddings.";
constexpr std::string_view kTextOnly = "This server reads and writes text only.";
constexpr std::string_view kKeepsNothing = "This server keeps nothing between requests: send the whole conversation.";
constexpr std::string_view kNoBatches =
    "Batches are not kept here: send their requests one by one; as many run together as there is room.";
constexpr NotServed kNotServed[] = {
    {"/pooling", kNoPooling},
    {"/score", kNoRanking},
    {"/v1/score", kNoRanking},
    {"/v1/rerank", kNoRanking},
    {"/v2/rerank", kNoRanking},
    {"/rerank", kNoRanking},
    {"/v1/reranking", kNoRanking},
    {"/reranking", kNoRanking},
    {"/v1/audio", kTextOnly},
    {"/v1/images", kTextOnly},
    {"/v1/responses", kKeepsNothing},
    {"/v1/conversations", kKeepsNothing},
    {"/v1/files", kKeepsNothing},
    {"/v1/batches", kNoBatches},
    {"/v1/messages/batches", kNoBatches},
    {"/lora-adapters", "Adapters are not loaded here: merge one into the model."},
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

std::string_view WhyNotServed(std::string_view path) {
  for (const NotServed& one : kNotServed)
    if (path.substr(0, one.path.size()) == one.path && (path.size() == one.path.size() || path[one.path.size()] == '/'))
      return one.why;
  return {};
}

}  // namespace dovetail::server
