#include "server/http/key_ring.h"

#include <span>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/constant_time.h"

namespace dovetail::server {
namespace {

Sha256Digest Hash(std::string_view key) { return Sha256(std::as_bytes(std::span(key.data(), key.size()))); }

std::optional<std::string_view> Credential(const RequestHead& head) {
  constexpr std::string_view kBearer = "bearer ";
  if (const std::string* authorization = head.Find("authorization")) {
    if (authorization->size() <= kBearer.size() || !absl::StartsWithIgnoreCase(*authorization, "bearer "))
      return std::nullopt;
    return std::string_view(*authorization).substr(kBearer.size());
  }
  if (const std::string* key = head.Find("x-api-key")) return *key;
  return std::nullopt;
}

}  // namespace

KeyRing::KeyRing(const std::vector<ApiKey>& api_keys, const std::vector<ApiKey>& metrics_keys)
    : api_(Hashed(api_keys)), metrics_(Hashed(metrics_keys)) {}

std::vector<KeyRing::Key> KeyRing::Hashed(const std::vector<ApiKey>& keys) {
  std::vector<Key> hashed;
  for (const ApiKey& key : keys) {
    const Sha256Digest digest = Hash(key.key);
    const std::string prefix(reinterpret_cast<const char*>(digest.data()), 8);
    hashed.push_back(
        {digest, key.tenant.empty() ? absl::StrCat(kUnnamedTenantPrefix, absl::BytesToHexString(prefix)) : key.tenant});
  }
  return hashed;
}

// Looks at every key, so that time does not tell which one came close.
const KeyRing::Key* KeyRing::Match(const std::vector<Key>& keys, const Sha256Digest& digest) {
  const Key* match = nullptr;
  for (const Key& key : keys)
    if (EqualInConstantTime(key.digest, digest)) match = &key;
  return match;
}

std::optional<std::string> KeyRing::Authorize(const RequestHead& head, Scope scope) const {
  const bool own_scope = scope == Scope::kMetrics && !metrics_.empty();
  const std::vector<Key>& keys = own_scope ? metrics_ : api_;
  if (scope == Scope::kOpen || keys.empty()) return kAnonymousTenant;
  const auto credential = Credential(head);
  if (!credential) return std::nullopt;
  const Key* key = Match(keys, Hash(*credential));
  if (key == nullptr) return std::nullopt;
  return key->tenant;
}

}  // namespace dovetail::server
