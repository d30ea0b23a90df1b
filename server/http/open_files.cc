#include "server/http/open_files.h"

#include <dirent.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace dovetail::server {
namespace {

constexpr char kFolder[] = "/proc/self/fd";

// -1: cannot be said.
int64_t CountInUse() {
  struct stat info {};
  if (stat(kFolder, &info) == 0 && info.st_size > 0) return info.st_size;  // Linux 6.2
  DIR* folder = opendir(kFolder);
  if (folder == nullptr) return -1;
  int64_t count = 0;
  while (const dirent* entry = readdir(folder)) count += entry->d_name[0] != '.';
  closedir(folder);
  return count - 1;  // the folder itself
}

}  // namespace

OpenFiles CountOpenFiles() {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  OpenFiles files;
  files.allowed = static_cast<int64_t>(std::min<rlim_t>(limit.rlim_cur, int64_t{1} << 40));
  files.in_use = CountInUse();
  if (files.in_use < 0) files.in_use = files.allowed;
  return files;
}

ConnectionLimit LimitConnections(int wanted, const OpenFiles& files) {
  constexpr int kKept = kProbeConnections + kEndingConnections + kOtherFiles;
  const int64_t possible = files.allowed - files.in_use - kKept;
  if (wanted <= possible)
    return {wanted, absl::StrCat("at most ", wanted, " connections (--max-connections); ", files.allowed,
                                 " files may be open (ulimit -n)")};
  return {possible,
          absl::StrCat("at most ", std::max<int64_t>(possible, 0), " connections, not the ", wanted,
                       " of --max-connections: ", files.allowed, " files may be open (ulimit -n), ", files.in_use,
                       " are in use and ", kKept, " kept for probes and other files; ulimit -n ",
                       files.in_use + kKept + wanted, " would do")};
}

}  // namespace dovetail::server
