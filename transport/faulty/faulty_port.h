#pragma once
#include <cstdint>
#include <deque>
#include <memory>
#include <random>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "transport/fabric.h"

namespace dovetail::transport {

// How often what goes wrong, by chance in 0..1, for each frame that is sent.
struct Faults {
  double drop = 0;
  double duplicate = 0;                              // at once
  double echo = 0;                                   // again up to delay_max later, past what was sent meanwhile
  double delay = 0;                                  // held back, with what follows it to the same peer
  double swap = 0;                                   // of tensors with a digest: two halves change places
  absl::Duration delay_max = absl::Milliseconds(5);  // for how long at most
};

// A Port that loses, repeats and delays what is sent through it, the same way each time for the same seed and calls.
// Frames to one peer stay in order (that is what every fabric promises), except echoes, which come after the frame
// itself; frames to different peers change places as they are delayed. Receiving is untouched: wrap the ports of both
// sides for faults both ways. Delayed frames and echoes leave in Poll. Tensors are sent from copies, as a wire does: a
// peer that was given up and goes on may read a frame whose memory its sender has given back. The newest 2 x
// kMaxFramesInFlight for each peer stay.
// Threads: as the port that it wraps: reactor-owned.
class FaultyPort final : public Port {
 public:
  // `port` and `clock` outlive it.
  FaultyPort(Port& port, Clock& clock, uint64_t seed) : port_(port), clock_(clock), random_(seed) {}

  void Set(const Faults& faults) { faults_ = faults; }

  // Everything sent to `peer` is lost, and everything received from it, until Mend.
  void Cut(NodeId peer) { cut_.insert(peer); }
  void Mend(NodeId peer) { cut_.erase(peer); }

  int64_t dropped() const { return dropped_; }
  int64_t duplicated() const { return duplicated_; }
  int64_t delayed() const { return delayed_; }
  int64_t echoed() const { return echoed_; }
  int64_t swapped() const { return swapped_; }

  // The earliest time at which Poll has something to send; absl::InfiniteFuture() if nothing is held back.
  absl::Time NextDue() const;

  NodeId id() const override { return port_.id(); }
  absl::Status SendMessage(NodeId to, const proto::FrameHeader& header, std::vector<std::byte> payload) override;
  absl::Status SendTensor(NodeId to, const proto::FrameHeader& header, LentBytes payload) override;
  int Poll(FrameHandler& handler, int max_frames) override;

 private:
  struct Late {
    absl::Time due;
    NodeId to;
    proto::FrameHeader header;
    bool tensor = false;
    std::vector<std::byte> payload;
  };
  using Copy = std::shared_ptr<const std::vector<std::byte>>;  // with the port below
  enum class Fate { kSend, kDrop, kDuplicate, kDelay };

  Fate Decide(NodeId to);
  absl::Duration SomeDelay();
  bool Holding(NodeId to) const;
  bool Chance(double probability) { return std::uniform_real_distribution<double>(0, 1)(random_) < probability; }
  absl::Status Hold(NodeId to, const proto::FrameHeader& header, bool tensor, std::vector<std::byte> payload);
  void Echo(NodeId to, const proto::FrameHeader& header, bool tensor, std::span<const std::byte> payload);
  absl::Status SendLate(Late& late);
  absl::Status SendCopy(NodeId to, const proto::FrameHeader& header, std::vector<std::byte> payload);
  void SendDue();

  Port& port_;
  Clock& clock_;
  std::mt19937_64 random_;
  Faults faults_;
  absl::flat_hash_set<NodeId> cut_;
  std::vector<std::pair<NodeId, std::deque<Late>>> late_;  // in the order peers were first delayed, for repeatability
  std::vector<Late> echoes_;
  absl::flat_hash_map<NodeId, std::deque<Copy>> copies_;  // of tensors that were sent
  int64_t dropped_ = 0, duplicated_ = 0, delayed_ = 0, echoed_ = 0, swapped_ = 0;
};

}  // namespace dovetail::transport
