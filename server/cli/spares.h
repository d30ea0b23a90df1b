#pragma once
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace dovetail::cli {

// Which spare processes an `up` keeps for its attention workers, and which of them are ready: `count` for each place,
// called spare-1, spare-2 and so on. Workers whose spares would be started with the same arguments are of one place.
// It starts nothing. A spare that was taken is another process from then on; the next one has its old name.
// Threads: thread-compatible; a value.
class Spares {
 public:
  static constexpr int kMost = 16;  // of a place
  using Arguments = std::vector<std::string>;

  explicit Spares(int count) : count_(count) {}

  // An attention worker, and what a spare for it is started with.
  void AddWorker(const std::string& worker, const Arguments& arguments);

  std::vector<std::string> names() const;
  const Arguments* ArgumentsOf(const std::string& spare) const;  // null: it is none

  void Ready(const std::string& spare);
  void NotReady(const std::string& spare);
  // A ready one of the worker's place, which is not ready from here on. Nothing: there is none.
  std::optional<std::string> Take(const std::string& worker);

  // This worker will not be started again: the spares that no worker is left for. They are none from here on.
  std::vector<std::string> RemoveWorker(const std::string& worker);

 private:
  const int count_;
  int named_ = 0;                             // so far
  std::map<std::string, Arguments> workers_;  // what their spares are started with, which is their place
  std::map<std::string, Arguments> spares_;
  std::set<std::string> ready_;
};

}  // namespace dovetail::cli
