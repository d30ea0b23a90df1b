#pragma once
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "base/ids.h"
#include "base/status.h"
#include "transport/ucx/frame_ring.h"
#include "transport/ucx/process.h"
#include "transport/ucx/receive_window.h"
#include "transport/ucx/region.h"
#include "transport/ucx/send_window.h"
#include "transport/ucx/slot_allocator.h"
#include "transport/ucx/socket_guard.h"
#include "transport/ucx/ucx_worker.h"

namespace dovetail::transport::ucx {

class UcxPort;

// One incarnation of another node, as a UcxPort sees it: an endpoint, what was sent over it and what came.
// Threads: reactor-owned, as its port; outlives its endpoint's callbacks: the port keeps it until Closed().
class UcxPeer {
 public:
  UcxPeer(UcxPort& port, const NodeAddress& address, uint64_t max_bytes);
  ~UcxPeer();

  // Makes the endpoint and greets. On an error nothing was sent.
  absl::Status Connect(const NodeAddress& address, Lanes lanes);

  void SendControl(WireKind kind);  // nothing if the last of that kind is still on its way
  void OnGreeting(const WireHeader& header, std::string_view region_key);

  absl::Status Send(const proto::FrameHeader& header, WireKind kind, LentBytes payload,
                    std::vector<std::byte>* message);

  const ReceiveRegion* region() const { return region_.get(); }  // where the peer may PUT; null: nowhere
  RingReader* ring() { return ring_ ? &*ring_ : nullptr; }       // of it

  // The peer's port ends and has given up the region: it writes there no more.
  void OnGoodbye() { region_released_ = true; }

  // Before the end of this port: gives up the peer's region and says so. False: there is none to give up.
  bool SayGoodbye();

  // The region of a peer that was removed, if it may still write there, and its process.
  std::unique_ptr<ReceiveRegion> TakeRegion();
  ProcessWatch& process() { return process_; }

  // When a valid frame last came, and one was last sent, to within a tick of the port.
  absl::Time heard() const { return heard_; }
  void Hear(absl::Time now) { heard_ = now; }
  absl::Time spoke() const { return spoke_; }

  // What a valid header of the peer says about frames of ours.
  void OnAcknowledgement(const WireHeader& header);

  // Before a frame is handed over, and after.
  void BeginDelivery(const ReceiveWindow::Frame& frame);
  void EndDelivery(ReceiveWindow::Frame& frame);

  // The peer is lost: from now on Send refuses. Only the first reason counts.
  [[gnu::cold]] void Fail(const absl::Status& status);

  bool OwesCredit() const;

  // Starts to send what is posted; true once it is sent, or never will be.
  void StartFlush();
  bool Flushed();

  // Gives everything received back, and what was not posted to its owners, and sends nothing more. A TCP endpoint stays
  // until its connection breaks, as it does when the other side ends: UCX 1.13 crashes when one is closed by force
  // while it still has something to write and the connection breaks afterwards, and when the answer to a flush comes
  // over a link that was cut meanwhile.
  void StartClose();
  bool Closing() const { return endpoint_ == nullptr; }

  // Its TCP connection is neither made nor broken: UCX 1.13 aborts when such an endpoint, or its worker, goes while an
  // answer to the peer's greeting waits in it (ucp_request.c:684).
  bool Wiring() const {
    return endpoint_ != nullptr && !connected_ && !broken_ && lane_.find("tcp") != std::string::npos;
  }
  int OpenTcpLanes() const;  // at most as many TCP connections are its
  bool Closed();             // drives closing
  void ForceClose();         // now, if it was not yet; the worker must not be progressed any more unless Flushed()

  uint64_t message_bytes() const { return message_bytes_; }
  uint64_t tensor_bytes() const { return tensor_bytes_; }

  NodeId node() const { return node_; }
  Epoch epoch() const { return epoch_; }
  bool connected() const { return connected_; }
  const absl::Status& failure() const { return failure_; }
  const std::string& lane() const { return lane_; }
  ReceiveWindow& received() { return received_; }

 private:
  struct Callbacks;

  bool PassedTheGuard() const;
  void Begin(WireHeader& header, WireKind kind);
  [[gnu::cold]] absl::Status Refusal() const;
  void MakeRegion();
  absl::Status OpenRegion(std::string_view key);
  void Place(SendWindow::Frame& frame);
  void Post(SendWindow::Frame& frame);
  void PostHeader(SendWindow::Frame& frame, std::span<const std::byte> payload);
  bool GoesThroughRing(const SendWindow::Frame& frame) const;
  void Put(SendWindow::Frame& frame);
  void Finish(WireHeader& header);
  void PostWaiting();
  void Sent(SendWindow::Frame& frame);
  void ReleaseAnswered(const proto::FrameHeader& answer);
  static void GiveBack(ucp_worker_h worker, const ReceiveWindow::Frame& frame);
  [[gnu::cold]] void FailAt(const char* what, ucs_status_t status);
  bool Finished(ucs_status_ptr_t& request);

  UcxPort& port_;
  const NodeId node_;
  const Epoch epoch_;
  const uint64_t key_;  // the peer's
  // Of every message, close to each other: between two of them the kernel has had the cache.
  ucp_ep_h endpoint_ = nullptr;
  bool connected_ = false;
  bool broken_ = false;  // says UCX
  // The frame being handed over, if it is a tensor; and whether it has been answered meanwhile.
  bool delivering_tensor_ = false;
  bool answered_at_once_ = false;
  uint16_t delivering_micro_batch_ = 0;
  absl::Status failure_;
  absl::Time heard_, spoke_;
  uint64_t message_bytes_ = 0, tensor_bytes_ = 0;  // sent
  uint64_t posted_ = 0;                            // frames below it have left the window for UCX
  uint64_t bytes_posted_ = 0;                      // that UCX still reads
  uint64_t delivered_told_ = 0;                    // the last `delivered` sent to the peer
  uint64_t bytes_untold_ = 0;                      // of messages handed over since
  SendWindow sent_;
  ReceiveWindow received_;

  std::string lane_;
  KnownTicket ticket_;  // of the peer's TCP listeners
  std::unique_ptr<ReceiveRegion> region_;
  std::optional<RingReader> ring_;        // of region_
  std::optional<RingWriter> to_ring_;     // of remote_
  std::string region_key_;                // for the peer
  std::unique_ptr<RemoteRegion> remote_;  // the peer's region
  std::unique_ptr<SlotAllocator> slots_;  // of it
  SendWindow::Frame control_[4];          // hello, welcome, credit, goodbye
  ProcessIdentity owner_;                 // the peer's process, if it is on this host
  ProcessWatch process_;                  // of the peer; watches nothing if the peer may be on another host
  bool region_released_ = false;
  ucs_status_ptr_t close_request_ = nullptr;
  ucs_status_ptr_t flush_request_ = nullptr;
};

}  // namespace dovetail::transport::ucx
