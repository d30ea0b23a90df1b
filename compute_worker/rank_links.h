#pragma once
#include <cstddef>
#include <deque>
#include <map>
#include <optional>
#include <string_view>
#include <vector>

#include "absl/time/time.h"
#include "base/clock.h"
#include "base/ids.h"
#include "base/status.h"
#include "compute_worker/rank_memory.h"
#include "proto/frame.h"
#include "proto/prefill_part.h"
#include "proto/step_plan.h"
#include "transport/fabric.h"

namespace dovetail::compute {

// Another compute worker of the cluster, which may be a rank of the same prefill group.
struct ComputeWorkerAddress {
  WorkerId worker;
  Epoch epoch;
  NodeId node;
};

// The links of a compute worker with the others: the frames of proto/rank_frames.h. What a peer has no room for waits
// here, in order: of each step it is what its layers send once.
//   Ownership: of what was sent until it is answered or its peer is lost, since a port may read it until then
//   Threads:   reactor-owned; nothing blocks
class RankLinks {
 public:
  // All outlive this. `memory`: null if no peer reads this worker's.
  RankLinks(transport::Port& port, Clock& clock, const RankMemory* memory = nullptr)
      : port_(port), clock_(clock), memory_(memory) {}

  // A later call with the same worker replaces its epoch and node.
  void Add(const ComputeWorkerAddress& address);
  // What it was to get is dropped.
  void Lose(WorkerId worker, Epoch epoch);

  // The peer reads this worker's device memory, until it is added again: what lies there is named to it (kRankMemory).
  void SetReaches(WorkerId worker, bool reaches);
  // A message of no step. For a worker that is no peer it is dropped.
  void SendText(WorkerId worker, proto::FrameType type, std::string_view text);

  // The state of a linear op, or K and V of a softmax op, for a rank; `rank` is this one's. For a worker that is no
  // peer it is dropped without an error: the scheduler voids that rank's group.
  //   Errors: those of the port, if it will never take the frame
  absl::Status SendState(const proto::RankAddress& to, int op, std::vector<std::byte> state);
  absl::Status SendRows(const proto::RankAddress& to, int op, int rank, transport::LentBytes rows);
  // q, k and v of a softmax op and some heads, and what attention to those gave. Likewise.
  absl::Status SendHeads(const proto::RankAddress& to, int op, int rank, transport::LentBytes rows);
  absl::Status SendOutputs(const proto::RankAddress& to, int op, int rank, transport::LentBytes outputs);
  // The op's rows that `to` had sent have been attended to. Likewise.
  absl::Status SendAttended(const proto::RankAddress& to, int op, int rank);

  // A tensor came, and its payload has been copied: answers it, before all that waits, for a peer that waits for room
  // may wait for that. False: from a node that is no peer.
  bool AnswerTensor(NodeId from, const proto::FrameHeader& tensor);
  // A kRankTaken came.
  void OnTaken(NodeId from, const proto::FrameHeader& taken);

  // Sends what there is room for now; returns how many frames.
  int SendWaiting();

  // Of what was answered since the last call, by peer, the fastest: at most kMaxPrefillRanks of them.
  std::vector<proto::RankTransfer> TakeTransfers();

  size_t held() const;  // frames that wait, or were not answered; for tests

 private:
  struct Frame {
    proto::FrameHeader header;
    std::optional<transport::LentBytes> tensor;  // nothing: a message
    std::vector<std::byte> message = {};         // not empty: goes in place of the tensor
    bool sent = false;
    absl::Time sent_at = {};  // of a tensor
  };
  struct Peer {
    ComputeWorkerAddress address;
    bool reaches = false;
    std::deque<Frame> frames;     // in order; of those that were sent only tensors
    proto::RankTransfer fastest;  // since TakeTransfers(); of 0 bytes: none was answered
  };
  absl::Status Send(proto::FrameType type, const proto::RankAddress& to, int op, int rank,
                    std::optional<transport::LentBytes> tensor);
  absl::Status SendWaiting(Peer& peer, int& sent);
  Peer* Find(NodeId node);

  transport::Port& port_;
  Clock& clock_;
  const RankMemory* const memory_;
  std::map<WorkerId, Peer> peers_;
};

}  // namespace dovetail::compute
