#include "tests/support/hang_report.h"

#include <execinfo.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "absl/debugging/symbolize.h"
#include "tests/support/threads.h"

namespace dovetail::test {
namespace {

constexpr int kMostFrames = 64;
std::atomic<int> written_threads{0};

// Of the thread that the signal came to.
void WriteFunctions(int /*signal*/) {
  void* frames[kMostFrames];
  const int depth = backtrace(frames, kMostFrames);
  for (int i = 0; i < depth; ++i) {
    char name[512], line[600];
    // A return address may be the first of the next function.
    if (!absl::Symbolize(static_cast<char*>(frames[i]) - 1, name, sizeof(name)))
      std::snprintf(name, sizeof(name), "%p", frames[i]);
    const int length = std::snprintf(line, sizeof(line), "    %s\n", name);
    if (write(STDERR_FILENO, line, static_cast<size_t>(length)) < 0) break;
  }
  ++written_threads;
}

// One thread after another. A thread that does not answer within a second is passed over.
void WriteThreads(int signal) {
  for (const pid_t thread : Threads()) {
    if (thread == gettid()) continue;
    std::fprintf(stderr, "  thread %d, %s:\n", thread, NameOfThread(thread).c_str());
    const int written = written_threads;
    if (syscall(SYS_tgkill, getpid(), thread, signal) != 0) continue;
    for (int i = 0; i < 1000 && written_threads == written; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace

void ReportHang(std::chrono::seconds limit) {
  const int signal = SIGRTMIN + 1;
  absl::InitializeSymbolizer("/proc/self/exe");
  std::signal(signal, WriteFunctions);
  std::thread([limit, signal] {
    std::this_thread::sleep_for(limit);
    std::fprintf(stderr, "this test has not ended after %lld s; its threads are in these functions:\n",
                 static_cast<long long>(limit.count()));
    WriteThreads(signal);
    _exit(EXIT_FAILURE);
  }).detach();
}

}  // namespace dovetail::test
