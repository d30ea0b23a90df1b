#pragma once
#include <string>

// DT_CHECK(condition) and DT_CHECK(condition, "message with ", parts): a broken invariant is a bug. On in release
// builds too: prints the file, the condition and the message and aborts. Never used for what a user, file or peer can
// cause.
// Threads: thread-safe.

#include "absl/strings/str_cat.h"

namespace dovetail::internal {
[[noreturn]] void CheckFailed(const char* file, int line, const char* condition, const std::string& message);
inline std::string CheckMessage() { return {}; }
template <typename... Args>
std::string CheckMessage(const Args&... args) {
  return absl::StrCat(args...);
}
}  // namespace dovetail::internal

#define DT_CHECK(condition, ...)                                                          \
  do {                                                                                    \
    if (!(condition)) [[unlikely]]                                                        \
      ::dovetail::internal::CheckFailed(__FILE__, __LINE__, #condition,                   \
                                        ::dovetail::internal::CheckMessage(__VA_ARGS__)); \
  } while (false)
