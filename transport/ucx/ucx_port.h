#pragma once
#include <poll.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/ids.h"
#include "base/status.h"
#include "transport/fabric.h"
#include "transport/ucx/lanes.h"
#include "transport/ucx/receive_window.h"
#include "transport/ucx/retired_regions.h"
#include "transport/ucx/send_window.h"
#include "transport/ucx/wait_spin.h"
#include "transport/waiter.h"

namespace dovetail::transport::ucx {

class UcxPeer;
class UcxWorker;

struct UcxOptions {
  NodeId node;  // of this port, unique in the cluster
  Epoch epoch;  // this incarnation of it
  Lanes lanes = Lanes::kAny;
  std::string devices;  // network devices, comma-separated; empty: all
  int first_port = 0;   // TCP ports to listen on, inclusive; 0: any
  int last_port = 0;
  uint64_t max_frame_bytes = uint64_t{256} << 20;      // of a payload; the same on every node
  uint64_t max_bytes_in_flight = uint64_t{512} << 20;  // to one peer, unread or unanswered; the same on every node
  // That each peer may PUT into, on shared memory; a power of two; 0: none. Addresses, of which memory is taken by what
  // is in flight. All that may be in flight has room, also rounded up to powers of two (slot_allocator.h).
  uint64_t receive_region_bytes = uint64_t{1} << 30;
  uint64_t max_retired_bytes = uint64_t{32} << 30;   // of regions of removed peers; beyond it new peers get none
  uint64_t put_min_bytes = 0;                        // smaller tensors go as active messages: measured, see the ADR
  absl::Duration spin = absl::Microseconds(50);      // Wait polls this long before it sleeps,
  absl::Duration most_spin = absl::Milliseconds(1);  // or this long, while waits are that short (wait_spin.h)
  absl::Duration keepalive = absl::Seconds(1);       // of UCX; finds some dead peers, no stopped ones
  absl::Duration beat = absl::Milliseconds(50);      // this node sends every peer something at least so often
  absl::Duration silence = absl::Milliseconds(500);  // SilentPeers() are those not heard for longer
  absl::Duration close_timeout = absl::Milliseconds(200);  // the destructor tries this long to send what was posted

  absl::Status Validate() const;  // names the field
};

// A peer that can no longer be reached, or broke the protocol. It is sent nothing more; RemovePeer() takes it away.
struct PeerFailure {
  NodeId node;
  Epoch epoch;
  absl::Status status;
};

struct UcxCounters {
  uint64_t frames_sent = 0;
  uint64_t frames_received = 0;  // handed to the node
  uint64_t bytes_sent = 0;       // payloads
  uint64_t bytes_received = 0;
  uint64_t dropped_malformed = 0;  // no valid header
  uint64_t dropped_foreign = 0;    // of an unknown node or another incarnation, or without this node's key
  uint64_t dropped_refused = 0;    // of a peer, but with a frame header that is not valid
  uint64_t dropped_repeated = 0;
};

// Payloads sent to one peer, frames that wait for credit included.
struct LinkBytes {
  uint64_t messages = 0;
  uint64_t tensors = 0;
};

// A node's port to the nodes of other processes, over UCX. Payloads travel in active messages and are received into
// memory of UCX, aligned to 64 bytes. On shared memory, tensors of put_min_bytes and more are PUT into a region that
// the receiver made for this peer, if it could and if there is room in it for the tensor, and the header that tells of
// one is put into the region's ring (frame_ring.h); docs/adr/0014-payloads-over-ucx.md says why. Either way a tensor
// stays until this node has answered it (IsAnswer, send_window.h) or removes the peer.
//
// Peers are made known by the control plane: each side adds the other, in any order, with the address that the other
// gave out. Frames may be sent at once; they leave when the peer has added this node too. Frames of one peer are handed
// over in the order they were sent.
//
// UCX does not notice stopped peers at all, and dead ones on the same host late or never. The port reports a process
// that ends on its own host at once, and tells which peers have been silent: that may be a stopped peer, a cut network,
// or one that is busy and polls its port too seldom, which only the nodes can tell apart.
//
// A peer on shared memory that was removed while its process goes on may be in the middle of a PUT. Its region stays as
// long as that is so (RetiredRegions) and belongs to no other.
//
// The event loop must keep calling Poll or Wait, since payloads beyond some 100 KiB leave only then.
// Errors: as Port. SendMessage and SendTensor also return kUnavailable once the peer has failed, kInvalidArgument for
// payloads over max_frame_bytes; kResourceExhausted also when max_bytes_in_flight are unread or unanswered.
// Threads: reactor-owned, except Ring(), which is thread-safe.
class UcxPort final : public Port, public Waiter {
 public:
  // kFailedPrecondition: this host lacks the lanes asked for.
  static absl::StatusOr<std::unique_ptr<UcxPort>> Create(const UcxOptions& options);

  // Sends what is posted, for at most close_timeout, then closes by force. Never hangs on a peer.
  ~UcxPort() override;

  // For the control plane to tell the other nodes. Nodes of different UCX builds must not connect.
  std::string local_address() const;
  static std::string Version();

  // What this port listens on, for operators: "tcp 10.0.0.5:7200", "shared memory".
  std::string listening() const;

  // Connects to incarnation `epoch` of a node. Not from inside a FrameHandler.
  //   kFailedPrecondition  it runs another version of UCX, or no lane that was asked for leads to it
  //   kInvalidArgument, kDataLoss  the address is not its, or damaged
  //   kAlreadyExists       an incarnation of it is a peer: remove that one first
  absl::Status AddPeer(NodeId node, const std::string& address, const std::string& version, Epoch epoch);

