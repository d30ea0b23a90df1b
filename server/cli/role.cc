#include "server/cli/role.h"

#include <sys/resource.h>

#include "base/thread_name.h"

namespace dovetail::cli {
namespace {

// A limit of one byte also keeps the kernel from handing the dump to a program (core(5)), to which zero means nothing.
void ForbidCoreDumps() {
  const rlimit none{1, 1};
  setrlimit(RLIMIT_CORE, &none);
}

// A connection, a file and a peer are a descriptor each; the soft limit is often 1024 for the sake of select(2).
void RaiseOpenFileLimit() {
  rlimit files;
  if (getrlimit(RLIMIT_NOFILE, &files) != 0) return;
  files.rlim_cur = files.rlim_max;
  setrlimit(RLIMIT_NOFILE, &files);
}

}  // namespace

void BeginRole(const std::string& name) {
  NameThread("dt-" + name);
  ForbidCoreDumps();
  RaiseOpenFileLimit();
}

}  // namespace dovetail::cli
