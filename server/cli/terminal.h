#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "base/mutex.h"

namespace dovetail::cli {

// Whether colours may be written to this descriptor: a terminal, and neither NO_COLOR nor TERM=dumb says otherwise.
// Threads: thread-safe; reads the environment.
bool ShowsColours(int descriptor);

// `text` in a colour of the terminal's ("1;31": bold red), or as it is.
std::string Coloured(const std::string& text, const char* colour, bool colours);

// Ctrl-C ends what is under way, and not the process, while this lives. One in a process.
// Threads: thread-safe; `action` is called on a thread of this object, or by SetAction() on the caller's.
class Interrupts {
 public:
  Interrupts();
  ~Interrupts();

  // Called on another thread at each Ctrl-C, until the next call. If a Ctrl-C was raised and not yet taken, `action` is
  // called at once. Empty: nothing is under way.
  void SetAction(std::function<void()> action);
  // Whether one was raised since it was last asked.
  bool TakeRaised();
  // A descriptor that is readable while a Ctrl-C was raised and not yet taken.
  int raised_fd() const { return raised_fd_; }

 private:
  const int raised_fd_;
  Mutex mutex_;
  std::function<void()> action_ ABSL_GUARDED_BY(mutex_);
  std::thread watcher_;
};

// Lines from the keyboard, with editing and the history of this process (libedit). One in a process.
// Threads: thread-compatible.
class LineEditor {
 public:
  explicit LineEditor(const Interrupts& interrupts);
  ~LineEditor();
  // Nothing: the end of input (Ctrl-D), or a Ctrl-C, which the caller then takes.
  std::optional<std::string> Read(const std::string& prompt);
  void Remember(const std::string& line);  // for the history

 private:
  struct Library;  // libedit's
  const std::unique_ptr<Library> library_;
};

}  // namespace dovetail::cli
