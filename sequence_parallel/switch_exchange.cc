#include "sequence_parallel/switch_exchange.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "proto/switch_frames.h"
#include "sequence_parallel/region_copy.h"

namespace dovetail::sequence_parallel {
namespace {

constexpr uint64_t kPieceMask = proto::kMaxSwitchPieces - 1;

// Pieces of early switches that are kept for one rank: no rank has more in flight.
constexpr size_t kMaxEarly = kMaxChunksInFlight;

SwitchId IdOf(const proto::FrameHeader& header) { return {StepId(header.step), header.op}; }

std::vector<std::byte> BytesOf(std::string_view text) {
  const auto* begin = reinterpret_cast<const std::byte*>(text.data());
  return {begin, begin + std::min<size_t>(text.size(), proto::kMaxSwitchVoidBytes)};
}

// What another process wrote, for a line of log.
std::string Printable(std::span<const std::byte> text) {
  std::string line;
  for (const std::byte byte : text.first(std::min<size_t>(text.size(), proto::kMaxSwitchVoidBytes))) {
    const char c = static_cast<char>(byte);
    line.push_back(c >= ' ' && c <= '~' ? c : '?');
  }
  return line;
}

}  // namespace

absl::StatusOr<std::unique_ptr<SwitchExchange>> SwitchExchange::Create(const ExchangeOptions& options,
                                                                       transport::Port& port, Clock& clock) {
  DT_RETURN_IF_ERROR(options.Validate());
  if (options.members[options.rank] != port.id())
    return InvalidArgument("exchange: rank ", options.rank, " is node ", options.members[options.rank].value(),
                           ", but the port is node ", port.id().value());
  return std::unique_ptr<SwitchExchange>(new SwitchExchange(options, port, clock));
}

SwitchExchange::SwitchExchange(const ExchangeOptions& options, transport::Port& port, Clock& clock)
    : options_(options), port_(port), clock_(clock), peers_(options.members.size()) {}

std::string SwitchExchange::Name(int rank) const {
  return absl::StrCat("rank ", rank, " (node ", options_.members[rank].value(), ")");
}

int SwitchExchange::RankOf(NodeId node) const {
  for (size_t rank = 0; rank < options_.members.size(); ++rank)
    if (options_.members[rank] == node && static_cast<int>(rank) != options_.rank) return static_cast<int>(rank);
  return -1;
}

int64_t SwitchExchange::staging_bytes() const {
  size_t bytes = 0;
  for (const Peer& peer : peers_)
    for (const Buffer& buffer : peer.staging) bytes += buffer.memory == nullptr ? 0 : buffer.memory->size();
  return static_cast<int64_t>(bytes);
}

absl::Status SwitchExchange::CheckBegin(const SwitchId& id, const proto::Switch& plan, size_t source,
                                        size_t destination) const {
  if (active_) return InvalidArgument(id.DebugString(), " cannot begin: ", id_.DebugString(), " has not ended");
  if (begun_ && id <= id_)
    return InvalidArgument(id.DebugString(), " cannot begin after ", id_.DebugString(), ": numbers grow");
  if (plan.ranks() != static_cast<int>(options_.members.size()))
    return InvalidArgument(id.DebugString(), " is of ", plan.ranks(), " ranks, the group of ", options_.members.size());
  const auto before = static_cast<size_t>(plan.from().PartBytes(options_.rank));
  const auto after = static_cast<size_t>(plan.to().PartBytes(options_.rank));
  if (source != before || destination != after)
    return InvalidArgument(id.DebugString(), ": rank ", options_.rank, " has ", before, " bytes before and ", after,
                           " after, but gives ", source, " and ", destination);
  return absl::OkStatus();
}

absl::Status SwitchExchange::Begin(SwitchId id, const proto::Switch& plan, transport::LentBytes source,
                                   std::span<std::byte> destination) {
  DT_RETURN_IF_ERROR(status_);
  DT_RETURN_IF_ERROR(CheckBegin(id, plan, source.size(), destination.size()));
  const std::span<const proto::Transfer> out = plan.SentBy(options_.rank);
  const int64_t chunk_bytes = options_.ChunkBytesFor(static_cast<int>(out.size()));
  for (const proto::Transfer& transfer : out)
    if (static_cast<uint64_t>((transfer.bytes() + chunk_bytes - 1) / chunk_bytes) > proto::kMaxSwitchPieces)
      return InvalidArgument(id.DebugString(), ": ", transfer.bytes(), " bytes to rank ", transfer.destination,
                             " are more than ", proto::kMaxSwitchPieces, " pieces of ", chunk_bytes,
                             ": raise chunk_bytes or max_staging_bytes");
  id_ = id;
  begun_ = active_ = true;
  fingerprint_ = plan.fingerprint();
  chunk_bytes_ = chunk_bytes;
  source_ = std::move(source);
  destination_ = destination;
  last_progress_ = clock_.Now();
  for (Peer& peer : peers_) {
    peer.out = peer.in = nullptr;
    peer.packed = peer.placed = 0;
    peer.next_piece = peer.expected_piece = 0;
  }
  for (const proto::Transfer& transfer : out) peers_[transfer.destination].out = &transfer;
  for (const proto::Transfer& transfer : plan.ReceivedBy(options_.rank)) peers_[transfer.source].in = &transfer;
  // What travels goes first; what stays is copied meanwhile.
  if (const absl::Status sent = SendPieces(); !sent.ok()) Fail(sent, true);
  if (plan.identity()) {
    if (!destination.empty() && source_.data() != destination.data())
      std::memcpy(destination.data(), source_.data(), destination.size());
  } else if (const proto::Transfer* kept = plan.KeptBy(options_.rank)) {
    Copy(*kept, source_.data(), destination.data());
  }
  for (int rank = 0; rank < static_cast<int>(peers_.size()) && status_.ok(); ++rank) TakeEarly(rank);
  EndIfComplete();
  return status_;
}

absl::Status SwitchExchange::Progress() {
  DT_RETURN_IF_ERROR(status_);
  absl::Status step = absl::OkStatus();
  for (int rank = 0; rank < static_cast<int>(peers_.size()) && step.ok(); ++rank)
    if (peers_[rank].to_answer.has_value()) step = Answer(rank);
  if (step.ok() && active_) step = SendPieces();
  if (step.ok()) EndIfComplete();
  if (step.ok() && active_) step = LookAtTheClock();
  if (!step.ok()) Fail(step, true);
  return status_;
}

uint64_t SwitchExchange::PieceId(uint64_t piece) const { return (fingerprint_ & ~kPieceMask) | piece; }

// Rounds over the other ranks, beginning with the next one, so that not all of them send to the same one at once.
absl::Status SwitchExchange::SendPieces() {
  const int ranks = static_cast<int>(peers_.size());
  for (bool sent = true; sent;) {
    sent = false;
    for (int i = 1; i < ranks; ++i) {
      DT_ASSIGN_OR_RETURN(const bool one, SendPiece((options_.rank + i) % ranks));
      sent |= one;
    }
  }
  return absl::OkStatus();
}

// False: there is nothing to send to this rank, or no room for it.
absl::StatusOr<bool> SwitchExchange::SendPiece(int rank) {
  Peer& peer = peers_[rank];
  if (peer.out == nullptr || peer.packed == peer.out->bytes() ||
      static_cast<int>(peer.in_flight.size()) == options_.chunks_in_flight)
    return false;
  const int64_t bytes = std::min(chunk_bytes_, peer.out->bytes() - peer.packed);
  InFlight piece{peer.next_piece, -1};
  transport::LentBytes payload;
  if (peer.out->from.runs == 1 && source_.owner != nullptr) {
    payload = {source_.subspan(peer.out->from.offset + peer.packed, bytes), source_.owner};
  } else {
    if (peer.staging.empty()) peer.staging.resize(options_.chunks_in_flight);
    const auto free = std::find_if(peer.staging.begin(), peer.staging.end(), [](const Buffer& b) { return !b.busy; });
    if (free->memory == nullptr || static_cast<int64_t>(free->memory->size()) < bytes)
      free->memory = std::make_shared<std::vector<std::byte>>(bytes);
    piece.buffer = static_cast<int>(free - peer.staging.begin());
    const std::span<std::byte> room(free->memory->data(), bytes);
    Pack(peer.out->from, source_.data(), peer.packed, room);
    payload = {room, free->memory};
  }
  const auto header = proto::MakeHeader(proto::kSwitchPart, options_.group, id_.step, options_.lane, id_.index, bytes,
                                        0, PieceId(piece.piece));
  const absl::Status sent = port_.SendTensor(options_.members[rank], header, std::move(payload));
  if (absl::IsResourceExhausted(sent)) return false;
  if (!sent.ok())
    return absl::UnavailableError(absl::StrCat(Name(rank), " cannot be sent to: ", std::string(sent.message())));
  if (piece.buffer >= 0) {
    peer.staging[piece.buffer].busy = true;
    counters_.bytes_packed += bytes;
  }
  peer.in_flight.push_back(piece);
  ++peer.next_piece;
  peer.packed += bytes;
  ++counters_.pieces_sent;
  counters_.bytes_sent += bytes;
  return true;
}

void SwitchExchange::OnFrame(const transport::Delivery& delivery) {
  const proto::FrameHeader& header = delivery.header;
  const int rank = RankOf(delivery.from);
  if (!proto::Validate(header).ok() || !proto::IsSwitchFrame(header.type) || rank < 0 ||
      header.payload_bytes != delivery.payload.size() || header.micro_batch != options_.lane.value()) {
    ++counters_.dropped;
    return;
  }
  if (header.epoch != options_.group.value() || !status_.ok()) {
    if (header.type == proto::kSwitchPart) return DropPart(rank, header);
    ++counters_.dropped;
    return;
  }
  if (header.type == proto::kSwitchPart) return OnPart(rank, delivery);
  if (header.type == proto::kSwitchTaken) return OnTaken(rank, header);
  OnVoid(rank, delivery.payload);
}

// The sender gets its memory back, unless the answer would also give back pieces that are kept.
void SwitchExchange::DropPart(int rank, const proto::FrameHeader& header) {
  ++counters_.dropped;
  if (!peers_[rank].early.empty()) return;
  proto::FrameHeader answer = proto::MakeHeader(proto::kSwitchTaken, Epoch(header.epoch), StepId(header.step),
                                                MicroBatchId(header.micro_batch), header.op, 0, 0, header.digest);
  if (!port_.SendMessage(options_.members[rank], answer, {}).ok()) return;  // it has left, or answers nothing
}

void SwitchExchange::OnPart(int rank, const transport::Delivery& delivery) {
  Peer& peer = peers_[rank];
  const SwitchId id = IdOf(delivery.header);
  if (begun_ && (id < id_ || (id == id_ && !active_))) return DropPart(rank, delivery.header);
  if (!begun_ || id > id_) {
    if (peer.early.size() == kMaxEarly)
      return Fail(InvalidArgument(Name(rank), " has sent ", kMaxEarly, " pieces of switches that have not begun here"),
                  true);
    peer.early.push_back({delivery.header, delivery.payload});
    return;
  }
  absl::Status taken = TakePart(rank, delivery.header, delivery.payload);
  if (taken.ok() && peer.to_answer.has_value()) taken = Answer(rank);
  if (!taken.ok()) return Fail(taken, true);
  EndIfComplete();
}

absl::Status SwitchExchange::TakePart(int rank, const proto::FrameHeader& header, std::span<const std::byte> payload) {
  Peer& peer = peers_[rank];
  if ((header.digest & ~kPieceMask) != (fingerprint_ & ~kPieceMask))
    return InvalidArgument(Name(rank), " means another ", id_.DebugString(),
                           ": its tensor or layouts are not those of rank ", options_.rank);
  const uint64_t piece = header.digest & kPieceMask;
  if (piece < peer.expected_piece) {
    ++counters_.dropped;
    return absl::OkStatus();
  }
  if (piece > peer.expected_piece)
    return DataLoss(Name(rank), " sent piece ", piece, " of ", id_.DebugString(), ", but piece ", peer.expected_piece,
                    " never came");
  const auto bytes = static_cast<int64_t>(payload.size());
  const int64_t left = peer.in == nullptr ? 0 : peer.in->bytes() - peer.placed;
  if (bytes == 0 || bytes > left)
    return InvalidArgument(Name(rank), " sent ", bytes, " bytes of ", id_.DebugString(), ", of which ", left,
                           " are missing");
  Unpack(peer.in->to, destination_.data(), peer.placed, payload);
  peer.placed += bytes;
  ++peer.expected_piece;
  peer.to_answer = header;
  last_progress_ = clock_.Now();
  counters_.bytes_received += bytes;
  return absl::OkStatus();
}

// Pieces of the switch that has just begun. All are in place before the first answer, which is one for all of them.
void SwitchExchange::TakeEarly(int rank) {
  Peer& peer = peers_[rank];
  while (!peer.early.empty() && IdOf(peer.early.front().header) <= id_) {
    const Early early = peer.early.front();
    peer.early.pop_front();
    const absl::Status taken = IdOf(early.header) == id_
                                   ? TakePart(rank, early.header, early.payload)
                                   : InvalidArgument(Name(rank), " sent a part of ", IdOf(early.header).DebugString(),
                                                     ", which rank ", options_.rank, " has passed over");
    if (!taken.ok()) return Fail(taken, true);
  }
  if (!peer.to_answer.has_value()) return;
  if (const absl::Status answered = Answer(rank); !answered.ok()) Fail(answered, true);
}

// Stays due if there is no room for it.
absl::Status SwitchExchange::Answer(int rank) {
  const proto::FrameHeader& part = *peers_[rank].to_answer;
  const auto header = proto::MakeHeader(proto::kSwitchTaken, options_.group, StepId(part.step), options_.lane, part.op,
                                        0, 0, part.digest);
  const absl::Status sent = port_.SendMessage(options_.members[rank], header, {});
  if (absl::IsResourceExhausted(sent)) return absl::OkStatus();
  if (!sent.ok())
    return absl::UnavailableError(absl::StrCat(Name(rank), " cannot be sent to: ", std::string(sent.message())));
  peers_[rank].to_answer.reset();
  return absl::OkStatus();
}

void SwitchExchange::OnTaken(int rank, const proto::FrameHeader& header) {
  Peer& peer = peers_[rank];
  const uint64_t piece = header.digest & kPieceMask;
  if (!active_ || IdOf(header) != id_ || header.digest != PieceId(piece) || piece >= peer.next_piece ||
      peer.in_flight.empty() || piece < peer.in_flight.front().piece) {
    ++counters_.dropped;
    return;
  }
  while (!peer.in_flight.empty() && peer.in_flight.front().piece <= piece) {
    if (const int buffer = peer.in_flight.front().buffer; buffer >= 0) peer.staging[buffer].busy = false;
    peer.in_flight.pop_front();
  }
  last_progress_ = clock_.Now();
  if (const absl::Status sent = SendPieces(); !sent.ok()) return Fail(sent, true);
  EndIfComplete();
}

void SwitchExchange::OnVoid(int rank, std::span<const std::byte> text) {
  Fail(absl::AbortedError(absl::StrCat(Name(rank), " has ended the group: ", Printable(text))), false);
}

void SwitchExchange::EndIfComplete() {
  if (!active_ || !status_.ok()) return;
  for (const Peer& peer : peers_)
    if (!peer.sent() || !peer.received() || peer.to_answer.has_value()) return;
  active_ = false;
  source_ = {};
  destination_ = {};
  ++counters_.switches;
}

absl::Status SwitchExchange::LookAtTheClock() {
  const absl::Duration waited = clock_.Now() - last_progress_;
  if (waited < options_.stall) return absl::OkStatus();
  return absl::DeadlineExceededError(absl::StrCat(id_.DebugString(), ": nothing came for ",
                                                  absl::FormatDuration(absl::Trunc(waited, absl::Milliseconds(1))),
                                                  ": ", WaitsFor()));
}

std::string SwitchExchange::WaitsFor() const {
  std::string text;
  for (int rank = 0; rank < static_cast<int>(peers_.size()); ++rank) {
    const Peer& peer = peers_[rank];
    if (peer.sent() && peer.received()) continue;
    absl::StrAppend(&text, text.empty() ? "" : "; ", Name(rank));
    if (!peer.received()) absl::StrAppend(&text, " has sent ", peer.placed, " of ", peer.in->bytes(), " bytes");
    if (!peer.sent())
      absl::StrAppend(&text, peer.received() ? "" : " and", " has not taken ", peer.in_flight.size(), " pieces");
  }
  return text;
}

void SwitchExchange::PeerLost(NodeId node, const std::string& why) {
  if (const int rank = RankOf(node); rank >= 0)
    Fail(absl::UnavailableError(absl::StrCat(Name(rank), " is lost: ", why)), true);
}

void SwitchExchange::Void(const absl::Status& why) { Fail(why, true); }

// Staging stays: a port may still read it. What was kept for later is given back.
void SwitchExchange::Fail(const absl::Status& why, bool tell_others) {
  if (!status_.ok()) return;
  status_ = why;
  for (int rank = 0; rank < static_cast<int>(peers_.size()); ++rank) {
    if (peers_[rank].early.empty()) continue;
    const proto::FrameHeader last = peers_[rank].early.back().header;
    peers_[rank].early.clear();
    DropPart(rank, last);
  }
  if (!tell_others) return;
  const std::vector<std::byte> text = BytesOf(std::string(why.message()));
  const auto header =
      proto::MakeHeader(proto::kSwitchVoid, options_.group, id_.step, options_.lane, id_.index, text.size());
  for (int rank = 0; rank < static_cast<int>(peers_.size()); ++rank) {
    if (rank == options_.rank) continue;
    const absl::Status sent = port_.SendMessage(options_.members[rank], header, text);
    if (!sent.ok()) continue;  // the others find out that it cannot be reached by themselves
  }
}

}  // namespace dovetail::sequence_parallel
