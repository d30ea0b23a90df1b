#pragma once
#include <string>
#include <vector>

#include "base/status.h"

namespace dovetail::server {

// A key that a client presents, and the tenant that it then acts for.
// Threads: immutable.
struct ApiKey {
  std::string key;     // 1..1024 visible ASCII characters
  std::string tenant;  // 1..64 of A-Z a-z 0-9 . _ -; empty: a tenant of its own, named after the key's digest

  ApiKey(std::string k, std::string t = {}) : key(std::move(k)), tenant(std::move(t)) {}  // NOLINT: a key is one
  ApiKey(const char* k) : key(k) {}                                                       // NOLINT: so is its text
};

// kInvalidArgument names `where` (a flag, a file and its line, a variable), never the key: a key that a header cannot
// carry, a tenant's name that is none or that unnamed keys and open servers use.
absl::Status CheckApiKey(const std::string& where, const ApiKey& key);

// kInvalidArgument: the same key twice, for two tenants.
absl::Status CheckTenants(const std::string& where, const std::vector<ApiKey>& keys);

}  // namespace dovetail::server
