#include "compute_worker/cuda/cuda_peer_crossing.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/log.h"
#include "compute_worker/cuda/wire_element.h"
#include "kernels/cuda/exchange/cuda_exchange.h"

namespace dovetail::compute {
namespace {

using exchange::GpuExchange;
using kernels::cuda::CudaStream;
using kernels::cuda::ExchangeFan;
using kernels::cuda::ExchangeRow;
using kernels::cuda::StepWork;

constexpr size_t kUploadPart = 256;

// How the step went with a peer, for the host (GpuExchange::FetchStatus).
struct FetchRecord {
  GpuExchange* peer = nullptr;
  uint64_t micro_batch = 0;
};

}  // namespace

absl::StatusOr<std::unique_ptr<CudaPeerCrossing>> CudaPeerCrossing::Create(const proto::AttentionTable& table,
                                                                           CudaStream& stream, CudaLane& shared,
                                                                           MakeLane make_lane, int micro_batches,
                                                                           CudaPromptAttention* prompts) {
  std::unique_ptr<CudaPeerCrossing> made(new CudaPeerCrossing(table, shared, std::move(make_lane), micro_batches));
  kernels::cuda::CudaDevice& device = stream.device();
  if (prompts != nullptr) made->prompts_ = std::make_unique<CudaPeerPrompts>(table, device, *prompts, micro_batches);
  const kernels::cuda::ExchangeTurn turn;
  DT_ASSIGN_OR_RETURN(made->turn_, device.Allocate(sizeof(turn)));
  DT_RETURN_IF_ERROR(stream.Copy(made->turn_->data(), &turn, sizeof(turn)));
  DT_RETURN_IF_ERROR(stream.SynchronizeStatus());
  DT_RETURN_IF_ERROR(made->UploadSinks(stream));
  for (Step& step : made->steps_) {
    DT_ASSIGN_OR_RETURN(step.begun, device.CreateEvent(/*timed=*/true));
    DT_ASSIGN_OR_RETURN(step.ended, device.CreateEvent(/*timed=*/true));
  }
  return made;
}

absl::Status CudaPeerCrossing::UploadSinks(CudaStream& stream) {
  sinks_.resize(static_cast<size_t>(table_.op_count()));
  for (int op = 0; op < table_.op_count(); ++op) {
    if (table_.sinks(op) == nullptr) continue;
    const size_t bytes = table_.constants[op].sinks.size() * sizeof(float);
    DT_ASSIGN_OR_RETURN(sinks_[op], stream.device().Allocate(bytes));
    DT_RETURN_IF_ERROR(stream.Copy(sinks_[op]->data(), table_.sinks(op), bytes));
  }
  return stream.SynchronizeStatus();
}

const float* CudaPeerCrossing::SinksOf(int op) const {
  return sinks_[op] != nullptr ? reinterpret_cast<const float*>(sinks_[op]->data()) : nullptr;
}

CudaPeerCrossing::~CudaPeerCrossing() {
  (void)shared_.stream->SynchronizeStatus();
  for (const auto& [id, lane] : own_lanes_)
    if (lane != nullptr) (void)lane->stream->SynchronizeStatus();
}

// Steps of several micro-batches that exchange layers by themselves run at the same time: what one waits for does not
// hold up another.
CudaLane* CudaPeerCrossing::LaneFor(MicroBatchId id) {
  if (id.value() == 0) return &shared_;
  std::unique_ptr<CudaLane>& own = own_lanes_[id.value()];
  if (own == nullptr && make_lane_ != nullptr) {
    auto made = make_lane_();
    if (made.ok()) {
      own = *std::move(made);
    } else {
      LogInfo("steps of several micro-batches take turns on the GPU: ", std::string(made.status().message()));
      make_lane_ = nullptr;
    }
  }
  return own != nullptr ? own.get() : &shared_;
}

absl::Status CudaPeerCrossing::Use(const exchange::Seam& seam, CudaBatch& batch) {
  Step& step = StepOf(batch);
  step.peers = std::get<exchange::BetweenGpus>(seam).peers;
  batch.lane = LaneFor(batch.id);
  batch.work = &step.work;
  return absl::OkStatus();
}

absl::Status CudaPeerCrossing::Begin(const ComputeWorkerCore& core, CudaBatch& batch) {
  Step& step = StepOf(batch);
  if (const size_t parts = core.PartsOf(batch.id).size(); parts != step.peers.size())
    return Internal("a step of ", parts, " attention workers cannot stay on ", step.peers.size(), " GPUs");
  step.divides = CrossesAsDivided(core, batch.id, step.spread);
  if (step.divides) DT_RETURN_IF_ERROR(step.divided.Plan(core, batch.id, step.peers));
  step.attends = !core.PromptsOf(batch.id).empty();
  if (prompts_ != nullptr) DT_RETURN_IF_ERROR(prompts_->Settle(batch));
  DT_RETURN_IF_ERROR(batch.BeginWork());
  if (step.attends) DT_RETURN_IF_ERROR(batch.work->BeImmediate(batch.stream()));
  step.load = LoadWith(batch);
  step.lane = batch.lane;
  step.row_count = batch.rows;
  // Launches of an immediate step come as the host makes them: nothing waits for it meanwhile.
  step.takes_turns = !batch.work->immediate() && turns_.Takes(step.load);
  auto* const turn = step.takes_turns ? reinterpret_cast<kernels::cuda::ExchangeTurn*>(turn_->data()) : nullptr;
  for (GpuExchange* const peer : step.peers)
    DT_RETURN_IF_ERROR(peer->BeginStep(batch.stream(), batch.id, core.PlanOf(batch.id).step, turn));
  if (batch.work->immediate()) DT_RETURN_IF_ERROR(batch.stream().Record(step.begun));
  return step.attends ? prompts_->Begin(core, batch, step.peers, step.spread) : absl::OkStatus();
}

size_t CudaPeerCrossing::UploadBytes(int64_t rows) {
  return sizeof(ExchangeFan) + rows * sizeof(ExchangeRow) + 2 * kUploadPart;
}

void CudaPeerCrossing::AddTo(kernels::cuda::UploadLayout& layout, const CudaBatch& batch) {
  Step& step = StepOf(batch);
  if (step.divides) return step.divided.AddTo(layout);
  step.fan_at = layout.Add<ExchangeFan>(step.fans() ? 1 : 0);
  step.fan_rows_at = layout.Add<ExchangeRow>(step.fans() ? batch.rows : 0);
}

void CudaPeerCrossing::Fill(std::byte* host, const std::byte* device, const CudaBatch& batch) {
  Step& step = StepOf(batch);
  step.fan = nullptr;
  step.rows = nullptr;
  if (step.divides) return step.divided.Fill(host, device, batch, table_);
  if (!step.fans()) return;
  exchange::FillFan(step.peers, batch.id, step.spread.part_rows, *reinterpret_cast<ExchangeFan*>(host + step.fan_at));
  auto* row = reinterpret_cast<ExchangeRow*>(host + step.fan_rows_at);
  for (const RowSpread::Row& from : step.spread.rows) *row++ = {from.part, from.row};
  step.fan = reinterpret_cast<const ExchangeFan*>(device + step.fan_at);
  step.rows = reinterpret_cast<const ExchangeRow*>(device + step.fan_rows_at);
}

// Several peers are what `fan` says when the step runs.
std::array<uint64_t, 3> CudaPeerCrossing::Words(const CudaBatch& batch) const {
  const Step& step = StepOf(batch);
  if (step.divides) return step.divided.Words();
  const auto end = step.only() != nullptr ? step.only()->End(batch.id) : kernels::cuda::ExchangeEnd{};
  return {StepWork::Word(end.own), StepWork::Word(end.peer), StepWork::Word(step.fan)};
}

absl::Status CudaPeerCrossing::BeforeHeads(CudaBatch& batch) {
  return StepOf(batch).attends ? prompts_->BeforeHeads(batch) : absl::OkStatus();
}

absl::Status CudaPeerCrossing::Leave(int op, CudaBatch& batch) {
  const Step& step = StepOf(batch);
  if (step.divides) return step.divided.Leave(op, table_.op_group[op], batch);
  return step.attends ? prompts_->Leave(op, batch) : absl::OkStatus();
}

absl::Status CudaPeerCrossing::AttendPrompts(const ComputeWorkerCore& core, int op, CudaBatch& batch) {
  return prompts_->Attend(core, op, batch);
}

// q, k and v are stored where they are attended.
void CudaPeerCrossing::LeaveFrom(int op, const CudaBatch& batch, kernels::cuda::KvAppendLaunch& out) {
  const Step& step = StepOf(batch);
  if (step.attends || step.divides) return;
  out.signal_op = op;
  out.fan = step.fan;
  out.fan_rows = step.rows;
  if (step.fan != nullptr) return;
  const proto::SoftmaxSpec& spec = table_.softmax(table_.op_group[op]);
  const GpuExchange& peer = *step.only();
  std::byte* const slot = peer.peer_slot(batch.id);
  out.q_out = slot;
  out.k_out = slot + peer.key_value_at();
  out.v_out = slot + peer.key_value_at() + batch.rows * int64_t{spec.kv_heads} * spec.key_dim * kElement;
  out.exchange = peer.End(batch.id);
}

const void* CudaPeerCrossing::Arriving(const std::vector<WorkerPart>& parts, const CudaBatch& batch) const {
  const Step& step = StepOf(batch);
  return step.only() != nullptr && !step.attends ? parts[0].partial.data() : nullptr;
}

// o lies in the one peer's slot, or of several is gathered in lane->attended, or is with that of prompts. That of
// divided sequences is brought together there.
absl::StatusOr<const void*> CudaPeerCrossing::Arrive(int op, const std::vector<WorkerPart>&, const void* arriving,
                                                     CudaBatch& batch) {
  const Step& step = StepOf(batch);
  const auto number = static_cast<uint32_t>(op);
  if (step.attends) return prompts_->Arrive(op, batch);
  if (step.divides) return step.divided.Arrive(op, table_, SinksOf(op), batch);
  if (step.fan == nullptr) {
    DT_RETURN_IF_ERROR(kernels::cuda::ExchangeAwait(batch.stream(), {step.only()->End(batch.id), number}));
    return arriving;
  }
  const proto::SoftmaxSpec& spec = table_.softmax(table_.op_group[op]);
  DT_RETURN_IF_ERROR(kernels::cuda::ExchangeAwaitAll(batch.stream(), {step.fan, number}));
  DT_RETURN_IF_ERROR(kernels::cuda::ExchangeGather(
      batch.stream(),
      {step.fan, step.rows, batch.lane->attended->data(),
       static_cast<int64_t>(spec.query_heads) * spec.value_dim * kElement, static_cast<int32_t>(batch.rows)}));
  return batch.lane->attended->data();
}

// In an order that does not depend on the step: the work is the same then.
absl::Status CudaPeerCrossing::BeforeDraws(CudaBatch& batch) {
  if (StepOf(batch).attends) DT_RETURN_IF_ERROR(prompts_->AwaitLast(batch));
  std::vector<GpuExchange*> peers = StepOf(batch).peers;
  std::sort(peers.begin(), peers.end());
  for (GpuExchange* const peer : peers) {
    DT_RETURN_IF_ERROR(batch.Enqueue(FetchRecord{peer, batch.id.value()}, [](CudaStream& stream, const FetchRecord& r) {
      return r.peer->FetchStatus(stream, MicroBatchId(static_cast<uint16_t>(r.micro_batch)));
    }));
  }
  return StepOf(batch).attends ? prompts_->End(batch) : absl::OkStatus();
}

absl::Status CudaPeerCrossing::EndTurn(CudaBatch& batch) {
  const Step& step = StepOf(batch);
  kernels::cuda::ExchangeGiveTurnLaunch give;
  give.fan = step.divides ? step.divided.fan() : step.fan;
  if (give.fan == nullptr) give.own = step.only()->End(batch.id).own;
  return batch.Enqueue(give, kernels::cuda::ExchangeGiveTurn);
}

absl::Status CudaPeerCrossing::Launch(CudaBatch& batch) {
  Step& step = StepOf(batch);
  if (!step.attends) DT_RETURN_IF_ERROR(EndTurn(batch));  // one with prompts takes none
  step.launched = !batch.work->immediate();
  if (step.launched) DT_RETURN_IF_ERROR(batch.stream().Record(step.begun));
  DT_RETURN_IF_ERROR(batch.work->Launch(batch.stream()));
  return batch.stream().Record(step.ended);
}

TurnChoice::Load CudaPeerCrossing::LoadWith(const CudaBatch& batch) const {
  TurnChoice::Load load{1, batch.rows};
  for (const Step& other : steps_) {
    if (&other == &StepOf(batch) || other.lane == batch.lane || !other.launched) continue;
    const absl::StatusOr<bool> done = other.ended.Done();
    if (!done.ok() || *done) continue;
    ++load.steps;
    load.rows += other.row_count;
  }
  return load;
}

absl::Status CudaPeerCrossing::Ended(MicroBatchId id, StepId number, const absl::Status& drawn) {
  const Step& step = steps_[id.value()];
  if (step.attends) DT_RETURN_IF_ERROR(prompts_->Ended(id));
  DT_RETURN_IF_ERROR(exchange::StatusOf(step.peers, id, number));
  if (!step.launched || !drawn.ok()) return drawn;
  const absl::StatusOr<float> all = step.ended.MillisecondsSince(step.begun);
  if (all.ok()) turns_.Note(step.load, step.takes_turns, *all);
  return absl::OkStatus();
}

std::optional<DenseBackend::GpuTimes> CudaPeerCrossing::TimesOf(MicroBatchId id) const {
  const Step& step = steps_[id.value()];
  if (step.attends) return prompts_->TimesOf(id);
  const absl::StatusOr<float> all = step.ended.MillisecondsSince(step.begun);
  if (!all.ok()) return std::nullopt;
  const GpuExchange::Times times = exchange::TimesOf(step.peers, id);
  return DenseBackend::GpuTimes{.busy = absl::Milliseconds(*all) - times.waited - times.turn,
                                .waited = times.waited,
                                .attention = times.peer_busy};
}

}  // namespace dovetail::compute
