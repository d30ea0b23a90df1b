#include "server/cli/child_processes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <algorithm>
#include <csignal>
#include <iostream>

#include "absl/time/clock.h"
#include "base/mutex.h"

// Children are this binary, with one test that says what it reads.

namespace dovetail::cli {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(ChildOfTheTest, DISABLED_SaysWhatItReads) {
  std::cout << "reads" << std::endl;
  for (std::string line; std::getline(std::cin, line);) std::cout << "read " << line << std::endl;
  std::cout << "input ended" << std::endl;
}

constexpr absl::Duration kLimit = absl::Seconds(30);

class ChildProcessesTest : public ::testing::Test {
 protected:
  void Start(const std::string& name, ChildProcesses::Input input = ChildProcesses::Input::kLines) {
    const absl::Status started = children_.Start(
        name, {"--gtest_also_run_disabled_tests", "--gtest_filter=ChildOfTheTest.*"},
        [this](const std::string& now, const std::string& line) {
          MutexLock lock(mutex_);
          lines_.push_back(now + ": " + line);
          changed_.notify_all();
        },
        input);
    ASSERT_TRUE(started.ok()) << started;
  }

  // Whether such a line came, of that child under that name.
  bool Says(const std::string& line) {
    MutexLock lock(mutex_);
    return changed_.wait_for(lock, absl::ToChronoMilliseconds(kLimit), [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return std::find(lines_.begin(), lines_.end(), line) != lines_.end();
    });
  }

  // The next child that ends; no name: none did in time.
  ChildProcesses::Ended NextEnd() {
    const absl::Time give_up = absl::Now() + kLimit;
    while (absl::Now() < give_up) {
      const std::vector<ChildProcesses::Ended> ended = children_.Reap();
      if (!ended.empty()) return ended.front();
      absl::SleepFor(absl::Milliseconds(5));
    }
    return {};
  }

  Mutex mutex_;
  CondVar changed_;
  std::vector<std::string> lines_ ABSL_GUARDED_BY(mutex_);
  ChildProcesses children_;  // last: its readers use the rest
};

TEST_F(ChildProcessesTest, AChildReadsTheLinesThatItIsTold) {
  Start("one");
  EXPECT_TRUE(children_.Tell("one", "first").ok());
  EXPECT_TRUE(children_.Tell("one", "second").ok());
  EXPECT_TRUE(Says("one: read first"));
  EXPECT_TRUE(Says("one: read second"));
}

TEST_F(ChildProcessesTest, TheInputOfOneEndsWhileOthersThatWereStartedLaterRun) {
  Start("one");
  Start("two");
  children_.EndInput("one");
  EXPECT_TRUE(Says("one: input ended"));
  const ChildProcesses::Ended ended = NextEnd();
  EXPECT_EQ(ended.name, "one");
  EXPECT_EQ(ended.how, "exited with 0");
  EXPECT_TRUE(children_.Tell("two", "still there").ok());
  EXPECT_TRUE(Says("two: read still there"));
}

TEST_F(ChildProcessesTest, AChildThatWasRenamedIsCalledSoFromThenOn) {
  ::testing::internal::CaptureStdout();
  Start("spare");
  ASSERT_TRUE(children_.Tell("spare", "before").ok());
  ASSERT_TRUE(Says("spare: read before"));
  const pid_t pid = children_.PidOf("spare");
  children_.Rename("spare", "worker");
  EXPECT_EQ(children_.PidOf("worker"), pid);
  EXPECT_EQ(children_.PidOf("spare"), -1);
  Start("spare");  // the name is free
  ASSERT_TRUE(children_.Tell("worker", "after").ok());
  EXPECT_TRUE(Says("worker: read after"));
  children_.EndInput("worker");
  EXPECT_EQ(NextEnd().name, "worker");
  children_.EndInput("spare");
  EXPECT_EQ(NextEnd().name, "spare");  // now no thread reads, which would keep the next line waiting
  const std::string shown = ::testing::internal::GetCapturedStdout();
  EXPECT_THAT(shown, HasSubstr("[spare] read before\n"));
  EXPECT_THAT(shown, HasSubstr("[worker] read after\n"));
  EXPECT_THAT(shown, Not(HasSubstr("[spare] read after\n")));
}

TEST_F(ChildProcessesTest, OneThatHasEndedOrReadsNoLinesCannotBeTold) {
  Start("killed");
  const pid_t pid = children_.PidOf("killed");
  kill(pid, SIGKILL);
  siginfo_t ended;
  ASSERT_EQ(waitid(P_PID, static_cast<id_t>(pid), &ended, WEXITED | WNOWAIT), 0);
  EXPECT_EQ(children_.Tell("killed", "hello").code(), absl::StatusCode::kUnavailable);  // and no SIGPIPE
  EXPECT_EQ(children_.Tell("none", "hello").code(), absl::StatusCode::kUnavailable);
  Start("other", ChildProcesses::Input::kOfParent);
  EXPECT_EQ(children_.Tell("other", "hello").code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace dovetail::cli
