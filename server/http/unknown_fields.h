#pragma once
#include <set>
#include <string>

#include "base/mutex.h"
#include "server/http/routes.h"
#include "server/openai/json.h"

namespace dovetail::server {

// Says in the log which fields of requests nothing here knows, so that none is ignored without a word: each name once,
// a warning each, for completions and chats in OpenAI's and llama-server's form. What would change an answer under a
// name that is known elsewhere is refused before (unsupported_fields.h).
// Threads: thread-safe.
class UnknownFields {
 public:
  static constexpr size_t kMaxNames = 100;     // that are told
  static constexpr size_t kMaxNameBytes = 64;  // of one, the rest of it is cut off

  void Note(const Route& route, const Json& body);

 private:
  Mutex mutex_;
  std::set<std::string> told_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace dovetail::server
