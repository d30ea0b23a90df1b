#include "tests/support/threads.h"

#include <dirent.h>

#include <cstdlib>
#include <fstream>

namespace dovetail::test {

std::vector<pid_t> Threads() {
  std::vector<pid_t> threads;
  DIR* const folder = opendir("/proc/self/task");
  if (folder == nullptr) return threads;
  while (const dirent* const entry = readdir(folder))
    if (const int thread = std::atoi(entry->d_name); thread > 0) threads.push_back(thread);
  closedir(folder);
  return threads;
}

std::string NameOfThread(pid_t thread) {
  std::string name;
  std::getline(std::ifstream("/proc/self/task/" + std::to_string(thread) + "/comm"), name);
  return name;
}

}  // namespace dovetail::test
