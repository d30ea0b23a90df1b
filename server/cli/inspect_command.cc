#include <cstdio>

#include "model/checkpoint.h"
#include "model/describe.h"
#include "server/cli/commands.h"
#include "server/cli/whole_path.h"

namespace dovetail::cli {

absl::Status RunInspect(const std::string& model) {
  const auto checkpoint = model::OpenCheckpoint(model);
  if (!checkpoint.ok()) return OfWholePath(checkpoint.status(), model);
  std::fputs(model::Describe(**checkpoint).c_str(), stdout);
  return absl::OkStatus();
}

}  // namespace dovetail::cli
