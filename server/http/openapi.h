#pragma once
#include <string>

namespace dovetail::server {

// What this server answers, as OpenAPI 3.1: every route of routes.h with who may ask, the fields of its body with their
// ranges (parameters.h), and its errors. `version`: of this server. Pure; thread-safe.
std::string OpenApiText(const std::string& version);

}  // namespace dovetail::server
