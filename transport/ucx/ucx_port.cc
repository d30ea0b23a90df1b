#include "transport/ucx/ucx_port.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <ucp/api/ucp.h>
#include <unistd.h>
#include <x86intrin.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <random>
#include <thread>
#include <utility>

#include "absl/strings/str_join.h"
#include "base/check.h"
#include "transport/ucx/region.h"
#include "transport/ucx/ucx_peer.h"

namespace dovetail::transport::ucx {
namespace {

inline constexpr int kMaxProgressPerPoll = 64;
inline constexpr int kMaxHeadersPerPoll = 64;     // out of one peer's ring
inline constexpr uint32_t kPollsPerProgress = 8;  // of UCX, while rings bring frames
inline constexpr absl::Duration kNap = absl::Milliseconds(1);
inline constexpr uint32_t kVainWakeups = 3;
inline constexpr uint32_t kPollsPerLookAtTheClock = 32;
inline constexpr uint64_t kCyclesBetweenLooks = 5'000'000;
inline constexpr int kSilencesToConnect = 10;  // the other side may hear of this one later
inline constexpr int kDeathsAtATime = 16;

uint64_t RandomKey() {
  std::random_device device;
  return uint64_t{device()} << 32 | device();
}

}  // namespace

struct UcxPort::Callbacks {
  static ucs_status_t OnActiveMessage(void* argument, const void* header, size_t header_bytes, void* data, size_t bytes,
                                      const ucp_am_recv_param_t* param) {
    auto& port = *static_cast<UcxPort*>(argument);
    WireHeader wire;
    const bool whole = (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) == 0 &&
                       (bytes == 0 || (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_DATA) != 0);
    if (!whole || header_bytes != sizeof(wire)) {
      ++port.counters_.dropped_malformed;
      return UCS_OK;
    }
    std::memcpy(&wire, header, sizeof(wire));
    if (!Intact(wire)) {
      ++port.counters_.dropped_malformed;
      return UCS_OK;
    }
    bool kept = false;
    port.OnWire(wire, static_cast<const std::byte*>(data), bytes, &kept);
    return kept ? UCS_INPROGRESS : UCS_OK;
  }
};

absl::Status UcxOptions::Validate() const {
  if (first_port < 0 || last_port > 65535 || last_port < first_port || (first_port == 0) != (last_port == 0))
    return InvalidArgument("data-plane ports ", first_port, "-", last_port, ": not a range within 1-65535");
  if (max_frame_bytes == 0 || max_frame_bytes > proto::kMaxPayloadBytes)
    return InvalidArgument("max_frame_bytes: ", max_frame_bytes, " is outside 1..", proto::kMaxPayloadBytes);
  if (max_bytes_in_flight < max_frame_bytes + max_frame_bytes / 4)
    return InvalidArgument("max_bytes_in_flight: ", max_bytes_in_flight, " is less than 1.25 frames of ",
                           max_frame_bytes, " bytes");
  if (receive_region_bytes != 0 &&
      (!std::has_single_bit(receive_region_bytes) || receive_region_bytes > kMaxRegionBytes))
    return InvalidArgument("receive_region_bytes: ", receive_region_bytes, " is neither 0 nor a power of two up to ",
                           kMaxRegionBytes);
  if (beat <= absl::ZeroDuration() || silence < 4 * beat)
    return InvalidArgument("beat, silence: ", absl::FormatDuration(beat), " and ", absl::FormatDuration(silence),
                           "; silence is at least four beats");
  if (spin < absl::ZeroDuration() || most_spin < spin || keepalive <= absl::ZeroDuration() ||
      close_timeout < absl::ZeroDuration())
    return InvalidArgument(
        "spin, keepalive, close_timeout: must not be negative, nor keepalive 0, nor most_spin less than spin");
  return absl::OkStatus();
}

UcxPort::UcxPort(const UcxOptions& options)
    : options_(options),
      key_(RandomKey()),
      retired_(options.max_retired_bytes),
      listened_(SystemClock().Now()),
      now_(listened_),
      next_tick_(now_),
      spin_(options.spin, options.most_spin) {}

absl::StatusOr<std::unique_ptr<UcxPort>> UcxPort::Create(const UcxOptions& options) {
  DT_RETURN_IF_ERROR(options.Validate());
  std::unique_ptr<UcxPort> port(new UcxPort(options));
  DT_RETURN_IF_ERROR(port->Init());
  return port;
}

absl::Status UcxPort::Init() {
  DT_ASSIGN_OR_RETURN(worker_, UcxWorker::Create({options_.lanes, options_.devices, options_.first_port,
                                                  options_.last_port, options_.keepalive}));
  ucp_am_handler_param_t param{};
  param.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG |
                     UCP_AM_HANDLER_PARAM_FIELD_FLAGS;
  param.id = kActiveMessageId;
  param.cb = Callbacks::OnActiveMessage;
  param.arg = this;
  param.flags = UCP_AM_FLAG_WHOLE_MSG | UCP_AM_FLAG_PERSISTENT_DATA;
  if (const ucs_status_t status = ucp_worker_set_am_recv_handler(worker_->get(), &param); status != UCS_OK)
    return UcxError(status, "UCX active messages");
  bell_fd_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  deaths_fd_ = epoll_create1(EPOLL_CLOEXEC);
  edges_fd_ = epoll_create1(EPOLL_CLOEXEC);
  epoll_event edge{EPOLLIN | EPOLLET, {}};
  if (bell_fd_ < 0 || deaths_fd_ < 0 || edges_fd_ < 0 ||
      epoll_ctl(edges_fd_, EPOLL_CTL_ADD, worker_->event_fd(), &edge) != 0)
    return ResourceExhausted("eventfd, epoll: ", std::strerror(errno));
  return absl::OkStatus();
}

UcxPort::~UcxPort() {
  if (worker_ != nullptr) {
    const absl::Time deadline = SystemClock().Now() + options_.close_timeout;
    const auto progress_until = [&](auto&& done) {
      while (!done() && SystemClock().Now() < deadline) worker_->Progress();
    };
    const auto flushed = [&] {
      return std::all_of(peers_.begin(), peers_.end(), [](auto& peer) { return peer->Flushed(); });
    };
    for (auto& peer : peers_) peer->StartFlush();
    progress_until(flushed);
    for (auto& peer : peers_)
      if (peer->SayGoodbye()) peer->StartFlush();
    progress_until(flushed);
    progress_until([&] { return !AnswersNoPeer(); });
    const bool answers = AnswersNoPeer();
    for (auto& peer : peers_) {
      const bool sent = peer->Flushed() && !peer->Wiring();
      peer->StartClose();
      if (sent) peer->ForceClose();
      closing_.push_back(std::move(peer));
    }
    peers_.clear();
    by_node_.clear();
    last_found_ = nullptr;
    progress_until([&] {
      ReapClosing();
      return std::none_of(closing_.begin(), closing_.end(), [](auto& peer) { return peer->Closing(); });
    });
    const auto wiring = [&] {
      return std::any_of(closing_.begin(), closing_.end(), [](auto& peer) { return peer->Wiring(); });
    };
    progress_until([&] { return !wiring(); });
    retired_.Clear();
    if (wiring() || answers || cut_off_) {
      worker_.release()->Abandon();
    } else {
      for (auto& peer : closing_) peer->ForceClose();
    }
    closing_.clear();
    worker_.reset();
  }
  if (bell_fd_ >= 0) close(bell_fd_);
  if (deaths_fd_ >= 0) close(deaths_fd_);
  if (edges_fd_ >= 0) close(edges_fd_);
}

// UCX makes an endpoint of its own for every greeting that comes, and aborts when its worker goes while the answer
// waits there (UcxPeer::Wiring). Only the connections tell of such endpoints.
bool UcxPort::AnswersNoPeer() const {
  int of_peers = 0;
  for (const auto* peers : {&peers_, &closing_})
    for (const auto& peer : *peers) of_peers += peer->OpenTcpLanes();
  return worker_->connections() > of_peers;
}

std::string UcxPort::Version() { return ucp_get_version_string(); }

std::string UcxPort::local_address() const {
  const absl::StatusOr<std::string> worker = worker_->Address();
  if (!worker.ok()) return "";
  std::vector<SocketAddress> listeners;
  for (const GuardedListener& listener : worker_->listeners()) listeners.push_back(listener.address);
  return Encode(NodeAddress{options_.node, options_.epoch, key_, ThisProcess(), worker_->ticket(), std::move(listeners),
                            *worker});
}

std::string UcxPort::listening() const {
  if (worker_->listeners().empty()) return options_.lanes == Lanes::kRc ? "RDMA" : "shared memory";
  return absl::StrCat("tcp ",
                      absl::StrJoin(worker_->listeners(), ", ", [](std::string* out, const GuardedListener& listener) {
                        *out += listener.address.ToString();
                      }));
}

UcxPeer* UcxPort::Find(NodeId node) const {
  if (last_found_ != nullptr && last_found_->node() == node) return last_found_;
  const auto it = by_node_.find(node);
  if (it == by_node_.end()) return nullptr;
  return last_found_ = it->second;
}

absl::Status UcxPort::AddPeer(NodeId node, const std::string& bytes, const std::string& version, Epoch epoch) {
  DT_CHECK(!delivering_);
  const std::string name = absl::StrCat("node ", node.value());
  if (version != Version())
    return FailedPrecondition(name, ": runs UCX ", version.substr(0, 64), ", this node ", Version(),
                              "; versions do not talk to each other: use one build for every role");
  auto address = DecodeNodeAddress(bytes);
  if (!address.ok()) return Annotate(address.status(), name);
  if (address->node != node || address->epoch != epoch)
    return InvalidArgument(name, " epoch ", epoch.value(), ": the address is that of node ", address->node.value(),
                           " epoch ", address->epoch.value());
  if (node == options_.node) return InvalidArgument(name, ": is this node itself");
  if (const UcxPeer* known = Find(node); known != nullptr)
    return absl::AlreadyExistsError(absl::StrCat(name, ": epoch ", known->epoch().value(), " of it is a peer already"));
  auto peer = std::make_unique<UcxPeer>(*this, *address, options_.max_bytes_in_flight);
  if (absl::Status connected = peer->Connect(*address, options_.lanes); !connected.ok()) {
    cut_off_ = cut_off_ || options_.lanes != Lanes::kShm;
    peer->StartClose();
    closing_.push_back(std::move(peer));
    return Annotate(connected, name);
  }
  if (const int process = peer->process().fd(); process >= 0) {
    epoll_event event{EPOLLIN, {.u32 = node.value()}};
    epoll_ctl(deaths_fd_, EPOLL_CTL_ADD, process, &event);
  }
  peer->Hear(std::max(now_, next_tick_));
  by_node_[node] = peer.get();
  peers_.push_back(std::move(peer));
  return absl::OkStatus();
}

absl::Status UcxPort::RemovePeer(NodeId node) {
  DT_CHECK(!delivering_);
  const auto it = std::find_if(peers_.begin(), peers_.end(), [&](const auto& peer) { return peer->node() == node; });
  if (it == peers_.end()) return NotFound("node ", node.value(), " is no peer");
  UcxPeer& peer = **it;
  peer.StartClose();
  if (const int process = peer.process().fd(); process >= 0) epoll_ctl(deaths_fd_, EPOLL_CTL_DEL, process, nullptr);
  if (auto region = peer.TakeRegion(); region != nullptr && !peer.process().Ended())
    retired_.Add(node, peer.epoch(), std::move(region), std::move(peer.process()));
  closing_.push_back(std::move(*it));
  peers_.erase(it);
  by_node_.erase(node);
  last_found_ = nullptr;
  ReapClosing();
  return absl::OkStatus();
}

void UcxPort::ReapClosing() {
  std::erase_if(closing_, [](auto& peer) { return peer->Closed(); });
}

bool UcxPort::Connected(NodeId node) const {
  const UcxPeer* peer = Find(node);
  return peer != nullptr && peer->connected() && peer->failure().ok();
}

absl::StatusOr<std::string> UcxPort::LaneOf(NodeId node) const {
  const UcxPeer* peer = Find(node);
  if (peer == nullptr) return NotFound("node ", node.value(), " is no peer");
  return peer->lane();
}

LinkBytes UcxPort::BytesTo(NodeId node) const {
  const UcxPeer* peer = Find(node);
  return peer == nullptr ? LinkBytes{} : LinkBytes{peer->message_bytes(), peer->tensor_bytes()};
}

void UcxPort::Report(UcxPeer& peer) { failures_.push_back(PeerFailure{peer.node(), peer.epoch(), peer.failure()}); }

std::vector<PeerFailure> UcxPort::TakeFailures() { return std::exchange(failures_, {}); }

absl::Status UcxPort::Send(NodeId to, const proto::FrameHeader& header, WireKind kind, LentBytes payload,
                           std::vector<std::byte>* message) {
  UcxPeer* peer = Find(to);
  if (peer == nullptr) return NotFound("node ", to.value(), " is no peer");
  if (payload.size() > options_.max_frame_bytes)
    return InvalidArgument("a frame of ", payload.size(), " bytes to node ", to.value(), "; at most ",
                           options_.max_frame_bytes);
  return peer->Send(header, kind, std::move(payload), message);
}

absl::Status UcxPort::SendMessage(NodeId to, const proto::FrameHeader& header, std::vector<std::byte> payload) {
  return Send(to, header, WireKind::kMessage, payload, &payload);
}

absl::Status UcxPort::SendTensor(NodeId to, const proto::FrameHeader& header, LentBytes payload) {
  return Send(to, header, WireKind::kTensor, std::move(payload), nullptr);
}

void UcxPort::OnWire(const WireHeader& header, const std::byte* data, uint64_t bytes, bool* kept) {
  UcxPeer* peer = Find(NodeId(header.from));
  if (header.kind == WireKind::kGoodbye && header.key == key_)
    retired_.Released(NodeId(header.from), Epoch(header.from_epoch));
  if (peer == nullptr || header.key != key_ || peer->epoch() != Epoch(header.from_epoch)) {
    ++counters_.dropped_foreign;
    return;
  }
  if (!peer->failure().ok()) return;
  peer->Hear(now_);
  switch (header.kind) {
    case WireKind::kHello:
    case WireKind::kWelcome: return peer->OnGreeting(header, {reinterpret_cast<const char*>(data), bytes});
    case WireKind::kCredit: return peer->OnAcknowledgement(header);
    case WireKind::kGoodbye: return peer->OnGoodbye();
    case WireKind::kMessage:
    case WireKind::kTensor:
    case WireKind::kPlaced: return OnFrame(*peer, header, data, bytes, kept);
  }
}

// Where the payload of a placed frame lies. Null: not within the peer's region.
const std::byte* UcxPort::Locate(UcxPeer& peer, const WireHeader& header) {
  const ReceiveRegion* region = peer.region();
  const uint64_t bytes = header.frame.payload_bytes;
  if (region == nullptr || bytes > region->size_bytes() || header.offset > region->size_bytes() - bytes ||
      header.offset % 64 != 0)
    return nullptr;
  return region->data() + header.offset;
}

void UcxPort::OnFrame(UcxPeer& peer, const WireHeader& header, const std::byte* data, uint64_t bytes, bool* kept) {
  if (bytes > options_.max_frame_bytes)
    return peer.Fail(InvalidArgument("it sent a frame of ", bytes, " bytes; at most ", options_.max_frame_bytes));
  const bool placed = header.kind == WireKind::kPlaced;
  const bool refused =
      !proto::Validate(header.frame).ok() || (placed ? bytes != 0 : header.frame.payload_bytes != bytes);
  if (refused)
    ++counters_.dropped_refused;
  else if (placed && (data = Locate(peer, header)) == nullptr)
    return peer.Fail(InvalidArgument("it placed ", header.frame.payload_bytes, " bytes at ", header.offset,
                                     ", which is outside its receive region"));
  ReceiveWindow::Frame* frame = nullptr;
  switch (peer.received().Accept(header.sequence, refused ? 0 : header.frame.payload_bytes, frame)) {
    case ReceiveWindow::Verdict::kRepeated: ++counters_.dropped_repeated; return;
    case ReceiveWindow::Verdict::kBeyondCredit:
      return peer.Fail(InvalidArgument("it sent more than ", kMaxFramesInFlight, " unread frames or ",
                                       options_.max_bytes_in_flight, " unanswered bytes"));
    case ReceiveWindow::Verdict::kTaken: break;
  }
  frame->header = header.frame;
  frame->data = frame->bytes > 0 ? data : nullptr;
  frame->tensor = header.kind != WireKind::kMessage && !refused;
  frame->placed = placed;
  frame->refused = refused;
  if (peer.received().HasNext()) deliverable_ = true;
  *kept = frame->bytes > 0 && !placed;
  peer.OnAcknowledgement(header);
}

// Of a ring come frames only, of the peer that may write it only.
void UcxPort::PollRing(UcxPeer& peer) {
  for (int i = 0; i < kMaxHeadersPerPoll && peer.ring()->Ready(); ++i) {
    WireHeader header;
    peer.ring()->Pop(header);
    bool kept = false;  // nothing of UCX came with it
    if (!Intact(header))
      ++counters_.dropped_malformed;
    else if (NodeId(header.from) != peer.node() ||
             (header.kind != WireKind::kTensor && header.kind != WireKind::kPlaced))
      ++counters_.dropped_foreign;
    else
      OnWire(header, nullptr, 0, &kept);
  }
}

bool UcxPort::RingsAreEmpty() {
  return std::none_of(peers_.begin(), peers_.end(),
                      [](const auto& peer) { return peer->ring() != nullptr && peer->ring()->Ready(); });
}

void UcxPort::SetAsleep(bool asleep) {
  for (const auto& peer : peers_)
    if (peer->ring() != nullptr) peer->ring()->SetAsleep(asleep);
}

// What comes through rings is looked at first. UCX, which brings everything else, is not kept waiting by it for long,
// neither by many frames nor by a node that is at work for long after each.
void UcxPort::Progress() {
  for (const auto& peer : peers_)
    if (peer->ring() != nullptr) PollRing(*peer);
  const absl::Duration deaf = now_ - listened_;
  const bool listened_lately = deaf < options_.beat;
  if (deliverable_ && listened_lately && ++polls_of_rings_ < kPollsPerProgress) return;
  polls_of_rings_ = 0;
  // A node that did not poll for a while could not hear its peers, which is not their fault. Their frames may still
  // have to wait for room.
  if (!listened_lately)
    for (auto& peer : peers_) peer->Hear(std::min(now_, peer->heard() + deaf));
  for (int i = 0; i < kMaxProgressPerPoll; ++i) {
    if (worker_->Progress() == 0) {
      listened_ = now_;
      break;
    }
    vain_wakeups_ = 0;
    if (deliverable_ && listened_lately) break;
  }
  if (!closing_.empty()) ReapClosing();
}

void UcxPort::DeliverOne(UcxPeer& peer, FrameHandler& handler) {
  ReceiveWindow::Frame& frame = peer.received().Pop();
  peer.BeginDelivery(frame);
  if (!frame.refused) {
    ++counters_.frames_received;
    counters_.bytes_received += frame.bytes;
    handler.OnFrame(Delivery{peer.node(), frame.header, {frame.data, frame.bytes}});
  }
  peer.EndDelivery(frame);
}

// What must happen now and then: every peer hears something, and the dead are noticed.
void UcxPort::Tick(absl::Time now) {
  now_ = now;
  next_tick_ = now + options_.beat / 2;
  for (auto& peer : peers_) {
    if (peer->connected() && now - peer->spoke() >= options_.beat * 3 / 4) peer->SendControl(WireKind::kCredit);
  }
  TakeDeaths();
  if (!retired_.empty()) retired_.Reap();
}

// The cycle counter costs a fraction of the clock, and mostly says that no tick can be due. It runs at 1 GHz or more.
void UcxPort::LookAtTheClock() {
  const uint64_t cycles = __rdtsc();
  if (cycles - cycles_ < kCyclesBetweenLooks) return;
  cycles_ = cycles;
  TickAt(SystemClock().Now());
}

void UcxPort::TakeDeaths() {
  epoll_event events[kDeathsAtATime];
  const int count = epoll_wait(deaths_fd_, events, kDeathsAtATime, 0);
  for (int i = 0; i < count; ++i) {
    UcxPeer* peer = Find(NodeId(events[i].data.u32));
    if (peer == nullptr) continue;
    epoll_ctl(deaths_fd_, EPOLL_CTL_DEL, peer->process().fd(), nullptr);
    peer->Fail(absl::UnavailableError("its process has ended"));
  }
}

std::vector<UcxPort::Silence> UcxPort::SilentPeers() const {
  std::vector<Silence> silent;
  for (const auto& peer : peers_) {
    const absl::Duration length = listened_ - peer->heard();
    if (length > options_.silence * (peer->connected() ? 1 : kSilencesToConnect))
      silent.push_back({peer->node(), peer->epoch(), length});
  }
  return silent;
}

int UcxPort::Poll(FrameHandler& handler, int max_frames) {
  DT_CHECK(!delivering_);
  if (delivered_one_ || ++polls_ % kPollsPerLookAtTheClock == 0) LookAtTheClock();
  delivered_one_ = false;
  Progress();
  if (!deliverable_) return 0;
  delivering_ = true;
  int handled = 0;
  size_t idle = 0;
  for (; handled < max_frames && idle < peers_.size(); ++next_peer_) {
    if (next_peer_ >= peers_.size()) next_peer_ = 0;
    UcxPeer& peer = *peers_[next_peer_];
    if (peer.received().HasNext()) {
      if (delivered_one_) LookAtTheClock();  // the node may have been at work for long
      DeliverOne(peer, handler);
      delivered_one_ = true;
      ++handled;
      idle = 0;
    } else {
      ++idle;
    }
  }
  if (idle >= peers_.size()) deliverable_ = false;
  delivering_ = false;
  if (handled > 0) ReturnCredits();
  return handled;
}

void UcxPort::ReturnCredits() {
  for (auto& peer : peers_)
    if (peer->OwesCredit()) peer->SendControl(WireKind::kCredit);
}

void UcxPort::Ring() {
  if (doze_.exchange(kRung, std::memory_order_acq_rel) != kSleeping) return;
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(bell_fd_, &one, sizeof(one));
}

bool UcxPort::SomethingToDo() const {
  return doze_.load(std::memory_order_acquire) == kRung || connected_one_ || !failures_.empty() || deliverable_;
}

bool UcxPort::Wait(absl::Duration timeout) {
  UcxPort* const self = this;
  return WaitForAny({&self, 1}, timeout);
}

bool UcxPort::WaitForAny(std::span<UcxPort* const> ports, absl::Duration timeout) {
  const absl::Time begun = SystemClock().Now();
  absl::Duration longest_spin;
  for (UcxPort* port : ports) {
    port->TickAt(begun);
    port->connected_one_ = false;
    longest_spin = std::max(longest_spin, port->spin_.now());
  }
  const absl::Time deadline = begun + std::min(timeout, absl::Hours(1));
  const absl::Time spin_end = std::min(deadline, begun + longest_spin);
  while (true) {
    bool something = false;
    absl::Time next_tick = deadline;
    for (UcxPort* port : ports) {
      port->Progress();
      something = something || port->SomethingToDo();
    }
    if (something) {
      for (UcxPort* port : ports) {
        port->doze_.store(kQuiet, std::memory_order_release);
        // Not of the bell, which other threads ring.
        if (port->deliverable_) port->spin_.Came(SystemClock().Now() - begun);
      }
      return true;
    }
    const absl::Time now = SystemClock().Now();
    for (UcxPort* port : ports) {
      if (now >= deadline) port->spin_.TimedOut();
      port->TickAt(now);
      next_tick = std::min(next_tick, port->next_tick_);
    }
    if (now >= deadline) return false;
    if (now >= spin_end) {
      Sleep(ports, next_tick - now);
    } else if (now - begun >= ports.front()->options_.spin) {
      std::this_thread::yield();  // what it waits for may need this core
    }
  }
}

// Sleeps until UCX has something, a bell rings or time is over. A bell that has rung keeps all of them awake.
void UcxPort::Sleep(std::span<UcxPort* const> ports, absl::Duration timeout) {
  DT_CHECK(ports.size() <= kMostTogether);
  size_t asleep = 0;
  for (int quiet = kQuiet; asleep < ports.size(); ++asleep)
    if (!ports[asleep]->doze_.compare_exchange_strong(quiet, kSleeping, std::memory_order_acq_rel)) break;
  bool may_sleep = asleep == ports.size();
  std::array<pollfd, 3 * kMostTogether> fds;
  const auto of = [&](size_t port) { return std::span(fds).subspan(3 * port).first<3>(); };
  for (size_t i = 0; i < asleep; ++i) ports[i]->SetAsleep(true);
  for (size_t i = 0; may_sleep && i < ports.size(); ++i) may_sleep = ports[i]->MaySleep(timeout, of(i));
  if (may_sleep) {
    const timespec limit = absl::ToTimespec(timeout);
    ppoll(fds.data(), 3 * ports.size(), &limit, nullptr);
    for (size_t i = 0; i < ports.size(); ++i) ports[i]->Awake(of(i));
  }
  for (size_t i = 0; i < asleep; ++i) {
    ports[i]->SetAsleep(false);
    int sleeping = kSleeping;
    ports[i]->doze_.compare_exchange_strong(sleeping, kQuiet, std::memory_order_acq_rel);
  }
}

// UCX refuses to be armed while it has work: then it gets another chance to do it, and if that leads nowhere (a peer
// that is stopped takes nothing), the nap is short.
//
// A TCP connection whose other end has not yet answered UCX's own greeting keeps UCX awake for as long as it stands: it
// has something to write and the socket would take it, but waits for that answer, which a stopped process never gives.
// Then only what is new wakes: an edge of UCX's descriptor, which has none for what is so all along. Edges of before
// are forgotten first, and one of this very moment with them; hence the nap.
bool UcxPort::MaySleep(absl::Duration& timeout, std::span<pollfd, 3> fds) {
  const ucs_status_t armed = ucp_worker_arm(worker_->get());
  if (!RingsAreEmpty() || (armed != UCS_OK && worker_->Progress() != 0)) return false;
  const bool in_vain = vain_wakeups_ >= kVainWakeups;
  if (armed != UCS_OK || in_vain) timeout = std::min(timeout, kNap);
  if (in_vain) {
    epoll_event forgotten;
    epoll_wait(edges_fd_, &forgotten, 1, 0);
  }
  fds[0] = {in_vain ? edges_fd_ : worker_->event_fd(), POLLIN, 0};
  fds[1] = {bell_fd_, POLLIN, 0};
  fds[2] = {deaths_fd_, POLLIN, 0};
  return true;
}

void UcxPort::Awake(std::span<const pollfd, 3> fds) {
  if ((fds[0].revents & POLLIN) != 0) ++vain_wakeups_;  // until UCX makes progress
  if ((fds[2].revents & POLLIN) != 0) TakeDeaths();
  if ((fds[1].revents & POLLIN) != 0) {
    uint64_t rings;
    [[maybe_unused]] const ssize_t taken = read(bell_fd_, &rings, sizeof(rings));
  }
}

}  // namespace dovetail::transport::ucx
