#include "server/cli/child_processes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <algorithm>
#include <csignal>
#include <iostream>

#include "absl/time/clock.h"
#include "base/log.h"
#include "base/mutex.h"
#include "server/cli/log_flags.h"

// Children are this binary, with one test that says what it reads; what comes behind "log " it says as it is.

namespace dovetail::cli {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(ChildOfTheTest, DISABLED_SaysWhatItReads) {
  std::cout << "reads" << std::endl;
  for (std::string line; std::getline(std::cin, line);)
    std::cout << (line.rfind("log ", 0) == 0 ? line.substr(4) : "read " + line) << std::endl;
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

// What its parent waits for may be logged at a level that is not to be seen.
TEST_F(ChildProcessesTest, LinesBelowTheLevelOfTheLogAreHeardAndNotShown) {
  LogWriter log({.level = LogLevel::kWarning});
  ::testing::internal::CaptureStdout();
  Start("one");
  for (const std::string line : {"I 2026-11-30 12:00:00.000 one was drained", "W 2026-11-30 12:00:00.000 one is late",
                                 R"({"level":"info","message":"one serves"})"})
    ASSERT_TRUE(children_.Tell("one", "log " + line).ok());
  EXPECT_TRUE(Says("one: I 2026-11-30 12:00:00.000 one was drained"));
  EXPECT_TRUE(Says("one: W 2026-11-30 12:00:00.000 one is late"));
  EXPECT_TRUE(Says("one: one serves"));
  children_.EndInput("one");
  EXPECT_EQ(NextEnd().name, "one");
  const std::string shown = ::testing::internal::GetCapturedStdout();
  EXPECT_THAT(shown, HasSubstr("[one] reads\n")) << "what is no line of a log is shown";
  EXPECT_THAT(shown, HasSubstr("[one] W 2026-11-30 12:00:00.000 one is late\n"));
  EXPECT_THAT(shown, Not(HasSubstr("was drained")));
  EXPECT_THAT(shown, Not(HasSubstr("serves")));
}

TEST(LevelOf, IsThatOfALineOfALogAndOfNoOther) {
  EXPECT_EQ(LevelOf("D 2026-11-30 12:00:00.000 text"), LogLevel::kDebug);
  EXPECT_EQ(LevelOf("E 2026-11-30 12:00:00.000 text"), LogLevel::kError);
  EXPECT_EQ(LevelOf(R"({"time":"2026-11-30T12:00:00Z","level":"warning","message":"text"})"), LogLevel::kWarning);
  for (const char* other : {"", "I", "I am no line of a log", "listening on http://127.0.0.1:8000", R"({"level":3})",
                            R"({"level":"loud"})", "{"})
    EXPECT_EQ(LevelOf(other), std::nullopt) << other;
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
