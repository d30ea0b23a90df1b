#pragma once
#include <deque>
#include <optional>
#include <vector>

#include "base/status.h"
#include "compute_worker/core/compute_worker_core.h"
#include "compute_worker/core/rank_tensor.h"
#include "compute_worker/dense_backend.h"
#include "compute_worker/rank_links.h"
#include "transport/fabric.h"

namespace dovetail::compute {

// What ranks of a prefill group send each other, on its way between the links and the device: what the device has not
// computed yet is sent late, and what has come is handed on, and answered, once the device has copied it. A CPU
// has both at once. Pieces of earlier tokens' K and V from attention workers are copied by the same means; what answers
// them are the asks for more (earlier_rows.h).
//
// Errors: what fails ends the step.
// Threads: reactor-owned; nothing blocks.
class RankExchange {
 public:
  // All outlive it.
  RankExchange(const ComputeWorkerCore& core, DenseBackend& dense, RankLinks& links)
      : core_(core),
        dense_(dense),
        links_(links),
        late_(core.options().micro_batches),
        handed_on_(core.options().micro_batches) {}

  // To all receivers, now or late.
  absl::Status SendRows(const SendRankRows& send);
  absl::Status SendState(const SendRankState& send);
  // To each receiver the heads that it attends to.
  absl::Status SendHeads(const SendRankHeads& send);
  // What attention gave for another rank's tokens, now or late; of a step that has ended what is there.
  absl::Status SendOutputs(const SendRankOutputs& send);
  // To each receiver q of the rows that see something of it.
  absl::Status SendQueries(const SendRankQueries& send);
  // An earlier rank's, in a ring, now or late.
  absl::Status HandOn(ForwardRankRows& forward);
  // Those of the micro-batch's step that are there by now; how many still wait.
  absl::StatusOr<int> SendLate(MicroBatchId id);
  bool HasLate(MicroBatchId id) const { return !late_[id.value()].empty() || !handed_on_[id.value()].empty(); }

  // A tensor came, or the name of one (kRankMemory).
  void Take(const transport::Delivery& delivery);
  // The oldest of those that came, if it has been copied: answered, unless its sender is no peer any more, which drops
  // it. Nothing: none, or it still is being copied.
  struct Arrived {
    NodeId from;
    proto::FrameHeader header;  // of the tensor's frame
    RankTensor tensor;
    absl::Status taken;  // else there is no tensor, and its step fails
  };
  absl::StatusOr<std::optional<Arrived>> Next();
  bool copies() const { return !arriving_.empty(); }
  // What the core is told of it, and what traces call that.
  static Event EventOf(Arrived arrived);
  // That of what another rank sent; nothing of other events.
  static std::optional<MicroBatchId> MicroBatchOf(const Event& event);
  static const char* NameOf(proto::FrameType type);

 private:
  // Makes the name of a tensor the frame of that tensor.
  absl::Status OpenNamed(transport::Delivery& delivery);
  absl::StatusOr<RankTensor> CopyOf(const transport::Delivery& delivery);
  absl::StatusOr<bool> Copied(const Arrived& first) const;
  absl::Status SendHandedOn(MicroBatchId id);

  enum class What : uint8_t { kState, kRows, kHeads, kOutputs };
  struct Late {
    What what = What::kState;
    StepId step;
    int op = 0, rank = 0;
    proto::RankAddress to;
    transport::LentBytes bytes;  // not of a state, which is taken when it is there
  };
  absl::StatusOr<bool> Ready(MicroBatchId id, const Late& late);
  absl::Status Send(MicroBatchId id, Late late);
  struct HandedOn {
    StepId step;
    int op = 0, rank = 0;
    proto::RankAddress to;
    RankTensor taken;  // which the device may still copy
    transport::LentBytes rows;
  };
  const ComputeWorkerCore& core_;
  DenseBackend& dense_;
  RankLinks& links_;
  std::vector<std::deque<Late>> late_;           // by micro-batch, in order
  std::vector<std::deque<HandedOn>> handed_on_;  // likewise
  std::deque<Arrived> arriving_;                 // in order
};

}  // namespace dovetail::compute
