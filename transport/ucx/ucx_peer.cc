#include "transport/ucx/ucx_peer.h"

#include <atomic>
#include <cstring>
#include <utility>

#include "absl/strings/str_join.h"
#include "base/log.h"
#include "transport/ucx/ucx_port.h"

namespace dovetail::transport::ucx {
namespace {

inline constexpr uint64_t kMaxBytesPosted = 4 << 20;  // the rest waits where it can still be dropped
inline constexpr uint64_t kCreditEveryFrames = kMaxFramesInFlight / 8;

}  // namespace

struct UcxPeer::Callbacks {
  static void OnSent(void* request, ucs_status_t status, void* user_data) {
    auto& frame = *static_cast<SendWindow::Frame*>(user_data);
    auto& peer = *static_cast<UcxPeer*>(frame.owner);
    peer.Sent(frame);
    if (status != UCS_OK && status != UCS_ERR_CANCELED) peer.FailAt("a frame could not be sent", status);
    ucp_request_free(request);
    peer.PostWaiting();
  }

  static void OnEndpointError(void* argument, ucp_ep_h, ucs_status_t status) {
    auto& peer = *static_cast<UcxPeer*>(argument);
    peer.broken_ = true;
    peer.FailAt("the connection broke", status);
  }
};

UcxPeer::UcxPeer(UcxPort& port, const NodeAddress& address, uint64_t max_bytes)
    : port_(port),
      node_(address.node),
      epoch_(address.epoch),
      key_(address.key),
      sent_(max_bytes, this),
      received_(max_bytes) {
  for (SendWindow::Frame& frame : control_) frame.owner = this;
}

UcxPeer::~UcxPeer() = default;

absl::Status UcxPeer::Connect(const NodeAddress& address, Lanes lanes) {
  ticket_ = KnownTicket(address.listeners, address.ticket);
  ucp_ep_params_t params{};
  params.field_mask =
      UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t*>(address.worker.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler = {Callbacks::OnEndpointError, this};
  const ucs_status_t status = ucp_ep_create(port_.worker_->get(), &params, &endpoint_);
  if (status == UCS_ERR_UNREACHABLE)
    return FailedPrecondition(
        "no lane of --lanes ", absl::string_view(NameOf(lanes).data(), NameOf(lanes).size()), " leads there",
        lanes == Lanes::kShm ? ": shared memory needs the same --lanes there, one host and one PID namespace; or use "
                               "--lanes tcp"
                             : "; was it started with the same --lanes?");
  if (status != UCS_OK) return UcxError(status, "UCX endpoint");
  const std::vector<std::string> transports = TransportsIn(DescribeEndpoint(endpoint_));
  lane_ = absl::StrJoin(transports, ",");
  DT_RETURN_IF_ERROR(CheckLanes(lanes, transports));
  if (CheckLanes(Lanes::kShm, transports).ok()) {
    owner_ = address.process;
    process_ = ProcessWatch(owner_);
    if (port_.options_.receive_region_bytes > 0) MakeRegion();
  }
  SendControl(WireKind::kHello);
  return failure_;
}

// A build of UCX that uses other socket calls than those that are wrapped would take connections from anyone.
bool UcxPeer::PassedTheGuard() const {
  if (lane_.find("tcp") == std::string::npos) return true;
  const GuardCounters counters = CountersOfGuard();
  return counters.admitted + counters.presented > 0;
}

// All but `frame`.
void UcxPeer::Begin(WireHeader& header, WireKind kind) {
  header.magic = kWireMagic;
  header.version = kWireVersion;
  header.kind = kind;
  header.from = port_.options_.node.value();
  header.from_epoch = port_.options_.epoch.value();
  header.key = key_;
  header.sequence = header.offset = 0;
  header.reserved = 0;
}

void UcxPeer::SendControl(WireKind kind) {
  SendWindow::Frame& frame = control_[kind == WireKind::kGoodbye ? 3 : static_cast<int>(kind) - 1];
  if (frame.busy || !failure_.ok()) return;
  Begin(frame.header, kind);
  if (kind == WireKind::kHello || kind == WireKind::kWelcome) {  // greetings tell the limits, which must be alike
    frame.header.sequence = port_.options_.max_frame_bytes;
    frame.header.offset = port_.options_.max_bytes_in_flight;
    frame.payload = std::as_bytes(std::span(region_key_));
  }
  Post(frame);
}

void UcxPeer::OnGreeting(const WireHeader& header, std::string_view region_key) {
  if (header.sequence != port_.options_.max_frame_bytes || header.offset != port_.options_.max_bytes_in_flight)
    return Fail(FailedPrecondition("it takes frames of ", header.sequence, " bytes and ", header.offset,
                                   " in flight, this node ", port_.options_.max_frame_bytes, " and ",
                                   port_.options_.max_bytes_in_flight, "; start every node with the same limits"));
  if (header.kind == WireKind::kHello) SendControl(WireKind::kWelcome);
  if (connected_) return;
  if (!PassedTheGuard())
    return Fail(
        FailedPrecondition("this build of UCX makes TCP connections past the check of who connects "
                           "(socket_guard.h); use UCX as packaged by Debian 12, or what scripts/fetch_ucx_cuda or "
                           "scripts/fetch_ucx_rdma gets"));
  if (!region_key.empty()) {
    if (const absl::Status opened = OpenRegion(region_key); !opened.ok()) return Fail(opened);
  }
  connected_ = true;
  port_.connected_one_ = true;
  PostWaiting();
}

absl::Status UcxPeer::Send(const proto::FrameHeader& header, WireKind kind, LentBytes payload,
                           std::vector<std::byte>* message) {
  SendWindow::Frame* frame = sent_.Next(payload.size(), kind != WireKind::kMessage);
  if (!failure_.ok() || frame == nullptr) return Refusal();
  Begin(frame->header, kind);
  frame->header.frame = header;
  frame->payload = payload;
  frame->lender = std::move(payload.owner);
  if (message != nullptr) frame->message = std::move(*message);
  if (kind == WireKind::kTensor && !payload.empty() && payload.size() >= port_.options_.put_min_bytes &&
      slots_ != nullptr)
    Place(*frame);
  (kind == WireKind::kMessage ? message_bytes_ : tensor_bytes_) += payload.size();
  sent_.Push(*frame);
  PostWaiting();
  if (IsAnswer(header)) ReleaseAnswered(header);  // when the peer has its frame already
  return absl::OkStatus();
}

absl::Status UcxPeer::Refusal() const {
  if (!failure_.ok()) return absl::UnavailableError(absl::StrCat("node ", node_.value(), ": ", failure_.message()));
  return ResourceExhausted("node ", node_.value(), " has ", sent_.unread(), " unread frames from node ",
                           port_.options_.node.value(), " and ", sent_.bytes(), " bytes; at most ", kMaxFramesInFlight,
                           " and ", port_.options_.max_bytes_in_flight);
}

void UcxPeer::PostWaiting() {
  while (posted_ < sent_.next() && bytes_posted_ < kMaxBytesPosted && connected_ && failure_.ok())
    Post(sent_.At(posted_++));
}

void UcxPeer::Sent(SendWindow::Frame& frame) {
  bytes_posted_ -= frame.payload.size();
  frame.busy = false;
  frame.lender.reset();
  if (!frame.of_window) return;
  if (frame.header.kind == WireKind::kMessage) frame.message = std::vector<std::byte>();  // with its memory
  sent_.Sent(frame);
}

void UcxPeer::Place(SendWindow::Frame& frame) {
  const uint64_t offset = slots_->Allocate(frame.payload.size());
  if (offset == SlotAllocator::kNone) return;  // too large, or the region is full: it goes as an active message
  frame.header.kind = WireKind::kPlaced;
  frame.header.offset = offset;
}

void UcxPeer::Post(SendWindow::Frame& frame) {
  frame.busy = true;
  bytes_posted_ += frame.payload.size();
  if (GoesThroughRing(frame))
    Put(frame);
  else
    PostHeader(frame, frame.payload);
}

bool UcxPeer::GoesThroughRing(const SendWindow::Frame& frame) const {
  if (frame.header.kind == WireKind::kPlaced) return true;
  return frame.header.kind == WireKind::kTensor && frame.payload.empty() && to_ring_ &&
         port_.options_.put_min_bytes == 0;
}

// The region is mapped here: a put is a store, and so is what tells of it, which the ring keeps behind.
void UcxPeer::Put(SendWindow::Frame& frame) {
  if (!frame.payload.empty())
    std::memcpy(remote_->data() + frame.header.offset, frame.payload.data(), frame.payload.size());
  Finish(frame.header);
  ++port_.counters_.frames_sent;
  port_.counters_.bytes_sent += frame.payload.size();
  if (to_ring_->Push(frame.header)) SendControl(WireKind::kCredit);
  Sent(frame);
}

// What every header says in addition.
void UcxPeer::Finish(WireHeader& header) {
  header.delivered = delivered_told_ = received_.delivered();
  spoke_ = port_.now_;
  bytes_untold_ = 0;
  Seal(header);
}

void UcxPeer::PostHeader(SendWindow::Frame& frame, std::span<const std::byte> payload) {
  Finish(frame.header);
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
  param.cb.send = Callbacks::OnSent;
  param.user_data = &frame;
  param.flags = UCP_AM_SEND_FLAG_EAGER;
  ++port_.counters_.frames_sent;
  port_.counters_.bytes_sent += frame.payload.size();
  const ucs_status_ptr_t request = ucp_am_send_nbx(endpoint_, kActiveMessageId, &frame.header, sizeof(WireHeader),
                                                   payload.data(), payload.size(), &param);
  if (UCS_PTR_IS_PTR(request)) return;
  Sent(frame);
  if (UCS_PTR_IS_ERR(request)) FailAt("a frame could not be sent", UCS_PTR_STATUS(request));
}

void UcxPeer::OnAcknowledgement(const WireHeader& header) {
  if (!sent_.Delivered(header.delivered))
    return Fail(InvalidArgument("it acknowledges ", header.delivered, " frames, but was sent ", sent_.next()));
  if (header.kind >= WireKind::kMessage && IsAnswer(header.frame))
    sent_.Answered(header.frame.micro_batch, header.delivered, [this](const SendWindow::Tensor& tensor) {
      if (tensor.placed && slots_ != nullptr) slots_->Free(tensor.offset);
    });
}

// Without a region everything goes as active messages, which is slower and nothing else.
void UcxPeer::MakeRegion() {
  if (!port_.retired_.HasRoom()) {
    LogWarning("node ", node_.value(), ": its tensors come as active messages: ", port_.retired_.bytes(),
               " bytes are kept for stopped peers that may still write there; end their processes");
    return;
  }
  auto region = ReceiveRegion::Create(port_.options_.receive_region_bytes);
  if (!region.ok()) {
    LogWarning("node ", node_.value(),
               ": its tensors come as active messages: ", std::string(region.status().message()));
    return;
  }
  region_ = *std::move(region);
  ring_.emplace(region_->front());
  region_key_ = Encode(RegionKey{port_.options_.node, port_.options_.epoch, node_, region_->descriptor(),
                                 region_->size_bytes(), region_->token()});
}

absl::Status UcxPeer::OpenRegion(std::string_view bytes) {
  DT_ASSIGN_OR_RETURN(const RegionKey key, DecodeRegionKey(bytes));
  if (key.owner != node_ || key.owner_epoch != epoch_ || key.writer != port_.options_.node)
    return InvalidArgument("region key: it is for node ", key.writer.value(), " into node ", key.owner.value(),
                           " epoch ", key.owner_epoch.value());
  if (process_.Ended()) return absl::UnavailableError("region key: its owner has ended");
  DT_ASSIGN_OR_RETURN(remote_, RemoteRegion::Open(owner_, key.descriptor, key.bytes, key.token));
  slots_ = std::make_unique<SlotAllocator>(key.bytes);
  to_ring_.emplace(remote_->front());
  return absl::OkStatus();
}

void UcxPeer::BeginDelivery(const ReceiveWindow::Frame& frame) {
  delivering_tensor_ = frame.tensor;
  delivering_micro_batch_ = frame.header.micro_batch;
  answered_at_once_ = false;
}

void UcxPeer::EndDelivery(ReceiveWindow::Frame& frame) {
  bytes_untold_ += frame.bytes;
  if (frame.tensor && !frame.refused && !answered_at_once_) {
    received_.Hold(frame);
  } else {
    GiveBack(port_.worker_->get(), frame);
    received_.Release(frame);
  }
  delivering_tensor_ = false;
}

// A handler that answers is still at work on the frame it was handed, whose memory therefore outlives it.
void UcxPeer::ReleaseAnswered(const proto::FrameHeader& answer) {
  if (delivering_tensor_ && delivering_micro_batch_ == answer.micro_batch) answered_at_once_ = true;
  received_.Answer(answer.micro_batch,
                   [this](const ReceiveWindow::Frame& frame) { GiveBack(port_.worker_->get(), frame); });
}

void UcxPeer::GiveBack(ucp_worker_h worker, const ReceiveWindow::Frame& frame) {
  if (frame.data != nullptr && !frame.placed) ucp_am_data_release(worker, const_cast<std::byte*>(frame.data));
}

std::unique_ptr<ReceiveRegion> UcxPeer::TakeRegion() {
  ring_.reset();
  if (region_released_) region_.reset();
  return std::move(region_);
}

bool UcxPeer::SayGoodbye() {
  // What still waits for its turn would be put after the goodbye: then there is none.
  if (remote_ == nullptr || endpoint_ == nullptr || broken_ || posted_ != sent_.next()) return false;
  to_ring_.reset();
  slots_.reset();
  remote_.reset();
  SendControl(WireKind::kGoodbye);
  return true;
}

bool UcxPeer::OwesCredit() const {
  return received_.delivered() - delivered_told_ >= kCreditEveryFrames ||
         bytes_untold_ >= port_.options_.max_bytes_in_flight / 8;
}

void UcxPeer::Fail(const absl::Status& status) {
  if (!failure_.ok()) return;
  failure_ = status;
  port_.Report(*this);
}

// What UCX says of a peer that has ended differs from version to version. The memory of a process that ends is gone
// before it has ended.
void UcxPeer::FailAt(const char* what, ucs_status_t status) {
  if (process_.Ended()) return Fail(absl::UnavailableError("its process has ended"));
  if (status == UCS_ERR_UNREACHABLE && process_.fd() >= 0)
    return Fail(absl::UnavailableError("its process has ended, or has given its memory up"));
  Fail(UcxError(status, what));
}

bool UcxPeer::Finished(ucs_status_ptr_t& request) {
  if (!UCS_PTR_IS_PTR(request)) return true;
  if (ucp_request_check_status(request) == UCS_INPROGRESS) return false;
  ucp_request_free(std::exchange(request, nullptr));
  return true;
}

void UcxPeer::StartFlush() {
  if (endpoint_ == nullptr || broken_ || UCS_PTR_IS_PTR(flush_request_)) return;
  const ucp_request_param_t param{};
  flush_request_ = ucp_ep_flush_nbx(endpoint_, &param);
}

bool UcxPeer::Flushed() {
  return broken_ || (Finished(flush_request_) && (posted_ == sent_.next() || !connected_ || !failure_.ok()));
}

void UcxPeer::StartClose() {
  received_.Clear([this](const ReceiveWindow::Frame& frame) { GiveBack(port_.worker_->get(), frame); });
  if (failure_.ok()) failure_ = absl::CancelledError("it was removed");
  for (; posted_ < sent_.next(); ++posted_) sent_.At(posted_).lender.reset();
  if (lane_.find("tcp") == std::string::npos) ForceClose();
}

int UcxPeer::OpenTcpLanes() const {
  int lanes = 0;
  if (endpoint_ == nullptr || broken_) return lanes;
  for (size_t at = lane_.find("tcp/"); at != std::string::npos; at = lane_.find("tcp/", at + 1)) ++lanes;
  return lanes;
}

bool UcxPeer::Closed() {
  if (endpoint_ != nullptr && broken_) ForceClose();
  const bool flushed = Finished(flush_request_);
  return endpoint_ == nullptr && Finished(close_request_) && flushed;
}

void UcxPeer::ForceClose() {
  if (endpoint_ == nullptr) return;
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_EP_CLOSE_FLAG_FORCE;
  close_request_ = ucp_ep_close_nbx(std::exchange(endpoint_, nullptr), &param);
  to_ring_.reset();
  slots_.reset();
  remote_.reset();
}

}  // namespace dovetail::transport::ucx
