#include "base/host_process.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>

namespace dovetail {
namespace {

// A process that does nothing, and what it says of itself.
struct Child {
  HostProcess process = ThisProcess();
  pid_t pid = -1;

  Child() {
    std::array<int, 2> ends{};
    EXPECT_EQ(pipe(ends.data()), 0);
    pid = fork();
    if (pid == 0) {
      const HostProcess self = ThisProcess();
      const bool said = self.host == process.host && write(ends[1], &self.started, sizeof(self.started)) > 0;
      while (said) pause();
      _exit(1);
    }
    process.pid = static_cast<uint32_t>(pid);
    EXPECT_EQ(read(ends[0], &process.started, sizeof(process.started)), ssize_t{sizeof(process.started)});
    close(ends[0]);
    close(ends[1]);
  }
  ~Child() {
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
  }
  // Sends it, and waits until it has come to that.
  void Send(int signal, int options) const {
    siginfo_t info;
    kill(pid, signal);
    EXPECT_EQ(waitid(P_PID, static_cast<id_t>(pid), &info, options | WNOWAIT), 0);
  }
};

TEST(HostProcess, RunsUntilItIsStoppedAndAgainWhenItGoesOn) {
  const Child child;
  ASSERT_FALSE(child.process.host.empty());
  EXPECT_TRUE(RunsHere(child.process));
  child.Send(SIGSTOP, WSTOPPED);
  EXPECT_FALSE(RunsHere(child.process));
  child.Send(SIGCONT, WCONTINUED);
  EXPECT_TRUE(RunsHere(child.process));
}

TEST(HostProcess, ThatWasKilledDoesNotRunAlsoWhileItsParentHasNotHeardOfIt) {
  const Child child;
  child.Send(SIGKILL, WEXITED);
  EXPECT_FALSE(RunsHere(child.process)) << "a zombie";
  waitpid(child.pid, nullptr, 0);
  EXPECT_FALSE(RunsHere(child.process));
}

TEST(HostProcess, IsNoneOfAnotherHostNorALaterOneOfItsNumberNorTheOneThatAsks) {
  const Child child;
  HostProcess other = child.process;
  other.host += "1";
  EXPECT_FALSE(RunsHere(other)) << "of another host, or of namespaces of its own";
  other = child.process;
  other.host.clear();
  EXPECT_FALSE(RunsHere(other)) << "not known where";
  other = child.process;
  ++other.started;
  EXPECT_FALSE(RunsHere(other));
  EXPECT_FALSE(RunsHere(ThisProcess()));
}

}  // namespace
}  // namespace dovetail
