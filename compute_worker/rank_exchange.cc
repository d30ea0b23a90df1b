#include "compute_worker/rank_exchange.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "proto/gather_frames.h"
#include "proto/rank_frames.h"
#include "proto/rank_memory.h"

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
    late.push_back({What::kRows, step, send.op, send.rank, receiver.to, rows});
  }
  return SendLate(send.micro_batch).status();
}

absl::Status RankExchange::SendState(const SendRankState& send) {
  const StepId step = core_.PlanOf(send.micro_batch).step;
  late_[send.micro_batch.value()].push_back({What::kState, step, send.op, 0, send.to, {}});
  return SendLate(send.micro_batch).status();
}

absl::Status RankExchange::SendHeads(const SendRankHeads& send) {
  const StepId step = core_.PlanOf(send.micro_batch).step;
  for (const SendRankHeads::Receiver& receiver : send.receivers) {
    DT_ASSIGN_OR_RETURN(transport::LentBytes rows,
                        dense_.RankHeads(core_, send.micro_batch, send.op, receiver.kv_heads));
    late_[send.micro_batch.value()].push_back({What::kHeads, step, send.op, send.rank, receiver.to, std::move(rows)});
  }
  return SendLate(send.micro_batch).status();
}

// With pass-q, which CPUs have, the step may have ended; there outputs are there at once.
absl::Status RankExchange::SendOutputs(const SendRankOutputs& send) {
  const MicroBatchId id = send.micro_batch;
  DT_ASSIGN_OR_RETURN(transport::LentBytes outputs, dense_.TakeRankOutputs(core_, id));
  if (!core_.running(id)) return links_.SendOutputs(send.to, send.op, send.rank, std::move(outputs));
  late_[id.value()].push_back({What::kOutputs, core_.PlanOf(id).step, send.op, send.rank, send.to, std::move(outputs)});
  return SendLate(id).status();
}

// Ranks that need the same rows share one copy of them.
absl::Status RankExchange::SendQueries(const SendRankQueries& send) {
  transport::LentBytes rows;
  for (size_t i = 0; i < send.receivers.size(); ++i) {
    if (i == 0 || send.receivers[i].rows != send.receivers[i - 1].rows) {
      DT_ASSIGN_OR_RETURN(rows, dense_.RankQueries(send.micro_batch, send.op, send.receivers[i].rows));
    }
    DT_RETURN_IF_ERROR(links_.SendHeads(send.receivers[i].to, send.op, send.rank, rows));
  }
  return absl::OkStatus();
}

absl::Status RankExchange::HandOn(ForwardRankRows& forward) {
  const MicroBatchId id = forward.micro_batch;
  const proto::SoftmaxSpec& spec = core_.table().softmax(core_.table().op_group[forward.op]);
  DT_ASSIGN_OR_RETURN(transport::LentBytes rows, dense_.HandOnRows(id, spec, forward.rows, forward.first_row));
  handed_on_[id.value()].push_back(
      {core_.PlanOf(id).step, forward.op, forward.rank, forward.to, std::move(forward.rows), std::move(rows)});
  return SendHandedOn(id);
}

