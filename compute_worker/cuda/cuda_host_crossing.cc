#include "compute_worker/cuda/cuda_host_crossing.h"

#include <algorithm>
#include <utility>

#include "compute_worker/cuda/cuda_hybrid.h"
#include "compute_worker/cuda/wire_element.h"
#include "kernels/op_context.h"

namespace dovetail::compute {

using kernels::cuda::CudaEvent;
using kernels::cuda::CudaStream;

namespace {

constexpr int kLooksPerCheck = 1024;  // about a millisecond between two looks at whether the GPU is lost

// One that is long enough to say something about rates (PromptWork), attended elsewhere.
bool HasPrompt(const ComputeWorkerCore& core, MicroBatchId id) {
  const std::vector<proto::StepEntry>& entries = core.PlanOf(id).entries;
  return std::any_of(entries.begin(), entries.end(), [&](const proto::StepEntry& entry) {
    return static_cast<int>(entry.tokens.size()) >= core.options().prompt_tokens;
  });
}

}  // namespace

CudaHostCrossing::CudaHostCrossing(const proto::AttentionTable& table, kernels::cuda::CudaDevice& device,
                                   CudaLane& lane, int micro_batches, CudaPromptAttention* prompts,
                                   CudaPromptStates* states, CudaRankRows* rank_rows)
    : table_(table),
      device_(device),
      pinned_(device),
      lane_(lane),
      prompts_(prompts),
      states_(states),
      rank_rows_(rank_rows),
      steps_(micro_batches) {
  for (Step& step : steps_) step.wire = std::make_unique<StepWire>(pinned_, table_, StepWire::Join::kElsewhere);
}

absl::StatusOr<std::unique_ptr<CudaHostCrossing>> CudaHostCrossing::Create(
    const proto::AttentionTable& table, kernels::cuda::CudaDevice& device, CudaLane& lane, int micro_batches,
    CudaPromptAttention* prompts, CudaPromptStates* states, CudaRankRows* rank_rows) {
  std::unique_ptr<CudaHostCrossing> made(
      new CudaHostCrossing(table, device, lane, micro_batches, prompts, states, rank_rows));
  if (prompts != nullptr || states != nullptr) {
    DT_ASSIGN_OR_RETURN(made->copies_, device.CreateCudaStream());
  }
  for (Step& step : made->steps_) {
    DT_ASSIGN_OR_RETURN(step.made, device.CreateEvent());
    DT_ASSIGN_OR_RETURN(step.host, HostStores::Create(table, device));
  }
  return made;
}

// Copies and kernels write memory that is about to go.
CudaHostCrossing::~CudaHostCrossing() {
  (void)lane_.stream->SynchronizeStatus();
  if (copies_ != nullptr) (void)copies_->SynchronizeStatus();
}

absl::Status CudaHostCrossing::Use(const exchange::Seam&, CudaBatch& batch) {
  batch.lane = &lane_;
  batch.work = nullptr;  // each op waits in any case
  return absl::OkStatus();
}

absl::Status CudaHostCrossing::Begin(const ComputeWorkerCore& core, CudaBatch& batch) {
  Step& step = steps_[batch.id.value()];
  if (step.under_way) {  // and failed: what it has enqueued uses memory that Prepare may give back
    DT_RETURN_IF_ERROR(batch.stream().SynchronizeStatus());
    if (copies_ != nullptr) DT_RETURN_IF_ERROR(copies_->SynchronizeStatus());
  }
  step.under_way = true;
  step.attends = prompts_ != nullptr && !core.PromptsOf(batch.id).empty();
  step.runs_states = states_ != nullptr && !core.StatesOf(batch.id).empty();
  step.streams = step.attends || step.runs_states;
  step.stores = step.host != nullptr && !step.streams && batch.rows <= HostStores::kMostRows;
  step.looks = 0;
  step.timed = !step.streams && HasPrompt(core, batch.id);
  DT_RETURN_IF_ERROR(step.wire->Prepare(core, batch.id));
  if (step.timed) {
    DT_RETURN_IF_ERROR(MakeTimes(step));
    DT_RETURN_IF_ERROR(step.times->Begin(batch.stream()));
  }
  if (step.stores) return step.host->Begin(batch.stream(), core.PlanOf(batch.id).step);
  return step.streams ? BeginStreaming(core, batch, step) : absl::OkStatus();
}

absl::Status CudaHostCrossing::MakeTimes(Step& step) {
  if (step.times != nullptr) return absl::OkStatus();
  DT_ASSIGN_OR_RETURN(step.times, PromptStepTimes::Create(device_, table_.op_count()));
  return absl::OkStatus();
}

absl::Status CudaHostCrossing::BeginStreaming(const ComputeWorkerCore& core, CudaBatch& batch, Step& step) {
  for (size_t slot = step.given_of_slot.size(); slot < static_cast<size_t>(core.options().key_values_in_flight);
       ++slot) {
    DT_ASSIGN_OR_RETURN(CudaEvent copied, device_.CreateEvent());
    DT_ASSIGN_OR_RETURN(CudaEvent given, device_.CreateEvent());
    step.copied_of_slot.push_back(std::move(copied));
    step.given_of_slot.push_back(std::move(given));
  }
  DT_RETURN_IF_ERROR(MakeTimes(step));
  step.last_op.reset();
  FindRows(core, batch.id, step);
  if (step.attends) DT_RETURN_IF_ERROR(prompts_->Prepare(core, batch));
  if (step.runs_states) DT_RETURN_IF_ERROR(states_->Prepare(core, batch, *step.wire));
  const PromptEntry* const prompt = step.attends ? &core.PromptsOf(batch.id)[0] : nullptr;
  const proto::PrefillPart& part = core.PlanOf(batch.id).part;
  step.in_parts = prompt != nullptr && (prompt->ring || prompt->switches);
  const int ranks = prompt != nullptr && prompt->switches ? part.ranks : part.rank + 1;
  return step.times->Begin(batch.stream(), step.in_parts ? ranks + 1 : 1);  // the last one joins
}

void CudaHostCrossing::FindRows(const ComputeWorkerCore& core, MicroBatchId id, Step& step) const {
  const std::vector<proto::StepEntry>& entries = core.PlanOf(id).entries;
  const auto add = [&](std::vector<Rows>& to, size_t entry) {
    const int64_t first = step.wire->row_begin(static_cast<int>(entry));
    if (to.empty() || to.back().first + to.back().count != first) to.push_back({first, 0});
    to.back().count += static_cast<int64_t>(entries[entry].tokens.size());
  };
  step.asked.assign(table_.group_count(), {});
  for (int g = 0; g < table_.group_count(); ++g) {
    std::vector<bool> asked(entries.size());
    for (const WorkerPart& part : core.PartsOf(id))
      for (const proto::ShardStep& item : part.layouts[g].items)
        asked[item.entry] = asked[item.entry] || item.rows.q_count > 0;
    for (size_t e = 0; e < entries.size(); ++e)
      if (asked[e]) add(step.asked[g], e);
  }
  step.elsewhere.clear();
  size_t p = 0;  // both lists are by entry
  const std::vector<PromptEntry>& prompts = core.PromptsOf(id);
  for (size_t e = 0; e < entries.size(); ++e) {
    if (p < prompts.size() && prompts[p].entry == static_cast<int>(e)) {
      ++p;
    } else {
      add(step.elsewhere, e);
    }
  }
}

// The copies of the last op read what is about to be written.
absl::Status CudaHostCrossing::BeforeHeads(CudaBatch& batch) {
  Step& step = steps_[batch.id.value()];
  if (!step.streams || !step.last_op) return absl::OkStatus();
  DT_RETURN_IF_ERROR(batch.stream().Wait(GivenOf(step, *step.last_op)));
  return batch.stream().Wait(CopiedOf(step, *step.last_op));
}

void CudaHostCrossing::LeaveFrom(int op, const CudaBatch& batch, kernels::cuda::KvAppendLaunch& out) {
  const Step& step = steps_[batch.id.value()];
  if (!Stores(step, op)) return;
  out.q_out = step.wire->query();
  out.k_out = step.wire->key(op);
  out.v_out = step.wire->value(op);
  out.exchange = step.host->end();
  out.signal_op = op;
}

absl::Status CudaHostCrossing::CopyOut(int op, CudaBatch& batch, CudaStream& stream) {
  Step& step = steps_[batch.id.value()];
  const LayerGroup group = table_.op_group[op];
  const proto::SoftmaxSpec& spec = table_.softmax(group);
  const int64_t query = int64_t{spec.query_heads} * spec.key_dim * kElement;
  const int64_t key = int64_t{spec.kv_heads} * spec.key_dim * kElement;
  const int64_t value = int64_t{spec.kv_heads} * spec.value_dim * kElement;
  const int64_t gates = int64_t{spec.kv_heads} * spec.gates * static_cast<int64_t>(sizeof(float));
  const std::byte* const keys = batch.key_value->data();
  const std::vector<Rows> whole = {{0, batch.rows}};
  const auto copy = [&](std::byte* to, const std::byte* from, const Rows& rows, int64_t row_bytes) {
    return stream.Copy(to + rows.first * row_bytes, from + rows.first * row_bytes, rows.count * row_bytes);
  };
  for (const Rows& rows : step.streams ? step.asked[group.value()] : whole)
    DT_RETURN_IF_ERROR(copy(step.wire->query(), batch.query->data(), rows, query));
  const bool states = table_.linear(group) != nullptr && step.runs_states;  // then no tokens of prompts leave
  for (const Rows& rows : states ? step.asked[group.value()] : whole) {
    DT_RETURN_IF_ERROR(copy(step.wire->key(op), keys, rows, key));
    DT_RETURN_IF_ERROR(copy(step.wire->value(op), keys + batch.rows * key, rows, value));
    if (spec.gates > 0)
      DT_RETURN_IF_ERROR(copy(reinterpret_cast<std::byte*>(step.wire->gates(op)),
                              keys + CudaHybrid::GatesAt(spec, batch.rows), rows, gates));
  }
  return absl::OkStatus();
}

absl::Status CudaHostCrossing::Leave(int op, CudaBatch& batch) {
  Step& step = steps_[batch.id.value()];
  step.copied = false;
  if (Stores(step, op)) {
    DT_RETURN_IF_ERROR(batch.stream().Record(step.made));
  } else if (!step.streams) {
    DT_RETURN_IF_ERROR(CopyOut(op, batch, batch.stream()));
  }
  if (step.timed) DT_RETURN_IF_ERROR(step.times->Leaves(op, batch.stream()));
  if (!step.streams) return absl::OkStatus();
  DT_RETURN_IF_ERROR(batch.stream().Record(step.made));
  DT_RETURN_IF_ERROR(copies_->Wait(step.made));
  DT_RETURN_IF_ERROR(CopyOut(op, batch, *copies_));
  DT_RETURN_IF_ERROR(step.times->Leaves(op, batch.stream()));
  step.last_op = op;
  return copies_->Record(step.copied_of_slot[op % step.copied_of_slot.size()]);
}

// On the device they are copied by its kernels, which would wait for the attention kernel in any stream but the step's:
// it fills the device. So the step's stream copies them, before that kernel.
absl::StatusOr<transport::LentBytes> CudaHostCrossing::RankRows(int op, int64_t first_row, CudaBatch& batch) {
  Step& step = steps_[batch.id.value()];
  if (rank_rows_ == nullptr || copies_ == nullptr)
    return FailedPrecondition("attention op ", op, ": without a prompt scratch nothing goes to other ranks");
  const proto::SoftmaxSpec& spec = table_.softmax(table_.op_group[op]);
  const int64_t key = int64_t{spec.kv_heads} * spec.key_dim * kElement;
  const int64_t value = int64_t{spec.kv_heads} * spec.value_dim * kElement;
  const int64_t rows = batch.rows - first_row;
  CudaStream& stream = step.streams && batch.ranks_reach ? batch.stream() : *copies_;
  DT_ASSIGN_OR_RETURN(CudaRankRows::Given given, rank_rows_->Give(rows * (key + value), batch.ranks_reach, stream));
  if (!step.streams) {
    DT_RETURN_IF_ERROR(Await(op, batch));
  }
  const std::byte* const keys = batch.key_value->data();
  DT_RETURN_IF_ERROR(stream.Copy(given.memory, keys + first_row * key, rows * key));
  DT_RETURN_IF_ERROR(stream.Copy(given.memory + rows * key, keys + batch.rows * key + first_row * value, rows * value));
  if (!step.streams) {
    DT_RETURN_IF_ERROR(copies_->SynchronizeStatus());
  } else {
    DT_RETURN_IF_ERROR(stream.Record(step.given_of_slot[op % step.given_of_slot.size()]));
  }
  return std::move(given.rows);
}

absl::StatusOr<bool> CudaHostCrossing::RankRowsReady(int op, const CudaBatch& batch) const {
  const Step& step = steps_[batch.id.value()];
  return step.streams ? GivenOf(step, op).Done() : absl::StatusOr<bool>(true);
}

absl::Status CudaHostCrossing::AttendPrompts(const ComputeWorkerCore& core, int op, CudaBatch& batch) {
  Step& step = steps_[batch.id.value()];
  DT_RETURN_IF_ERROR(step.times->Attends(op, batch.stream()));
  if (table_.linear(table_.op_group[op]) == nullptr) {
    DT_RETURN_IF_ERROR(prompts_->Attend(core, op, batch));
    return step.times->Attended(op, batch.stream());
  }
  DT_RETURN_IF_ERROR(states_->Run(core, op, batch, *step.wire, *copies_));
  DT_RETURN_IF_ERROR(copies_->Record(step.copied_of_slot[op % step.copied_of_slot.size()]));
  return step.times->Attended(op, batch.stream());
}

absl::Status CudaHostCrossing::AttendShard(const ComputeWorkerCore& core, const compute::AttendShard& shard,
                                           CudaBatch& batch) {
  Step& step = steps_[batch.id.value()];
  DT_RETURN_IF_ERROR(step.times->Attends(shard.op, batch.stream()));
  DT_RETURN_IF_ERROR(prompts_->Attend(core, shard, batch));
  return step.times->Attended(shard.op, batch.stream());
}

// Nothing may write q, k and v before they have been packed.
absl::StatusOr<transport::LentBytes> CudaHostCrossing::RankHeads(const ComputeWorkerCore& core, int op,
                                                                 const proto::HeadRange& heads, CudaBatch& batch) {
  Step& step = steps_[batch.id.value()];
  if (rank_rows_ == nullptr || !step.attends)
    return FailedPrecondition("attention op ", op, ": without a prompt scratch nothing goes to other ranks");
  DT_ASSIGN_OR_RETURN(transport::LentBytes given, prompts_->GiveHeads(core, op, heads, *copies_, batch));
  CudaStream& stream = batch.ranks_reach ? batch.stream() : *copies_;
  DT_RETURN_IF_ERROR(stream.Record(step.given_of_slot[op % step.given_of_slot.size()]));
  return given;
}

absl::Status CudaHostCrossing::AttendHeads(const ComputeWorkerCore& core, const compute::AttendHeads& attend,
                                           CudaBatch& batch) {
  Step& step = steps_[batch.id.value()];
  if (!step.attends) return Internal("attention op ", attend.op, ": a head switch without a prompt");
  DT_RETURN_IF_ERROR(step.times->Attends(attend.op, batch.stream()));
  DT_RETURN_IF_ERROR(prompts_->Attend(core, attend, *copies_, batch));
  return step.times->Attended(attend.op, batch.stream());
}

absl::StatusOr<transport::LentBytes> CudaHostCrossing::TakeRankOutputs(CudaBatch& batch) {
  if (!steps_[batch.id.value()].attends) return Internal("outputs of a head switch without a prompt");
  return prompts_->TakeOutputs(batch);
}

absl::Status CudaHostCrossing::PlaceOutputs(const ComputeWorkerCore& core, const PlaceRankOutputs& place,
                                            CudaBatch& batch) {
  if (!steps_[batch.id.value()].attends) return Internal("outputs of a head switch without a prompt");
  return prompts_->Place(core, place, batch);
}

absl::StatusOr<bool> CudaHostCrossing::Ready(int op, const CudaBatch& batch) const {
  const Step& step = steps_[batch.id.value()];
  if (step.streams) return CopiedOf(step, op).Done();
  if (!Stores(step, op) || step.host->Arrived(op)) return true;
  if (++step.looks % kLooksPerCheck == 0) DT_RETURN_IF_ERROR(step.made.Done().status());
  return false;
}

absl::Status CudaHostCrossing::Await(int op, CudaBatch& batch) {
  Step& step = steps_[batch.id.value()];
  if (step.streams) return CopiedOf(step, op).Synchronize();
  if (Stores(step, op)) {
    if (step.host->Arrived(op)) return absl::OkStatus();
    DT_RETURN_IF_ERROR(step.made.Synchronize());
    return step.host->Arrived(op) ? absl::OkStatus()
                                  : Internal("attention op ", op, ": q, k and v came without a word");
  }
  if (step.copied) return absl::OkStatus();
  DT_RETURN_IF_ERROR(batch.stream().SynchronizeStatus());
  step.copied = true;
  return absl::OkStatus();
}

absl::StatusOr<transport::LentBytes> CudaHostCrossing::PackQuery(const std::vector<WorkerPart>& parts, int p, int op,
                                                                 CudaBatch& batch) {
  DT_RETURN_IF_ERROR(Await(op, batch));
  return steps_[batch.id.value()].wire->PackQuery(parts, p, table_.op_group[op]);
}

absl::StatusOr<transport::LentBytes> CudaHostCrossing::PackKeyValue(const std::vector<WorkerPart>& parts, int p, int op,
                                                                    CudaBatch& batch) {
  DT_RETURN_IF_ERROR(Await(op, batch));
  return steps_[batch.id.value()].wire->PackKeyValue(parts, p, op);
}

absl::StatusOr<const void*> CudaHostCrossing::Arrive(int op, const std::vector<WorkerPart>& parts, const void*,
                                                     CudaBatch& batch) {
  Step& step = steps_[batch.id.value()];
  const LayerGroup group = table_.op_group[op];
  const proto::SoftmaxSpec& spec = table_.softmax(group);
  const bool linear = table_.linear(group) != nullptr, attended_here = AttendsHere(step, op);
  std::byte* const o = !attended_here ? batch.lane->attended->data()
                       : linear       ? states_->attended(batch)
                                      : prompts_->attended(batch);
  const std::vector<Rows> whole = {{0, batch.rows}};
  const std::vector<Rows>& elsewhere = !attended_here ? whole : linear ? step.asked[group.value()] : step.elsewhere;
  const int64_t row_bytes = int64_t{spec.query_heads} * spec.value_dim * kElement;
  const bool joins = attended_here && !linear && step.in_parts;
  if (joins) DT_RETURN_IF_ERROR(JoinTimed(parts, op, batch, step));
  if (step.timed) {  // nothing is attended here
    DT_RETURN_IF_ERROR(step.times->Attends(op, batch.stream()));
    DT_RETURN_IF_ERROR(step.times->Attended(op, batch.stream()));
  }
  if (attended_here || step.timed) DT_RETURN_IF_ERROR(step.times->GoesOn(op, batch.stream(), linear));
  if (!elsewhere.empty()) {
    DT_ASSIGN_OR_RETURN(const std::byte* const joined,
                        step.wire->JoinPartials(parts, op, kernels::ContextOf(batch.stream())));
    if (Stores(step, op)) {
      DT_RETURN_IF_ERROR(step.host->Fetch(batch.stream(), joined, batch.rows, row_bytes, o));
      return o;
    }
    for (const Rows& rows : elsewhere)
      DT_RETURN_IF_ERROR(
          batch.stream().Copy(o + rows.first * row_bytes, joined + rows.first * row_bytes, rows.count * row_bytes));
  }
  if (attended_here && !linear && !joins) DT_RETURN_IF_ERROR(prompts_->Join(parts, op, batch));
  return o;
}

// In a ring it reads as much as there are ranks: a part of attention, and so in a head switch.
absl::Status CudaHostCrossing::JoinTimed(const std::vector<WorkerPart>& parts, int op, CudaBatch& batch, Step& step) {
  DT_RETURN_IF_ERROR(step.times->Attends(op, batch.stream()));
  DT_RETURN_IF_ERROR(prompts_->Join(parts, op, batch));
  return step.times->Attended(op, batch.stream());
}

absl::Status CudaHostCrossing::BeforeDraws(CudaBatch& batch) {
  Step& step = steps_[batch.id.value()];
  return step.streams || step.timed ? step.times->End(batch.stream()) : absl::OkStatus();
}

// A step that draws nothing has not waited for the GPU, which still reads what the next step may give back.
absl::Status CudaHostCrossing::Ended(MicroBatchId id, StepId, const absl::Status& drawn) {
  Step& step = steps_[id.value()];
  DT_RETURN_IF_ERROR(drawn);
  if (step.streams || step.timed) DT_RETURN_IF_ERROR(step.times->Await());
  if (step.attends) prompts_->Ended(id);
  step.under_way = false;
  return absl::OkStatus();
}

std::optional<DenseBackend::GpuTimes> CudaHostCrossing::TimesOf(MicroBatchId id) const {
  const Step& step = steps_[id.value()];
  if (!step.streams && !step.timed) return std::nullopt;
  std::optional<DenseBackend::GpuTimes> times = step.times->Sum();
  if (times && step.timed) {  // what passed between two marks was no attention
    times->waited += times->prompts;
    times->prompts = times->linear = absl::ZeroDuration();
  }
  return times;
}

}  // namespace dovetail::compute
