#include "server/http/api_key.h"

#include <cctype>
#include <map>
#include <string_view>

#include "server/http/key_ring.h"

namespace dovetail::server {
namespace {

constexpr size_t kMostKeyBytes = 1024, kMostTenantBytes = 64;

bool IsTenantName(const std::string& name) {
  if (name.size() > kMostTenantBytes) return false;
  for (const unsigned char c : name)
    if (!std::isalnum(c) && c != '.' && c != '_' && c != '-') return false;
  return true;
}

}  // namespace

absl::Status CheckApiKey(const std::string& where, const ApiKey& key) {
  if (key.key.empty() || key.key.size() > kMostKeyBytes)
    return InvalidArgument(where, ": a key must have 1 to ", kMostKeyBytes, " characters");
  for (const unsigned char c : key.key)
    if (c <= 0x20 || c >= 0x7f)
      return InvalidArgument(where, ": a key may only have visible ASCII characters, as it travels in a header");
  if (!IsTenantName(key.tenant))
    return InvalidArgument(where, ": a tenant's name has at most ", kMostTenantBytes,
                           " characters of A-Z, a-z, 0-9, '.', '_' and '-'");
  if (key.tenant == kAnonymousTenant || key.tenant.rfind(kUnnamedTenantPrefix, 0) == 0)
    return InvalidArgument(where, ": a tenant cannot be named ", key.tenant, "; names that begin with ",
                           kUnnamedTenantPrefix, " and ", kAnonymousTenant, " are taken");
  return absl::OkStatus();
}

absl::Status CheckTenants(const std::string& where, const std::vector<ApiKey>& keys) {
  std::map<std::string_view, std::string_view> tenants;
  for (const ApiKey& key : keys)
    if (const auto [it, first] = tenants.emplace(key.key, key.tenant); !first && it->second != key.tenant)
      return InvalidArgument(where, ": one key is given twice, for the tenants '", std::string(it->second), "' and '",
                             key.tenant, "'; a key belongs to one");
  return absl::OkStatus();
}

}  // namespace dovetail::server
