#include "base/thread_name.h"

#include <sys/prctl.h>

#include <string>

namespace dovetail {

void NameThread(std::string_view name) {
  constexpr size_t kMostBytes = 15;
  prctl(PR_SET_NAME, std::string(name.substr(0, kMostBytes)).c_str());
}

}  // namespace dovetail
