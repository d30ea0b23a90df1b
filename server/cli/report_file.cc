#include "server/cli/report_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "report/html.h"

namespace dovetail::cli {

absl::Status CheckReportPath(const std::string& path) {
  if (path.empty()) return absl::OkStatus();
  struct stat about {};
  const bool is_there = stat(path.c_str(), &about) == 0;
  const auto refused = [&](const char* why) {
    return InvalidArgument("--report: ", path, ": cannot be written: ", why,
                           "; name a file in a folder that is there and may be written to");
  };
  if (is_there && S_ISDIR(about.st_mode)) return refused("is a folder");
  const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0666);
  if (file < 0) return refused(std::strerror(errno));
  close(file);
  if (!is_there) unlink(path.c_str());
  return absl::OkStatus();
}

absl::Status WriteReport(report::Report report, const std::string& path) {
  if (path.empty()) return absl::OkStatus();
  report.footer =
      absl::StrCat("Written by dovetail on ", absl::FormatTime("%Y-%m-%d at %H:%M", absl::Now(), absl::LocalTimeZone()),
                   ". Every number of a picture is in the table below it.");
  std::ofstream file(path, std::ios::trunc | std::ios::binary);
  file << report::HtmlOf(report);
  file.close();
  if (!file) return absl::UnavailableError(absl::StrCat("--report: ", path, ": cannot be written"));
  std::fprintf(stderr, "report in %s\n", path.c_str());
  return absl::OkStatus();
}

}  // namespace dovetail::cli