// What is computed here for a later op does not hold them up.
absl::Status RankExchange::SendHandedOn(MicroBatchId id) {
  std::deque<HandedOn>& waiting = handed_on_[id.value()];
  while (!waiting.empty()) {
    const HandedOn& first = waiting.front();
    if (core_.running(id) && core_.PlanOf(id).step == first.step) {
      DT_ASSIGN_OR_RETURN(const bool ready, dense_.HandOnReady(first.rows));
      if (!ready) break;
      DT_RETURN_IF_ERROR(links_.SendRows(first.to, first.op, first.rank, first.rows));
    }  // else it failed
    waiting.pop_front();
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> RankExchange::Ready(MicroBatchId id, const Late& late) {
  switch (late.what) {
    case What::kState: return dense_.RankStateReady(id, late.op);
    case What::kRows: return dense_.RankRowsReady(id, late.op);
    case What::kHeads:
    case What::kOutputs: break;
  }
  return dense_.GivenReady(late.bytes);
}

absl::Status RankExchange::Send(MicroBatchId id, Late late) {
  switch (late.what) {
    case What::kState: return links_.SendState(late.to, late.op, dense_.TakeRankState(id, late.op));
    case What::kRows: return links_.SendRows(late.to, late.op, late.rank, std::move(late.bytes));
    case What::kHeads: return links_.SendHeads(late.to, late.op, late.rank, std::move(late.bytes));
    case What::kOutputs: break;
  }
  return links_.SendOutputs(late.to, late.op, late.rank, std::move(late.bytes));
}

absl::StatusOr<int> RankExchange::SendLate(MicroBatchId id) {
  DT_RETURN_IF_ERROR(SendHandedOn(id));
  std::deque<Late>& late = late_[id.value()];
  while (!late.empty()) {
    const Late& first = late.front();
    if (!core_.running(id) || core_.PlanOf(id).step != first.step) {  // it failed
      late.pop_front();
      continue;
    }
    DT_ASSIGN_OR_RETURN(const bool ready, Ready(id, first));
    if (!ready) break;
    Late sent = std::move(late.front());
    late.pop_front();
    DT_RETURN_IF_ERROR(Send(id, std::move(sent)));
  }
  return static_cast<int>(late.size() + handed_on_[id.value()].size());
}

namespace {

// Its backend says where it is kept.
bool IsTaken(proto::FrameType type) {
  return type == proto::kRankRows || type == proto::kRankHeads || type == proto::kRankOutputs;
}

}  // namespace

absl::Status RankExchange::OpenNamed(transport::Delivery& delivery) {
  DT_ASSIGN_OR_RETURN(const proto::RankMemoryName named, proto::DecodeRankMemory(delivery.payload));
  delivery.header.type = named.type;
  delivery.payload = {};
  RankMemory* const memory = dense_.rank_memory();
  if (memory == nullptr) return FailedPrecondition("memory of a GPU was named to a worker that offered none");
  DT_ASSIGN_OR_RETURN(delivery.payload, memory->Open(delivery.from, named.name));
  return absl::OkStatus();
}

absl::StatusOr<RankTensor> RankExchange::CopyOf(const transport::Delivery& delivery) {
  if (IsTaken(delivery.header.type)) return dense_.TakeRankRows(delivery.payload);
  if (delivery.header.type == proto::kEarlierRows) return dense_.TakeEarlierRows(delivery.payload);
  return std::vector<std::byte>(delivery.payload.begin(), delivery.payload.end());
}

// States go behind rows: the answer to one says that all before it were copied.
void RankExchange::Take(const transport::Delivery& delivery) {
  transport::Delivery of_tensor = delivery;
  const absl::Status opened = delivery.header.type == proto::kRankMemory ? OpenNamed(of_tensor) : absl::OkStatus();
  absl::StatusOr<RankTensor> tensor = opened.ok() ? CopyOf(of_tensor) : opened;
  const absl::Status taken = tensor.status();
  arriving_.push_back({delivery.from, of_tensor.header, taken.ok() ? *std::move(tensor) : RankTensor(), taken});
}

// What asks for more pieces answers all that came of the micro-batch, so all of them are to be copied by then. Those
// that came last are copied last.
absl::StatusOr<bool> RankExchange::Copied(const Arrived& first) const {
  if (!first.taken.ok()) return true;
  if (IsTaken(first.header.type)) return dense_.RankRowsTaken(first.tensor);
  if (first.header.type != proto::kEarlierRows) return true;
  const auto last = std::find_if(arriving_.rbegin(), arriving_.rend(), [&](const Arrived& other) {
    return other.header.type == proto::kEarlierRows && other.from == first.from && other.taken.ok() &&
           other.header.micro_batch == first.header.micro_batch;
  });
  return dense_.RankRowsTaken(last->tensor);
}

absl::StatusOr<std::optional<RankExchange::Arrived>> RankExchange::Next() {
  while (!arriving_.empty()) {
    DT_ASSIGN_OR_RETURN(const bool copied, Copied(arriving_.front()));
    if (!copied) return std::nullopt;
    Arrived done = std::move(arriving_.front());
    arriving_.pop_front();
    if (done.header.type == proto::kEarlierRows || links_.AnswerTensor(done.from, done.header)) return done;
  }
  return std::nullopt;
}

Event RankExchange::EventOf(Arrived arrived) {
  const proto::FrameHeader& header = arrived.header;
  const StepId step(header.step);
  const MicroBatchId id(header.micro_batch);
  if (header.type == proto::kEarlierRows) {
    const int piece = static_cast<int>(std::min<uint64_t>(header.digest, std::numeric_limits<int>::max()));
    return EarlierRowsArrived{arrived.from, Epoch(header.epoch), step, id, header.op, piece, std::move(arrived.tensor)};
  }
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
  if (const auto* earlier = std::get_if<EarlierRowsArrived>(&event)) return earlier->micro_batch;
  if (const auto* attended = std::get_if<RankAttended>(&event)) return attended->micro_batch;
  if (const auto* heads = std::get_if<RankHeadsArrived>(&event)) return heads->micro_batch;
  if (const auto* outputs = std::get_if<RankOutputsArrived>(&event)) return outputs->micro_batch;
  return std::nullopt;
}

const char* RankExchange::NameOf(proto::FrameType type) {
  if (type == proto::kRankOutputs) return "outputs arrive";
  if (type == proto::kRankHeads) return "heads arrive";
  if (type == proto::kEarlierRows) return "piece arrives";
  return type == proto::kRankRows ? "rows arrive" : "state arrives";
}

}  // namespace dovetail::compute
