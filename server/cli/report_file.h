#pragma once
#include <string>

#include "base/status.h"
#include "report/figure.h"

// --report of the commands that measure and predict.

namespace dovetail::cli {

inline constexpr const char* kReportHelp =
    "Also write a report to look at: one HTML file with pictures and their numbers, which loads nothing from elsewhere";

// Whether `path` can be written. Called before the work begins, so that no result is lost. What is there stays as it
// is. kInvalidArgument names --report and the path. An empty path is no report, and fine.
// Threads: thread-safe; blocks on the file.
absl::Status CheckReportPath(const std::string& path);

// Writes the report, if `path` is not empty, with the day at its end, and says so on
// standard error. kUnavailable names the path.
// Threads: thread-safe; blocks on the file.
absl::Status WriteReport(report::Report report, const std::string& path);

}  // namespace dovetail::cli
