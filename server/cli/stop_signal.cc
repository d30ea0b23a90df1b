#include "server/cli/stop_signal.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <utility>

#include "base/check.h"
#include "base/log.h"
#include "base/thread_name.h"

namespace dovetail::cli {
namespace {

constexpr absl::Duration kLogPatience = absl::Milliseconds(200);

sigset_t StopSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  return signals;
}

int OpenSignals() {
  const sigset_t signals = StopSignals();
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  return signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK);
}

}  // namespace

StopSignal::StopSignal(Process process)
    : process_(process), signal_fd_(OpenSignals()), wake_fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  DT_CHECK(signal_fd_ >= 0 && wake_fd_ >= 0);
  watcher_ = std::thread([this] { Watch(); });
}

StopSignal::~StopSignal() {
  {
    MutexLock lock(mutex_);
    closing_ = true;
  }
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(wake_fd_, &one, sizeof(one));
  changed_.notify_all();
  watcher_.join();
  close(signal_fd_);
  close(wake_fd_);
}

// Owns nothing that another thread could hold for long: it must be able to end the process.
void StopSignal::Watch() {
  NameThread("dt-signals");
  absl::Duration left = absl::InfiniteDuration();
  while (true) {
    pollfd fds[2] = {{signal_fd_, POLLIN, 0}, {wake_fd_, POLLIN, 0}};
    const timespec limit = absl::ToTimespec(left);
    const int ready = ppoll(fds, 2, left == absl::InfiniteDuration() ? nullptr : &limit, nullptr);
    signalfd_siginfo taken;
    const bool came = (fds[0].revents & POLLIN) != 0 && read(signal_fd_, &taken, sizeof(taken)) == sizeof(taken);
    MutexLock lock(mutex_);
    if (closing_) return;
    if (came) {
      ++signals_;
      last_signal_ = static_cast<int>(taken.ssi_signo);
      if (ends_at_once_ && signals_ > 1) EndBySignal();
      changed_.notify_all();
    }
    if (owner_ends_ || signals_ == 0) {
      left = absl::InfiniteDuration();
      continue;
    }
    if (ready == 0 || signals_ > 1) EndProcess();
    left = kPatience;
  }
}

// On a thread that has both signals blocked.
void StopSignal::EndBySignal() {
  const sigset_t signals = StopSignals();
  FlushLog(kLogPatience);
  std::raise(last_signal_);
  pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
  std::_Exit(128 + last_signal_);
}

void StopSignal::EndProcess() {
  if (put_away_) put_away_();
  if (process_ == Process::kFinishes) EndBySignal();
  FlushLog(kLogPatience);
  std::_Exit(0);
}

void StopSignal::EndNow() {
  MutexLock lock(mutex_);
  DT_CHECK(signals_ > 0);
  EndBySignal();
}

bool StopSignal::Raised() const {
  MutexLock lock(mutex_);
  return signals_ > 0;
}

bool StopSignal::RaisedAgain() const {
  MutexLock lock(mutex_);
  return signals_ > 1;
}

void StopSignal::Wait() const {
  MutexLock lock(mutex_);
  changed_.wait(lock, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return signals_ > 0; });
}

bool StopSignal::WaitFor(absl::Duration timeout) const {
  MutexLock lock(mutex_);
  return changed_.wait_for(lock, absl::ToChronoMilliseconds(timeout),
                           [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return signals_ > 0; });
}

void StopSignal::OwnerEnds() {
  MutexLock lock(mutex_);
  owner_ends_ = true;
}

void StopSignal::AtEnd(std::function<void()> put_away) {
  MutexLock lock(mutex_);
  put_away_ = std::move(put_away);
}

absl::Status StopSignal::RunUntil(const std::function<absl::Status()>& work, const std::function<void()>& stop) {
  bool done = false;
  std::thread stopper([&] {
    NameThread("dt-stop");
    MutexLock lock(mutex_);
    changed_.wait(lock, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return done || signals_ > 0; });
    if (done) return;
    lock.unlock();
    stop();
  });
  const absl::Status status = work();
  {
    MutexLock lock(mutex_);
    done = true;
  }
  changed_.notify_all();
  stopper.join();
  return status;
}

void StopSignal::EndsAtOnce() {
  MutexLock lock(mutex_);
  owner_ends_ = ends_at_once_ = true;
  if (signals_ > 1) EndBySignal();
}

}  // namespace dovetail::cli
