#pragma once
#include <chrono>
#include <future>
#include <string>
#include <utility>

namespace dovetail::cli {

// What the parent must know of a child's output: the address after a marker in its first line that has it.
// Threads: OnLine() on the thread that reads the child's output; Ready() and Take() on one other.
class Announcement {
 public:
  explicit Announcement(std::string marker) : marker_(std::move(marker)), future_(promise_.get_future()) {}
  void OnLine(const std::string& line) {  // on the reader's thread
    if (said_ || line.rfind(marker_, 0) != 0) return;
    said_ = true;
    promise_.set_value(line.substr(marker_.size()));
  }
  bool Ready() const { return future_.wait_for(std::chrono::seconds(0)) == std::future_status::ready; }
  std::string Take() { return future_.get(); }

 private:
  const std::string marker_;
  std::promise<std::string> promise_;
  std::future<std::string> future_;
  bool said_ = false;
};

}  // namespace dovetail::cli