  // Forgets a peer and everything it sent, and sends it nothing more. Returns at once. kNotFound. Not from inside a
  // FrameHandler. What is half sent (4 MiB at most, and the frame that passed this) is read until it is sent or the
  // connection breaks; what is never sent is given back to its owner.
  absl::Status RemovePeer(NodeId node);

  // Both sides have added each other.
  bool Connected(NodeId node) const;

  // The transports that carry data to a peer, as "posix/memory" or "tcp/eth0".
  absl::StatusOr<std::string> LaneOf(NodeId node) const;

  LinkBytes BytesTo(NodeId node) const;  // nothing if it is no peer

  // Peers that failed since the last call. A failed peer is reported once; Wait returns when there is one.
  std::vector<PeerFailure> TakeFailures();

  // Peers that were not heard for `silence`, up to the last time that this port had read everything that was there:
  // time in which it was not polled, or in which its frames were handled, says nothing about a peer. A peer that never
  // answered has ten times as long.
  struct Silence {
    NodeId node;
    Epoch epoch;
    absl::Duration length;
  };
  std::vector<Silence> SilentPeers() const;

  const UcxCounters& counters() const { return counters_; }
  uint64_t retired_bytes() const { return retired_.bytes(); }

  // Port
  NodeId id() const override { return options_.node; }
  absl::Status SendMessage(NodeId to, const proto::FrameHeader& header, std::vector<std::byte> payload) override;
  absl::Status SendTensor(NodeId to, const proto::FrameHeader& header, LentBytes payload) override;
  int Poll(FrameHandler& handler, int max_frames) override;

  // Waiter. Polls for `spin` to `most_spin`, then sleeps until a peer or Ring() wakes it.
  void Ring() override;
  bool Wait(absl::Duration timeout) override;
  // As Wait(), for the ports of one thread: true once any of them has something. At most kMostTogether.
  static constexpr size_t kMostTogether = 2;
  static bool WaitForAny(std::span<UcxPort* const> ports, absl::Duration timeout);

 private:
  friend class UcxPeer;
  struct Callbacks;
  enum Doze : int { kQuiet, kRung, kSleeping };

  explicit UcxPort(const UcxOptions& options);
  absl::Status Init();

  absl::Status Send(NodeId to, const proto::FrameHeader& header, WireKind kind, LentBytes payload,
                    std::vector<std::byte>* message);
  UcxPeer* Find(NodeId node) const;
  void OnWire(const WireHeader& header, const std::byte* data, uint64_t bytes, bool* kept);
  void OnFrame(UcxPeer& peer, const WireHeader& header, const std::byte* data, uint64_t bytes, bool* kept);
  const std::byte* Locate(UcxPeer& peer, const WireHeader& header);
  void Progress();
  void PollRing(UcxPeer& peer);
  bool RingsAreEmpty();
  void SetAsleep(bool asleep);
  void DeliverOne(UcxPeer& peer, FrameHandler& handler);
  void ReturnCredits();
  void Report(UcxPeer& peer);
  bool SomethingToDo() const;
  static void Sleep(std::span<UcxPort* const> ports, absl::Duration timeout);
  bool MaySleep(absl::Duration& timeout, std::span<pollfd, 3> fds);
  void Awake(std::span<const pollfd, 3> fds);
  void ReapClosing();
  bool AnswersNoPeer() const;
  void TickAt(absl::Time now) {
    if (now >= next_tick_) Tick(now);
  }
  void Tick(absl::Time now);
  void LookAtTheClock();
  void TakeDeaths();

  const UcxOptions options_;
  uint64_t key_ = 0;
  std::unique_ptr<UcxWorker> worker_;
  std::vector<std::unique_ptr<UcxPeer>> peers_;
  absl::flat_hash_map<NodeId, UcxPeer*> by_node_;
  mutable UcxPeer* last_found_ = nullptr;  // in by_node_: mostly one and the same is asked for again
  std::vector<std::unique_ptr<UcxPeer>> closing_;
  RetiredRegions retired_;
  std::vector<PeerFailure> failures_;
  size_t next_peer_ = 0;      // whose turn it is
  bool deliverable_ = false;  // a frame may wait for its turn
  bool delivering_ = false;
  bool delivered_one_ = false;  // since the last look at the clock
  UcxCounters counters_;
  absl::Time listened_;         // the tick at which UCX last had nothing more
  absl::Time now_, next_tick_;  // of the last tick; a message does not pay for a look at the clock
  uint32_t polls_ = 0;
  uint32_t polls_of_rings_ = 0;  // since UCX last made progress
  uint32_t vain_wakeups_ = 0;    // of Sleep() by UCX, which has made no progress since
  uint64_t cycles_ = 0;          // at the last look at the clock
  bool cut_off_ = false;         // no way led to a peer, whose greeting UCX may still want to answer (UcxPeer::Wiring)
  bool connected_one_ = false;   // since Wait() was called

  int bell_fd_ = -1;
  int deaths_fd_ = -1;  // an epoll of the peers' processes
  int edges_fd_ = -1;   // an epoll of UCX's descriptor that tells of what is new only
  std::atomic<int> doze_{kQuiet};
  WaitSpin spin_;
};

}  // namespace dovetail::transport::ucx
