#pragma once
#include <functional>
#include <thread>

#include "absl/time/time.h"
#include "base/mutex.h"
#include "base/status.h"

namespace dovetail::cli {

// SIGTERM and SIGINT of this process. Constructed before any thread begins: they inherit that both are blocked. One in
// a process.
//
// Until OwnerEnds(), the process ends kPatience after the signal at the latest, whatever it is at: it reads a model
// from a slow disk, waits for a peer that does not answer, builds a tokenizer. What it holds until then goes with it;
// AtEnd() is for what does not. It ends with status 0 if it was to serve until the signal, and by that signal if it was
// to finish something.
// Threads: thread-safe.
class StopSignal {
 public:
  static constexpr absl::Duration kPatience = absl::Milliseconds(500);
  enum class Process : bool { kServes, kFinishes };

  explicit StopSignal(Process process = Process::kServes);
  ~StopSignal();

  bool Raised() const;
  void Wait() const;                           // until one comes
  bool WaitFor(absl::Duration timeout) const;  // Raised(), at the latest after `timeout`
  bool RaisedAgain() const;                    // its sender does not want to wait

  // From here on the caller ends the process, in its own time.
  void OwnerEnds();

  // Called before the process is ended, on another thread; must not block.
  void AtEnd(std::function<void()> put_away);

  // Runs `work` on this thread; calls `stop` once, on another, when a signal comes before it ends.
  absl::Status RunUntil(const std::function<absl::Status()>& work, const std::function<void()>& stop);

  // From here on a second signal ends the process at once, by that signal (of the first process of a container, which
  // no signal ends, with status 128 and its number).
  void EndsAtOnce();

  // Ends the process by the signal that came, as a second one would. Requires: Raised().
  [[noreturn]] void EndNow();

 private:
  void Watch();
  [[noreturn]] void EndProcess() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  [[noreturn]] void EndBySignal() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Process process_;
  mutable Mutex mutex_;
  mutable CondVar changed_;
  int signals_ ABSL_GUARDED_BY(mutex_) = 0;
  int last_signal_ ABSL_GUARDED_BY(mutex_) = 0;
  bool owner_ends_ ABSL_GUARDED_BY(mutex_) = false;
  bool ends_at_once_ ABSL_GUARDED_BY(mutex_) = false;
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;
  std::function<void()> put_away_ ABSL_GUARDED_BY(mutex_);
  const int signal_fd_, wake_fd_;
  std::thread watcher_;
};

}  // namespace dovetail::cli
