#pragma once
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "proto/token_layout.h"
#include "sequence_parallel/exchange_options.h"
#include "transport/fabric.h"

namespace dovetail::sequence_parallel {

struct ExchangeCounters {
  uint64_t switches = 0;
  uint64_t pieces_sent = 0;
  int64_t bytes_sent = 0;      // payloads, to all ranks
  int64_t bytes_received = 0;  // in place
  int64_t bytes_packed = 0;    // of bytes_sent, what was copied before it was sent; the rest was lent
  uint64_t dropped = 0;        // frames of strangers, of another group, of switches that are over, repeated, or damaged
};

// One rank's part in the switches of a group (proto/token_layout.h), one after the other, over a Port. What a rank must
// send is packed into pieces (or lent, where it lies in one run and has an owner), a few in flight to each peer; what
// comes is written to where it belongs as it comes, and answered. Frames: proto/switch_frames.h.
//
// Fences: a frame counts only with the group's epoch, from a member, with the switch's number and fingerprint, and as
// the next piece of its transfer. Pieces of the next switch, which a faster rank may have begun, are kept where they
// lie until Begin; there are no more of them than the peer has in flight. Nothing of an earlier switch is ever taken.
//
// Failure is of the group: a lost member, a member that means another switch, or a stall voids it, on all ranks, with a
// status that names the rank. Then this object only says why; a new group has another epoch and new objects.
//
// Memory: staging as ExchangeOptions says, taken when needed and kept. Port and clock outlive it; within one process it
// outlives all that its peers' ports still hand over, since they read its staging.
// Threads: reactor-owned; never blocks.
class SwitchExchange final : public transport::FrameHandler {
 public:
  // kInvalidArgument: the options, or a port that is not the rank's node.
  static absl::StatusOr<std::unique_ptr<SwitchExchange>> Create(const ExchangeOptions& options, transport::Port& port,
                                                                Clock& clock);

  // Begins a switch; the one before is done. `plan` and `destination` stay until done() or an error; so does `source`,
  // which is this rank's part before, and does not change. With an owner it is lent where it lies in one run. The two
  // do not overlap, but may be the same memory if the switch is an identity.
  //   kInvalidArgument  sizes that are not the parts', an id that does not grow, a plan for another number of ranks
  //   what ended the group, if it is void
  absl::Status Begin(SwitchId id, const proto::Switch& plan, transport::LentBytes source,
                     std::span<std::byte> destination);

  // Sends what may be sent, looks at the time. The group's status: not OK once it is void.
  //   kUnavailable       a rank is lost, or cannot be sent to
  //   kDeadlineExceeded  a rank has sent and taken nothing for options.stall
  //   kDataLoss, kInvalidArgument  what a rank sent does not fit this rank's switch
  //   kAborted           another rank has ended the group; its reason
  absl::Status Progress();

  // All that this rank sends is in place at its receivers, and all that it receives is here.
  bool done() const { return !active_; }

  void OnFrame(const transport::Delivery& delivery) override;

  // Of a member; others are ignored.
  void PeerLost(NodeId node, const std::string& why);
  // Ends the group, here and on the others. `why` is not OK.
  void Void(const absl::Status& why);

  const absl::Status& status() const { return status_; }
  const ExchangeCounters& counters() const { return counters_; }
  int64_t staging_bytes() const;
  int rank() const { return options_.rank; }

 private:
  struct Buffer {
    std::shared_ptr<std::vector<std::byte>> memory;
    bool busy = false;
  };
  struct InFlight {
    uint64_t piece = 0;
    int buffer = -1;  // of the peer's staging; -1: lent by the caller
  };
  struct Early {  // a piece of a switch that has not begun here; its bytes stay until it is answered
    proto::FrameHeader header;
    std::span<const std::byte> payload;
  };
  struct Peer {
    // Sending. Null: nothing to this rank.
    const proto::Transfer* out = nullptr;
    int64_t packed = 0;
    uint64_t next_piece = 0;
    std::deque<InFlight> in_flight;
    std::vector<Buffer> staging;  // [chunks_in_flight]
    // Receiving. Null: nothing from this rank.
    const proto::Transfer* in = nullptr;
    int64_t placed = 0;
    uint64_t expected_piece = 0;
    std::optional<proto::FrameHeader> to_answer;  // the last piece in place that the rank has not been told of
    std::deque<Early> early;

    bool sent() const { return out == nullptr || (packed == out->bytes() && in_flight.empty()); }
    bool received() const { return in == nullptr || placed == in->bytes(); }
  };

  SwitchExchange(const ExchangeOptions& options, transport::Port& port, Clock& clock);

  absl::Status CheckBegin(const SwitchId& id, const proto::Switch& plan, size_t source, size_t destination) const;
  int RankOf(NodeId node) const;
  std::string Name(int rank) const;
  void OnPart(int rank, const transport::Delivery& delivery);
  void OnTaken(int rank, const proto::FrameHeader& header);
  void OnVoid(int rank, std::span<const std::byte> text);
  absl::Status TakePart(int rank, const proto::FrameHeader& header, std::span<const std::byte> payload);
  void DropPart(int rank, const proto::FrameHeader& header);
  void TakeEarly(int rank);
  absl::Status Answer(int rank);
  absl::StatusOr<bool> SendPiece(int rank);
  absl::Status SendPieces();
  absl::Status LookAtTheClock();
  std::string WaitsFor() const;
  void Fail(const absl::Status& why, bool tell_others);
  void EndIfComplete();
  uint64_t PieceId(uint64_t piece) const;

  const ExchangeOptions options_;
  transport::Port& port_;
  Clock& clock_;
  absl::Status status_;
  std::vector<Peer> peers_;  // by rank; this one's is unused
  SwitchId id_;
  bool begun_ = false;   // any switch
  bool active_ = false;  // id_ is under way
  uint64_t fingerprint_ = 0;
  int64_t chunk_bytes_ = 0;
  transport::LentBytes source_;
  std::span<std::byte> destination_;
  absl::Time last_progress_;
  ExchangeCounters counters_;
};

}  // namespace dovetail::sequence_parallel
