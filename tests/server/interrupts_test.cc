#include <gtest/gtest.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <string>
#include <thread>

#include "server/cli/terminal.h"
#include "tests/support/threads.h"

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

// 0: there is none.
pid_t ThreadCalled(const std::string& name) {
  for (const pid_t thread : test::Threads())
    if (test::NameOfThread(thread) == name) return thread;
  return 0;
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
