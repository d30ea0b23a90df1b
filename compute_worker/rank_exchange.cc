#include "compute_worker/rank_exchange.h"

#include <algorithm>
#include <utility>

#include "proto/rank_frames.h"

namespace dovetail::compute {

// Ranks that need the same rows share one copy of them.
absl::Status RankExchange::SendRows(const SendRankRows& send) {
  const StepId step = core_.PlanOf(send.micro_batch).step;
  std::deque<Late>& late = late_[send.micro_batch.value()];
  transport::LentBytes rows;
  for (size_t i = 0; i < send.receivers.size(); ++i) {
    const SendRankRows::Receiver& receiver = send.receivers[i];
    if (i == 0 || receiver.first_row != send.receivers[i - 1].first_row) {
      DT_ASSIGN_OR_RETURN(rows, dense_.RankRows(send.micro_batch, send.op, receiver.first_row));
    }
    late.push_back({step, send.op, send.rank, receiver.to, rows});
  }
  return SendLate(send.micro_batch).status();
}

absl::StatusOr<int> RankExchange::SendLate(MicroBatchId id) {
  std::deque<Late>& late = late_[id.value()];
  while (!late.empty()) {
    const Late& first = late.front();
    if (!core_.running(id) || core_.PlanOf(id).step != first.step) {  // it failed
      late.pop_front();
      continue;
    }
    DT_ASSIGN_OR_RETURN(const bool ready, dense_.RankRowsReady(id, first.op));
    if (!ready) break;
    const Late sent = std::move(late.front());
    late.pop_front();
    DT_RETURN_IF_ERROR(links_.SendRows(sent.to, sent.op, sent.rank, sent.rows));
  }
  return static_cast<int>(late.size());
}

// States go behind rows: the answer to one says that all before it were copied.
absl::Status RankExchange::Take(const transport::Delivery& delivery) {
  RankTensor tensor;
  if (delivery.header.type == proto::kRankRows) {
    DT_ASSIGN_OR_RETURN(tensor, dense_.TakeRankRows(delivery.payload));
  } else {
    tensor = std::vector<std::byte>(delivery.payload.begin(), delivery.payload.end());
  }
  arriving_.push_back({delivery.from, {delivery.header, std::move(tensor)}});
  return absl::OkStatus();
}

absl::StatusOr<std::optional<RankExchange::Arrived>> RankExchange::Next() {
  while (!arriving_.empty()) {
    Arriving& first = arriving_.front();
    if (first.arrived.header.type == proto::kRankRows) {
      DT_ASSIGN_OR_RETURN(const bool taken, dense_.RankRowsTaken(first.arrived.tensor));
      if (!taken) return std::nullopt;
    }
    Arriving done = std::move(first);
    arriving_.pop_front();
    if (links_.AnswerTensor(done.from, done.arrived.header)) return std::move(done.arrived);
  }
  return std::nullopt;
}

Event RankExchange::EventOf(Arrived arrived) {
  const proto::FrameHeader& header = arrived.header;
  const StepId step(header.step);
  const MicroBatchId id(header.micro_batch);
  const bool outputs = header.type == proto::kRankOutputs;
  const uint64_t sender = header.digest - (outputs ? proto::kMaxPrefillRanks : 0);
  const int rank = static_cast<int>(std::min<uint64_t>(sender, proto::kMaxPrefillRanks));
  if (outputs) return RankOutputsArrived{step, id, header.op, rank, std::move(arrived.tensor)};
  if (header.type == proto::kRankHeads) return RankHeadsArrived{step, id, header.op, rank, std::move(arrived.tensor)};
  if (header.type == proto::kRankRows) return RankRowsArrived{step, id, header.op, rank, std::move(arrived.tensor)};
  return RankStateArrived{step, id, header.op, std::move(arrived.tensor)};
}

std::optional<MicroBatchId> RankExchange::MicroBatchOf(const Event& event) {
  if (const auto* state = std::get_if<RankStateArrived>(&event)) return state->micro_batch;
  if (const auto* rows = std::get_if<RankRowsArrived>(&event)) return rows->micro_batch;
  if (const auto* attended = std::get_if<RankAttended>(&event)) return attended->micro_batch;
  if (const auto* heads = std::get_if<RankHeadsArrived>(&event)) return heads->micro_batch;
  if (const auto* outputs = std::get_if<RankOutputsArrived>(&event)) return outputs->micro_batch;
  return std::nullopt;
}

const char* RankExchange::NameOf(proto::FrameType type) {
  if (type == proto::kRankOutputs) return "outputs arrive";
  if (type == proto::kRankHeads) return "heads arrive";
  return type == proto::kRankRows ? "rows arrive" : "state arrives";
}

}  // namespace dovetail::compute
