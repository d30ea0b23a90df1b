#include <dirent.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <string>
#include <thread>

#include "server/cli/terminal.h"

// Ctrl-C of `dovetail run`.

namespace dovetail::cli {
namespace {

bool Until(const auto& condition) {
  for (int i = 0; i < 10'000; ++i) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}

// The thread of this process with this name, or 0.
pid_t ThreadCalled(const std::string& name) {
  pid_t found = 0;
  DIR* const folder = opendir("/proc/self/task");
  while (const dirent* const entry = readdir(folder)) {
    std::string comm;
    std::getline(std::ifstream(std::string("/proc/self/task/") + entry->d_name + "/comm"), comm);
    if (comm == name) found = std::atoi(entry->d_name);
  }
  closedir(folder);
  return found;
}

// The terminal's signal may come to any thread, and ends what that one reads.
TEST(Interrupts, AreSeenAlsoAfterOneCameToTheThreadThatWatchesForThem) {
  Interrupts interrupts;
  pid_t watcher = 0;
  ASSERT_TRUE(Until([&] { return (watcher = ThreadCalled("dt-interrupts")) != 0; }));
  for (int i = 0; i < 10; ++i) {
    ASSERT_EQ(syscall(SYS_tgkill, getpid(), watcher, SIGINT), 0);
    ASSERT_TRUE(Until([&] { return interrupts.TakeRaised(); })) << i;
  }
}

}  // namespace
}  // namespace dovetail::cli
