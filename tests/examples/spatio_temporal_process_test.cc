#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/check.h"
#include "base/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/test_data.h"

// The program as a user starts it: a process for each rank.

namespace dovetail::spatio_temporal {
namespace {

using ::testing::HasSubstr;

class Program {
 public:
  explicit Program(std::vector<std::string> arguments) {
    int out[2];
    DT_CHECK(pipe2(out, O_CLOEXEC) == 0);
    arguments.insert(arguments.begin(), DOVETAIL_SPATIO_TEMPORAL);
    std::vector<char*> raw;
    for (std::string& argument : arguments) raw.push_back(argument.data());
    raw.push_back(nullptr);
    pid_ = fork();
    if (pid_ == 0) {
      dup2(out[1], STDOUT_FILENO);
      dup2(out[1], STDERR_FILENO);
      execv(raw[0], raw.data());
      _exit(127);
    }
    close(out[1]);
    output_ = out[0];
  }
  ~Program() {
    if (pid_ > 0) {
      kill(pid_, SIGKILL);  // its ranks end with it
      waitpid(pid_, nullptr, 0);
    }
    close(output_);
  }

  // What it has printed, once that contains `text`; everything when it ends or `limit` has passed.
  const std::string& ReadUntil(const std::string& text, absl::Duration limit) {
    const absl::Time deadline = SystemClock().Now() + limit;
    while (printed_.find(text) == std::string::npos && SystemClock().Now() < deadline) {
      pollfd readable{output_, POLLIN, 0};
      if (poll(&readable, 1, 100) <= 0) continue;
      char bytes[4096];
      const ssize_t count = read(output_, bytes, sizeof(bytes));
      if (count <= 0) break;
      printed_.append(bytes, static_cast<size_t>(count));
    }
    return printed_;
  }
  // -1: it goes on.
  int ExitStatus(absl::Duration limit) {
    ReadUntil("\1", limit);
    int status = 0;
    for (const absl::Time deadline = SystemClock().Now() + absl::Seconds(5); SystemClock().Now() < deadline;) {
      if (waitpid(pid_, &status, WNOHANG) == pid_) {
        pid_ = -1;
        return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
      }
      poll(nullptr, 0, 10);
    }
    return -1;
  }
  pid_t ProcessOf(int rank) {
    const std::string before = absl::StrCat("rank ", rank, " is process ");
    const size_t at = ReadUntil("running", absl::Seconds(60)).find(before);
    return at == std::string::npos ? -1 : std::atoi(printed_.c_str() + at + before.size());
  }

 private:
  pid_t pid_ = -1;
  int output_ = -1;
  std::string printed_;
};

std::string FileOf(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream bytes;
  bytes << file.rdbuf();
  return bytes.str();
}

class RanksAsProcesses : public ::testing::TestWithParam<std::string> {};

TEST_P(RanksAsProcesses, WriteTheBytesOfOneRankAndSendThoseOfTheFormula) {
  const std::filesystem::path folder = test::TempFolder();
  const auto run = [&](const std::string& name, std::vector<std::string> more) {
    const std::string path = (folder / name).string();
    std::vector<std::string> arguments{"--preset", "tiny", "--frames", "9", "--output", path, "--steps", "2"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    Program program(arguments);
    EXPECT_EQ(program.ExitStatus(absl::Seconds(100)), 0) << program.ReadUntil("\1", absl::ZeroDuration());
    return std::pair(FileOf(path), program.ReadUntil("\1", absl::ZeroDuration()));
  };
  const std::string one = run("one", {}).first;
  ASSERT_EQ(one.size(), 9u * 70 * 48 * 2);
  // T 9, S 70, C 48 on two ranks: 4 + 5 frames, 35 + 35 positions, so half of the rows move; twice a pair.
  const auto [dsp, said] = run("dsp", {"--ranks", "2", "--transport", GetParam()});
  EXPECT_TRUE(dsp == one) << said;
  EXPECT_THAT(said, HasSubstr(absl::StrCat("bytes sent a pair   ", 9 * 70 / 2 * 48 * 2 * 2, " by all ranks")));
  const auto [ulysses, also_said] = run("ulysses", {"--ranks", "2", "--transport", GetParam(), "--way", "ulysses"});
  EXPECT_TRUE(ulysses == one) << also_said;
  EXPECT_THAT(also_said, HasSubstr(absl::StrCat("bytes sent a pair   ", 9 * 70 / 2 * 48 * 2 * 8, " by all ranks")));
}

TEST_P(RanksAsProcesses, EndWithTheNameOfTheOneThatWasKilled) {
  Program program(
      {"--preset", "tiny", "--ranks", "3", "--steps", "1000000", "--stall", "300", "--transport", GetParam()});
  const pid_t victim = program.ProcessOf(1);
  ASSERT_GT(victim, 0) << program.ReadUntil("\1", absl::ZeroDuration());
  poll(nullptr, 0, 200);  // in the middle of its steps
  ASSERT_EQ(kill(victim, SIGKILL), 0);
  const absl::Time killed = SystemClock().Now();
  EXPECT_EQ(program.ExitStatus(absl::Seconds(60)), 1);
  EXPECT_LT(SystemClock().Now() - killed, absl::Seconds(20)) << "long before the stall of 300 s";
  const std::string& said = program.ReadUntil("\1", absl::ZeroDuration());
  EXPECT_THAT(said, HasSubstr("rank 1: its process was ended by signal 9"));
  EXPECT_THAT(said, HasSubstr("rank 1 (node 2)"));
  EXPECT_THAT(
      said, ::testing::AnyOf(HasSubstr("rank 0: rank 1 (node 2) is lost"), HasSubstr("rank 2: rank 1 (node 2) is lost"),
                             HasSubstr("rank 1 (node 2) cannot be sent to")));
  EXPECT_THAT(said, HasSubstr("rank 0: "));
  EXPECT_THAT(said, HasSubstr("rank 2: "));
}

INSTANTIATE_TEST_SUITE_P(Lanes, RanksAsProcesses, ::testing::Values("shm", "tcp"),
                         [](const auto& info) { return info.param; });

// A stopped process ends nothing and says nothing; only time tells.
TEST(AStoppedRank, EndsTheOthersAfterAStallWithItsName) {
  Program program({"--preset", "tiny", "--ranks", "2", "--steps", "1000000", "--stall", "2", "--transport", "shm"});
  const pid_t victim = program.ProcessOf(1);
  ASSERT_GT(victim, 0);
  ASSERT_EQ(kill(victim, SIGSTOP), 0);
  EXPECT_EQ(program.ExitStatus(absl::Seconds(60)), 1);
  EXPECT_THAT(program.ReadUntil("\1", absl::ZeroDuration()), HasSubstr("rank 1 (node 2) has"));
}

TEST(SpatioTemporalProgram, SaysWhichFlagIsWrong) {
  Program program({"--preset", "tiny", "--ranks", "2", "--transport", "pigeon"});
  EXPECT_EQ(program.ExitStatus(absl::Seconds(30)), 1);
  EXPECT_THAT(program.ReadUntil("\1", absl::ZeroDuration()),
              HasSubstr("--transport pigeon is none of inproc, shm, tcp"));
}

}  // namespace
}  // namespace dovetail::spatio_temporal
