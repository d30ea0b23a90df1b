#pragma once
#include <set>
#include <string>

#include "server/http/routes.h"

namespace dovetail::server {

// What this server answers, as OpenAPI 3.1: every route of routes.h with the keys that it takes, the fields of its body
// with their ranges (parameters.h), and its errors. `version`: of this server.
// Threads: pure.
std::string OpenApiText(const std::string& version);

// The fields of the route's body there. Pure; thread-safe.
std::set<std::string> FieldsOf(RouteId route);

}  // namespace dovetail::server
