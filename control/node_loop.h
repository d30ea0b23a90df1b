#pragma once
#include <atomic>
#include <functional>
#include <thread>
#include <vector>

#include "absl/time/time.h"
#include "base/mutex.h"
#include "transport/connector.h"

namespace dovetail::control {

// The event loop of a node, or of the two nodes of a pair: one thread that owns their connectors and whatever runs over
// them. Other threads Post() work. Between turns that did nothing it sleeps until a connector has something.
// Threads: Post(), Call() and TakeBusiest() are thread-safe; SetNode() as it says. One thread owns the loop and calls
// Stop(). Call() and Stop() must not be called on the loop's own thread.
class NodeLoop {
 public:
  // `turn`: does what there is to do and returns how much (0: idle). `next_deadline`: when a turn is due although
  // nothing arrives.
  struct Node {
    std::function<int()> turn;
    std::function<absl::Time()> next_deadline;  // SystemClock(); may be empty
  };

  // Both outlive the loop. `second`: null if there is none.
  explicit NodeLoop(transport::Connector& connector, transport::Connector* second = nullptr);
  ~NodeLoop();  // Stop()

  // On the loop's thread, or before anything was posted.
  void SetNode(Node node) { node_ = std::move(node); }

  // Thread-safe. Runs `work` on the loop's thread, in the order of the calls; false: the loop has stopped, nothing was
  // kept.
  bool Post(std::function<void()> work);
  // Post and wait until it ran. Not on the loop's thread.
  bool Call(const std::function<void()>& work);

  // Thread-safe. How long the longest turn since the last call has gone on; the turn at hand counts. A sleep that
  // should have ended counts as a turn: the machine gives the loop no time. Such a node neither reads what its peers
  // send nor sends them anything. 0: the loop sleeps, or did.
  absl::Duration TakeBusiest();

  // Runs what was posted, then ends the thread. Not on the loop's thread.
  void Stop();

 private:
  void Run();
  void BeginTurn(absl::Time now);
  void Sleep(absl::Duration length);

  transport::Connector& connector_;
  transport::Connector* const second_;
  Node node_;
  std::atomic<int64_t> turn_began_us_;   // or is due to begin
  std::atomic<int64_t> busiest_us_ = 0;  // of the turns that ended since it was last taken
  Mutex mutex_;
  std::vector<std::function<void()>> posted_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace dovetail::control
