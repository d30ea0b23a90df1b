#pragma once
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/sha256.h"
#include "server/http/api_key.h"
#include "server/http/request_head.h"

namespace dovetail::server {

enum class Scope {
  kOpen,       // no key
  kInference,  // an API key
  kMetrics,    // a metrics key; if there are none, an API key
};

inline constexpr char kAnonymousTenant[] = "anonymous";  // of a server without keys
inline constexpr char kUnnamedTenantPrefix[] = "key-";   // then 16 hexadecimal digits of the key's digest

// The keys as SHA-256 digests; what a client sends is hashed and compared with all of them in constant time.
// Threads: immutable.
class KeyRing {
 public:
  KeyRing(const std::vector<ApiKey>& api_keys, const std::vector<ApiKey>& metrics_keys);

  // The tenant that the head's credentials (Authorization: Bearer, or X-Api-Key) belong to, or nullopt: refused.
  // Without any API keys every client is "anonymous".
  std::optional<std::string> Authorize(const RequestHead& head, Scope scope) const;

  bool closed() const { return !api_.empty(); }

 private:
  struct Key {
    Sha256Digest digest;
    std::string tenant;
  };
  static std::vector<Key> Hashed(const std::vector<ApiKey>& keys);
  static const Key* Match(const std::vector<Key>& keys, const Sha256Digest& digest);

  const std::vector<Key> api_;
  const std::vector<Key> metrics_;
};

}  // namespace dovetail::server
