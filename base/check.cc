#include "base/check.h"

#include <cstdio>
#include <cstdlib>

#include "base/log.h"

namespace dovetail::internal {

void CheckFailed(const char* file, int line, const char* condition, const std::string& message) {
  FlushLog(absl::Milliseconds(200));  // what led to it
  std::fprintf(stderr, "%s:%d: check failed: %s %s\n", file, line, condition, message.c_str());
  std::fflush(stderr);
  std::abort();
}

}  // namespace dovetail::internal
