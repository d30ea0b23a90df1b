#pragma once
#include <atomic>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

namespace dovetail::cli {

// Whether colours may be written to this descriptor: a terminal, and neither NO_COLOR nor TERM=dumb says otherwise.
bool ShowsColours(int descriptor);

// `text` in a colour of the terminal's ("1;31": bold red), or as it is.
std::string Coloured(const std::string& text, const char* colour, bool colours);

// Lines from the keyboard, with editing and the history of this process (libedit). One in a process, one thread.
class LineEditor {
 public:
  LineEditor();
  // Nothing: the end of input (Ctrl-D). `interrupted` is set where Ctrl-C ended the line.
  std::optional<std::string> Read(const std::string& prompt, bool& interrupted);
  void Remember(const std::string& line);  // for the history
};

// Ctrl-C ends what is under way, and not the process, while this lives. One in a process.
class Interrupts {
 public:
  Interrupts();
  ~Interrupts();

  // Called on another thread at each Ctrl-C, until the next call; empty: nothing is under way.
  void SetAction(std::function<void()> action);
  bool TakeRaised() { return raised_.exchange(false); }  // since it was last asked

 private:
  std::atomic<bool> raised_{false};
  std::mutex mutex_;
  std::function<void()> action_;
  std::thread watcher_;
};

}  // namespace dovetail::cli
