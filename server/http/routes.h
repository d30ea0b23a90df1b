#pragma once
#include <span>
#include <string>
#include <string_view>

#include "server/http/key_ring.h"

namespace dovetail::server {

enum class RouteId {
  kPage,
  kDocs,
  kOpenApi,
  kModels,
  kModel,
  kCompletions,
  kChat,
  kResponses,
  kMessages,
  kCountTokens,
  kLlama,
  kInfill,
  kEmbeddings,
  kLlamaEmbeddings,
  kApplyTemplate,
  kProps,
  kSlots,
  kTokenize,
  kDetokenize,
  kTokenizerInfo,
  kHealth,
  kLive,
  kReady,
  kVersion,
  kMetrics,
};

struct Route {
  RouteId id;
  std::string_view method;  // GET answers HEAD too
  std::string_view path;    // ending in '/' (the root aside): any non-empty rest follows
  Scope scope;

  bool takes_rest() const { return path.size() > 1 && path.back() == '/'; }
};

// Everything this server answers; what is not here is 404, or 401 first.
// Threads: pure; the table is immutable.
std::span<const Route> Routes();

struct RouteMatch {
  const Route* route = nullptr;  // null: no such path, or not with this method
  std::string_view rest;         // behind a path ending in '/'
  std::string allow;             // methods of the path, if only the method is wrong
};
RouteMatch MatchRoute(std::string_view method, std::string_view path);

// Of a path that other servers have and this one does not: why, and what to use. Empty: of any other.
std::string_view WhyNotServed(std::string_view path);

}  // namespace dovetail::server
