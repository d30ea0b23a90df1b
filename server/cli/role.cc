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

}  // namespace

void BeginRole(const std::string& name) {
  NameThread("dt-" + name);
  ForbidCoreDumps();
}

}  // namespace dovetail::cli
