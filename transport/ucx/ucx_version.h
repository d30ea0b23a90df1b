#pragma once
#include "absl/status/status.h"

namespace dovetail::transport::ucx {

struct UcxVersion {
  unsigned major = 0, minor = 0;
};

// Whether a program built for one version of UCX works with another that is loaded: of the same major, not older.
// Errors: kFailedPrecondition names both and the remedy.
absl::Status CheckUcxVersion(UcxVersion built, UcxVersion loaded);

// The same of this program.
// Threads: thread-safe.
absl::Status CheckLoadedUcx();

}  // namespace dovetail::transport::ucx
