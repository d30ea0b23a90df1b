#include <cstdio>

#include "model/checkpoint.h"
#include "model/describe.h"
#include "server/cli/commands.h"

namespace dovetail::cli {

absl::Status RunInspect(const std::string& model) {
  DT_ASSIGN_OR_RETURN(const auto checkpoint, model::OpenCheckpoint(model));
  std::fputs(model::Describe(*checkpoint).c_str(), stdout);
  return absl::OkStatus();
}

}  // namespace dovetail::cli
