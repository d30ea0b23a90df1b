#include "compute_worker/rank_links.h"

#include <algorithm>
#include <utility>

#include "base/log.h"
#include "proto/rank_frames.h"
#include "proto/rank_memory.h"

namespace dovetail::compute {

using proto::FrameHeader;
using proto::MakeHeader;

void RankLinks::Add(const ComputeWorkerAddress& address) { peers_[address.worker] = Peer{.address = address}; }

void RankLinks::Lose(WorkerId worker, Epoch epoch) {
  const auto found = peers_.find(worker);
  if (found != peers_.end() && found->second.address.epoch == epoch) peers_.erase(found);
}

RankLinks::Peer* RankLinks::Find(NodeId node) {
  const auto found =
      std::find_if(peers_.begin(), peers_.end(), [&](const auto& peer) { return peer.second.address.node == node; });
  return found == peers_.end() ? nullptr : &found->second;
}

absl::Status RankLinks::Send(proto::FrameType type, const proto::RankAddress& to, int op, int rank,
                             std::optional<transport::LentBytes> tensor) {
  const auto found = peers_.find(to.worker);
  if (found == peers_.end()) return absl::OkStatus();
  Peer& peer = found->second;
  Frame frame;
  if (const std::string name = memory_ != nullptr && tensor ? memory_->NameOf(*tensor) : ""; !name.empty()) {
    if (!peer.reaches) return absl::OkStatus();  // it began again since the step did, whose group is void
    frame.message = proto::EncodeRankMemory(std::exchange(type, proto::kRankMemory), name);
  }
  const size_t bytes = !frame.message.empty() ? frame.message.size() : tensor ? tensor->size() : 0;
  frame.header =
      MakeHeader(type, peer.address.epoch, to.step, to.micro_batch, op, bytes, 0, static_cast<uint64_t>(rank));
  frame.tensor = std::move(tensor);
  peer.frames.push_back(std::move(frame));
  int sent = 0;
  return SendWaiting(peer, sent);
}

void RankLinks::SetReaches(WorkerId worker, bool reaches) {
  if (const auto found = peers_.find(worker); found != peers_.end()) found->second.reaches = reaches;
}

void RankLinks::SendText(WorkerId worker, proto::FrameType type, std::string_view text) {
  const auto found = peers_.find(worker);
  if (found == peers_.end()) return;
  Peer& peer = found->second;
  const auto* const bytes = reinterpret_cast<const std::byte*>(text.data());
  peer.frames.push_back({MakeHeader(type, peer.address.epoch, StepId(), MicroBatchId(), 0, text.size()), std::nullopt,
                         std::vector<std::byte>(bytes, bytes + text.size()), false});
  int sent = 0;
  if (const absl::Status status = SendWaiting(peer, sent); !status.ok()) LogError(std::string(status.message()));
}

absl::Status RankLinks::SendState(const proto::RankAddress& to, int op, std::vector<std::byte> state) {
  const auto kept = std::make_shared<const std::vector<std::byte>>(std::move(state));
  return Send(proto::kRankState, to, op, 0, transport::Lend(kept, kept->size()));
}

absl::Status RankLinks::SendRows(const proto::RankAddress& to, int op, int rank, transport::LentBytes rows) {
  return Send(proto::kRankRows, to, op, rank, std::move(rows));
}

absl::Status RankLinks::SendHeads(const proto::RankAddress& to, int op, int rank, transport::LentBytes rows) {
  return Send(proto::kRankHeads, to, op, rank, std::move(rows));
}

absl::Status RankLinks::SendOutputs(const proto::RankAddress& to, int op, int rank, transport::LentBytes outputs) {
  return Send(proto::kRankOutputs, to, op, proto::kMaxPrefillRanks + rank, std::move(outputs));
}

absl::Status RankLinks::SendAttended(const proto::RankAddress& to, int op, int rank) {
  return Send(proto::kRankAttended, to, op, rank, std::nullopt);
}

bool RankLinks::AnswerTensor(NodeId from, const FrameHeader& tensor) {
  Peer* const peer = Find(from);
  if (peer == nullptr) return false;
  const auto next = std::find_if(peer->frames.begin(), peer->frames.end(), [](const Frame& frame) {
    return !frame.sent && frame.header.type != proto::kRankTaken;
  });
  peer->frames.insert(next, {MakeHeader(proto::kRankTaken, Epoch(tensor.epoch), StepId(tensor.step),
                                        MicroBatchId(tensor.micro_batch), tensor.op, 0, 0, tensor.digest),
                             std::nullopt,
                             {},
                             false});
  int sent = 0;
  if (const absl::Status status = SendWaiting(*peer, sent); !status.ok()) LogError(std::string(status.message()));
  return true;
}

void RankLinks::OnTaken(NodeId from, const FrameHeader& taken) {
  Peer* const peer = Find(from);
  if (peer == nullptr) return;
  const auto frame = std::find_if(peer->frames.begin(), peer->frames.end(), [&](const Frame& one) {
    return one.sent && one.header.step == taken.step && one.header.op == taken.op && one.header.digest == taken.digest;
  });
  if (frame == peer->frames.end()) return;
  const auto bytes = static_cast<int64_t>(frame->tensor->size());
  const int64_t took_us = std::max<int64_t>(1, absl::ToInt64Microseconds(clock_.Now() - frame->sent_at));
  proto::RankTransfer& fastest = peer->fastest;
  const auto per_byte = [](int64_t us, int64_t of) { return static_cast<double>(us) / static_cast<double>(of); };
  if (bytes > 0 && (fastest.bytes == 0 || per_byte(took_us, bytes) < per_byte(fastest.busy_us, fastest.bytes)))
    fastest = {.to = {}, .bytes = bytes, .busy_us = took_us};
  peer->frames.erase(frame);
}

std::vector<proto::RankTransfer> RankLinks::TakeTransfers() {
  std::vector<proto::RankTransfer> transfers;
  for (auto& [worker, peer] : peers_) {
    if (peer.fastest.bytes == 0 || transfers.size() == size_t{proto::kMaxPrefillRanks}) continue;
    transfers.push_back(std::exchange(peer.fastest, {}));
    transfers.back().to = worker;
  }
  return transfers;
}

absl::Status RankLinks::SendWaiting(Peer& peer, int& sent) {
  for (auto frame = peer.frames.begin(); frame != peer.frames.end();) {
    if (frame->sent) {
      ++frame;
      continue;
    }
    const absl::Status status = frame->tensor && frame->message.empty()
                                    ? port_.SendTensor(peer.address.node, frame->header, *frame->tensor)
                                    : port_.SendMessage(peer.address.node, frame->header, frame->message);
    if (absl::IsResourceExhausted(status)) return absl::OkStatus();
    const bool gone = absl::IsUnavailable(status) || absl::IsNotFound(status);  // and so its group will be
    frame->sent = status.ok();
    if (status.ok() && frame->tensor) frame->sent_at = clock_.Now();
    sent += status.ok() ? 1 : 0;
    frame = status.ok() && frame->tensor ? frame + 1 : peer.frames.erase(frame);
    if (!status.ok() && !gone) return status;
  }
  return absl::OkStatus();
}

int RankLinks::SendWaiting() {
  int sent = 0;
  for (auto& [worker, peer] : peers_)
    if (const absl::Status status = SendWaiting(peer, sent); !status.ok())
      LogError("compute worker: to another: ", std::string(status.message()));
  return sent;
}

size_t RankLinks::held() const {
  size_t held = 0;
  for (const auto& [worker, peer] : peers_) held += peer.frames.size();
  return held;
}

}  // namespace dovetail::compute
