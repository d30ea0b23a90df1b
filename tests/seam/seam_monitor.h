#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "base/ids.h"
#include "exchange/seam.h"

namespace dovetail::test {

// Watches the steps of one compute worker and its attention workers, and says which obligation of exchange/seam.h each
// call or frame breaks: "obligation 4: ...". It is told of everything in the order in which it happens.
// Thread-compatible.
class SeamMonitor {
 public:
  enum class Way { kHosts, kOneGpu, kBetweenGpus };
  static Way WayOf(const exchange::Seam& seam) { return static_cast<Way>(seam.index()); }

  struct StepKey {
    MicroBatchId micro_batch;
    StepId step;
  };
  using Payload = std::span<const std::byte>;

  // `on_cpu`: both workers' backends are a CPU's.
  explicit SeamMonitor(bool on_cpu) : on_cpu_(on_cpu) {}

  // The compute node and its backend. `in_frames`: by the type of the frame.
  void SendsBegin(StepKey key, NodeId to, bool in_frames);
  void PreparesDense(StepKey key, const exchange::Seam& seam);
  void Packs(StepKey key, int op);
  void SendsQuery(StepKey key, int op, NodeId to, Payload payload);
  void SendsKeyValue(StepKey key, int op, NodeId to, Payload payload);
  void TakesAnswer(StepKey key, NodeId from, int op);
  void RunsOutput(StepKey key, int op);  // the piece that reads o
  void Draws(StepKey key);
  void Ends(StepKey key, bool ok);
  void EndsWaits(StepKey key);  // the way was told of the failure

  // An attention node and its backend.
  void PreparesAttention(StepKey key, NodeId worker, const exchange::Seam& seam);
  void Attends(StepKey key, NodeId worker, int op);
  void Appends(StepKey key, NodeId worker, int op);
  void Launches(StepKey key, NodeId worker);
  void SendsAnswer(StepKey key, NodeId worker, int op);

  const std::vector<std::string>& violations() const { return violations_; }
  int steps(Way way) const { return steps_[static_cast<int>(way)]; }  // that ended well

 private:
  struct Lent {
    const std::byte* at = nullptr;
    size_t size = 0;
    uint64_t hash = 0;
  };
  struct Part {
    bool in_frames = true;
    bool prepared = false, launched = false;
    int asked_op = -1, sent_op = -1;         // of the last q, and of the last k and v
    int attended_op = -1, appended_op = -1;  // likewise, by the attention backend
    std::map<int, std::vector<Lent>> lent;   // by op: not answered yet
    std::set<int> asked, answered, taken;    // ops: q went, the answer went, the answer came
  };
  struct Step {
    StepId number;
    bool dense_prepared = false, drawn = false, failed = false, waits_ended = false;
    Way way = Way::kHosts;
    std::map<NodeId, Part> parts;
  };

  void Broken(int obligation, StepKey key, const std::string& what);
  Step& Of(StepKey key);
  Part& PartOf(StepKey key, NodeId node, const char* what);
  void SendsPayload(StepKey key, int op, NodeId to, Payload payload);
  static uint64_t Hash(const Lent& lent);

  const bool on_cpu_;
  std::map<MicroBatchId, Step> current_;
  std::vector<std::string> violations_;
  int steps_[3] = {};
};

}  // namespace dovetail::test
