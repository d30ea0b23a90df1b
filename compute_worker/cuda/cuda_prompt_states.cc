#include "compute_worker/cuda/cuda_prompt_states.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "compute_worker/cuda/wire_element.h"
#include "kernels/cuda/state/cuda_state.h"
#include "kernels/cuda/state/state_pack.h"

namespace dovetail::compute {

using kernels::cuda::CudaStream;
using kernels::cuda::StateItem;
using kernels::cuda::StateLaunch;
using kernels::cuda::StatePackJob;
using kernels::cuda::StatePackLaunch;
using kernels::cuda::StateUnit;

namespace {

constexpr int64_t kMostBlockBytes = int64_t{256} << 20;    // of entries that run at once, unless one needs more
constexpr size_t kMostWorkspaceBytes = size_t{128} << 20;  // for chunks, unless one of each head needs more
constexpr int64_t kRowsBeyond = 8;                         // products read whole runs of rows

const float* Floats(const std::unique_ptr<kernels::Buffer>& buffer) {
  return buffer != nullptr ? reinterpret_cast<const float*>(buffer->data()) : nullptr;
}

// Of one head before any position: a full block and all but one token of an open one.
int64_t MostBytes(const proto::LinearSpec& spec) {
  return spec.state_bytes() + (kSegmentTokens - 1) * spec.token_bytes();
}

}  // namespace

struct CudaPromptStates::WaveView {
  const ComputeWorkerCore& core;
  CudaBatch& batch;
  const int op;
  const LayerGroup group;
  const StateShapeOnGpu& shape;
  const StatePlan::Wave& wave;
  const StatePackJob* jobs;  // of the plan, on the device
  const StateItem* items;
  const StateUnit* units;
  const std::byte* const* blocks;
  StepWire& wire;
  CudaStream& copies;

  const std::vector<WorkerPart>& parts() const { return core.PartsOf(batch.id); }
  const proto::ShardStep& item(const StatePlan::Crossing& of) const {
    return parts()[of.part].layouts[group.value()].items[of.item];
  }
  StatePackLaunch Of(const StatePlan::Jobs& of, std::byte* packed) const {
    StatePackLaunch launch = shape.pack;
    launch.jobs = jobs + of.first;
    launch.count = of.count;
    launch.packed = packed;
    return launch;
  }
};

absl::Status CudaPromptStates::Takes(const kernels::cuda::CudaDevice& device, const proto::AttentionTable& table) {
  if (!table.has_linear()) return FailedPrecondition("the model has no linear layers");
  for (int g = 0; g < table.group_count(); ++g) {
    const proto::LinearSpec* const spec = table.linear(LayerGroup(static_cast<uint16_t>(g)));
    if (spec == nullptr) continue;
    DT_ASSIGN_OR_RETURN(const StateShapeOnGpu shape, StateShapeOnGpu::Of(*spec));
    if (!kernels::cuda::StatesRunInChunks(device, shape.launch))
      return Unimplemented("linear layers with keys of ", spec->key_dim, " dimensions on ", device.name(),
                           ": chunks of a prompt need keys of at most 128 and 227 KiB of shared memory");
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<CudaPromptStates>> CudaPromptStates::Create(kernels::cuda::CudaDevice& device,
                                                                           CudaStream& stream,
                                                                           const proto::AttentionTable& table,
                                                                           int micro_batches) {
  DT_RETURN_IF_ERROR(Takes(device, table));
  std::unique_ptr<CudaPromptStates> made(new CudaPromptStates(device, stream, table));
  DT_RETURN_IF_ERROR(made->Allocate(micro_batches));
  return made;
}

absl::Status CudaPromptStates::Upload(const std::vector<float>& values, BufferPtr& out) {
  if (values.empty()) return absl::OkStatus();
  DT_ASSIGN_OR_RETURN(out, device_.Allocate(values.size() * sizeof(float)));
  DT_RETURN_IF_ERROR(stream_.Copy(out->data(), values.data(), out->size_bytes()));
  return stream_.SynchronizeStatus();  // the caller keeps the values
}

absl::Status CudaPromptStates::Allocate(int micro_batches) {
  DT_ASSIGN_OR_RETURN(packed_, device_.CreateEvent());
  DT_ASSIGN_OR_RETURN(leaving_free_, device_.CreateEvent());
  shapes_.resize(table_.group_count());
  steps_.resize(micro_batches);
  for (Step& step : steps_) {
    step.groups.resize(table_.group_count());
    step.given.ops.resize(table_.op_count());
    step.taken.ops.resize(table_.op_count());
    for (int op = 0; op < table_.op_count(); ++op)
      if (table_.linear(table_.op_group[op]) != nullptr) {
        DT_ASSIGN_OR_RETURN(step.given.ops[op].there, device_.CreateEvent());
      }
  }
  for (int g = 0; g < table_.group_count(); ++g) {
    const proto::LinearSpec* const spec = table_.linear(LayerGroup(static_cast<uint16_t>(g)));
    if (spec == nullptr) continue;
    DT_ASSIGN_OR_RETURN(shapes_[g], StateShapeOnGpu::Of(*spec));
    for (Step& step : steps_) step.groups[g].tables = std::make_unique<kernels::cuda::StagedUpload>(device_);
  }
  constants_.resize(table_.op_count());
  for (int op = 0; op < table_.op_count(); ++op) {
    const proto::LinearSpec* const spec = table_.linear(table_.op_group[op]);
    slot_at_.push_back(slot_bytes_);
    if (spec == nullptr) continue;
    slot_bytes_ += (spec->heads * MostBytes(*spec) + 255) / 256 * 256;
    if (table_.constants.empty()) continue;
    DT_RETURN_IF_ERROR(Upload(table_.constants[op].log_decay, constants_[op].log_decay));
    DT_RETURN_IF_ERROR(Upload(table_.constants[op].conv, constants_[op].conv));
    DT_RETURN_IF_ERROR(Upload(table_.constants[op].conv_bias, constants_[op].conv_bias));
    DT_RETURN_IF_ERROR(Upload(table_.constants[op].skip, constants_[op].skip));
  }
  return absl::OkStatus();
}

// What is still enqueued uses the memory that goes.
absl::Status CudaPromptStates::Grow(BufferPtr& buffer, size_t bytes, bool pinned) {
  if (bytes == 0 || (buffer != nullptr && buffer->size_bytes() >= bytes)) return absl::OkStatus();
  if (buffer != nullptr) {
    DT_RETURN_IF_ERROR(stream_.SynchronizeStatus());
    if (leaving_used_) DT_RETURN_IF_ERROR(leaving_free_.Synchronize());
  }
  buffer.reset();
  if (pinned) {
    DT_ASSIGN_OR_RETURN(buffer, device_.AllocatePinned(bytes));
  } else {
    DT_ASSIGN_OR_RETURN(buffer, device_.Allocate(bytes));
  }
  return absl::OkStatus();
}

absl::Status CudaPromptStates::GrowSlots(const ComputeWorkerCore& core, MicroBatchId id) {
  for (const StateEntry& state : core.StatesOf(id)) {
    if (state.slot == StateSlots::kNone) continue;
    if (slots_.size() <= static_cast<size_t>(state.slot)) slots_.resize(state.slot + 1);
    DT_RETURN_IF_ERROR(Grow(slots_[state.slot], slot_bytes_));
  }
  return absl::OkStatus();
}

absl::Status CudaPromptStates::GrowRankStates(Step& step) {
  step.given.all_bytes = step.taken.all_bytes = 0;
  const auto add = [](RankStates& states, int op, bool crosses, int64_t bytes) {
    states.ops[op].at = states.all_bytes;
    states.ops[op].bytes = crosses ? bytes : 0;
    states.all_bytes += states.ops[op].bytes;
  };
  for (int op = 0; op < table_.op_count(); ++op)
    for (const StatePlan::Wave& wave : step.groups[table_.op_group[op].value()].plan.waves)
      for (const StatePlan::Entry& entry : wave.entries) {  // a step of a group has one
        add(step.given, op, entry.state.passed_on, entry.after_bytes);
        add(step.taken, op, entry.state.chained, entry.before_bytes);
      }
  DT_RETURN_IF_ERROR(Grow(step.given.memory, step.given.all_bytes, /*pinned=*/true));
  return Grow(step.taken.memory, step.taken.all_bytes, /*pinned=*/true);
}

absl::Status CudaPromptStates::Prepare(const ComputeWorkerCore& core, CudaBatch& batch, const StepWire& wire) {
  Step& step = steps_[batch.id.value()];
  DT_RETURN_IF_ERROR(GrowSlots(core, batch.id));
  size_t width = 0, blocks = 0, arriving = 0, leaving = 0, workspace = 0;
  for (int g = 0; g < table_.group_count(); ++g) {
    const LayerGroup group(static_cast<uint16_t>(g));
    const proto::LinearSpec* const spec = table_.linear(group);
    if (spec == nullptr) continue;
    GroupStep& own = step.groups[g];
    own.plan.Make(core, batch.id, group, shapes_[g], wire, kMostBlockBytes);
    width = std::max<size_t>(width, int64_t{spec->heads} * spec->value_dim);
    blocks = std::max<size_t>(blocks, own.plan.block_bytes);
    for (const StatePlan::Wave& wave : own.plan.waves) {
      arriving = std::max<size_t>(arriving, wave.arriving_bytes);
      leaving = std::max<size_t>(leaving, wave.leaving_bytes);
      for (const StatePlan::Entry& entry : wave.entries) {
        if (entry.state.chained) arriving = std::max<size_t>(arriving, entry.before_bytes);
        if (entry.state.passed_on) leaving = std::max<size_t>(leaving, entry.after_bytes);
      }
      StateLaunch launch = shapes_[g].launch;
      launch.unit_count = wave.units;
      launch.chunk_end = wave.most_chunks;
      workspace = std::max(workspace, kernels::cuda::StateWorkspaceBytes(launch, kMostWorkspaceBytes));
    }
  }
  DT_RETURN_IF_ERROR(Grow(step.attended, (batch.rows + kRowsBeyond) * width * kElement));
  DT_RETURN_IF_ERROR(Grow(blocks_, blocks));
  DT_RETURN_IF_ERROR(Grow(workspace_, workspace));
  DT_RETURN_IF_ERROR(Grow(arriving_, arriving));
  DT_RETURN_IF_ERROR(Grow(leaving_, leaving));
  DT_RETURN_IF_ERROR(GrowRankStates(step));
  for (GroupStep& own : step.groups)
    if (own.tables != nullptr) DT_RETURN_IF_ERROR(SendTables(own));
  return absl::OkStatus();
}

namespace {

// Where the parts of a plan lie in its upload.
struct PlanUpload {
  size_t items = 0, units = 0, blocks = 0, jobs = 0, bytes = 0;

  explicit PlanUpload(const StatePlan& plan) {
    kernels::cuda::UploadLayout at;
    items = at.Add<StateItem>(plan.items.size());
    units = at.Add<StateUnit>(plan.units.size());
    blocks = at.Add<const std::byte*>(plan.blocks.size());
    jobs = at.Add<StatePackJob>(plan.jobs.size());
    bytes = at.bytes();
  }
};

template <typename T>
void Put(const std::vector<T>& values, std::byte* to) {
  if (!values.empty()) std::memcpy(to, values.data(), values.size() * sizeof(T));
}

}  // namespace

absl::Status CudaPromptStates::SendTables(GroupStep& step) {
  StatePlan& plan = step.plan;
  const PlanUpload at(plan);
  step.blocks = blocks_->data();
  std::vector<const std::byte*> blocks;
  for (const int64_t offset : plan.blocks)
    blocks.push_back(offset == StatePlan::kNotKept ? nullptr : blocks_->data() + offset);
  for (size_t i = 0; i < plan.jobs.size(); ++i) plan.jobs[i].block = blocks_->data() + plan.job_blocks[i];
  DT_ASSIGN_OR_RETURN(std::byte* const host, step.tables->Begin(stream_, at.bytes));
  Put(plan.items, host + at.items);
  Put(plan.units, host + at.units);
  Put(blocks, host + at.blocks);
  Put(plan.jobs, host + at.jobs);
  stream_.HoldUploads();  // kernels of ops before may still read what lies there
  const absl::Status sent = step.tables->Send(stream_);
  stream_.ReleaseUploads();
  return sent;
}

absl::Status CudaPromptStates::Run(const ComputeWorkerCore& core, int op, CudaBatch& batch, StepWire& wire,
                                   CudaStream& copies) {
  const LayerGroup group = table_.op_group[op];
  GroupStep& own = steps_[batch.id.value()].groups[group.value()];
  if (own.blocks != blocks_->data()) DT_RETURN_IF_ERROR(SendTables(own));
  const PlanUpload at(own.plan);
  const std::byte* const there = own.tables->device();
  for (const StatePlan::Wave& wave : own.plan.waves) {
    const WaveView view{core,
                        batch,
                        op,
                        group,
                        shapes_[group.value()],
                        wave,
                        reinterpret_cast<const StatePackJob*>(there + at.jobs),
                        reinterpret_cast<const StateItem*>(there + at.items) + wave.first_item,
                        reinterpret_cast<const StateUnit*>(there + at.units) + wave.first_unit,
                        reinterpret_cast<const std::byte* const*>(there + at.blocks),
                        wire,
                        copies};
    DT_RETURN_IF_ERROR(LoadBefore(view));
    DT_RETURN_IF_ERROR(Append(view));
    DT_RETURN_IF_ERROR(LeaveStates(view));
  }
  return absl::OkStatus();
}

// From the rank before, from the slot, or as the attention workers gave it.
absl::Status CudaPromptStates::LoadBefore(const WaveView& view) {
  CudaStream& stream = view.batch.stream();
  for (const StatePlan::Entry& entry : view.wave.entries) {
    if (entry.before.count == 0) continue;
    std::byte* from = entry.state.held ? SlotAt(entry.state.slot, view.op) : arriving_->data();
    if (entry.state.chained) {
      const std::span<const std::byte> state = view.core.RankState(view.batch.id, view.op);
      if (static_cast<int64_t>(state.size()) != entry.before_bytes)
        return Internal("attention op ", view.op, ": the rank before left ", state.size(), " bytes of a state");
      std::byte* const taken = steps_[view.batch.id.value()].taken.of(view.op);
      std::memcpy(taken, state.data(), state.size());  // from other memory a copy would wait for the stream
      DT_RETURN_IF_ERROR(stream.Copy(from, taken, state.size()));
    }
    DT_RETURN_IF_ERROR(kernels::cuda::UnpackStates(stream, view.Of(entry.before, from)));
  }
  if (view.wave.fetches.empty()) return absl::OkStatus();
  for (const StatePlan::Crossing& fetch : view.wave.fetches)
    DT_RETURN_IF_ERROR(stream.Copy(arriving_->data() + fetch.at,
                                   view.parts()[fetch.part].partial.data() + view.item(fetch).before_offset,
                                   fetch.bytes));
  return kernels::cuda::UnpackStates(stream, view.Of(view.wave.fetched, arriving_->data()));
}

absl::Status CudaPromptStates::Append(const WaveView& view) {
  StateLaunch launch = view.shape.launch;
  launch.items = view.items;
  launch.units = view.units;
  launch.unit_count = view.wave.units;
  launch.blocks = view.blocks;
  launch.query = view.batch.query->data();
  launch.key_value = view.batch.key_value->data();
  launch.out = attended(view.batch);
  launch.log_decay = Floats(constants_[view.op].log_decay);
  launch.conv = Floats(constants_[view.op].conv);
  launch.conv_bias = Floats(constants_[view.op].conv_bias);
  launch.skip = Floats(constants_[view.op].skip);
  launch.chunk_end = view.wave.most_chunks;
  return kernels::cuda::AppendStatesInChunks(view.batch.stream(), launch,
                                             {workspace_->data(), workspace_->size_bytes()});
}

// For the next part of the prompt, for the next rank, and for the attention workers. The copies read what the next
// wave, and the next op, packs.
absl::Status CudaPromptStates::LeaveStates(const WaveView& view) {
  CudaStream& stream = view.batch.stream();
  for (const StatePlan::Entry& entry : view.wave.entries) {
    if (entry.state.slot != StateSlots::kNone)
      DT_RETURN_IF_ERROR(kernels::cuda::PackStates(stream, view.Of(entry.after, SlotAt(entry.state.slot, view.op))));
    if (entry.state.passed_on) DT_RETURN_IF_ERROR(LeaveForNextRank(view, entry));
  }
  if (view.wave.leaves.empty()) return absl::OkStatus();
  if (leaving_used_) DT_RETURN_IF_ERROR(stream.Wait(leaving_free_));
  DT_RETURN_IF_ERROR(kernels::cuda::PackStates(stream, view.Of(view.wave.left, leaving_->data())));
  DT_RETURN_IF_ERROR(stream.Record(packed_));
  DT_RETURN_IF_ERROR(view.copies.Wait(packed_));
  for (const StatePlan::Crossing& leave : view.wave.leaves)
    DT_RETURN_IF_ERROR(view.copies.Copy(view.wire.part_key_value(leave.part, view.op) + view.item(leave).state_offset,
                                        leaving_->data() + leave.at, leave.bytes));
  leaving_used_ = true;
  return view.copies.Record(leaving_free_);
}

// In the step's stream: its receiver waits for it.
absl::Status CudaPromptStates::LeaveForNextRank(const WaveView& view, const StatePlan::Entry& entry) {
  CudaStream& stream = view.batch.stream();
  RankStates& given = steps_[view.batch.id.value()].given;
  if (leaving_used_) DT_RETURN_IF_ERROR(stream.Wait(leaving_free_));
  DT_RETURN_IF_ERROR(kernels::cuda::PackStates(stream, view.Of(entry.after, leaving_->data())));
  DT_RETURN_IF_ERROR(stream.Copy(given.of(view.op), leaving_->data(), entry.after_bytes));
  return stream.Record(given.ops[view.op].there);
}

absl::StatusOr<bool> CudaPromptStates::RankStateReady(MicroBatchId id, int op) const {
  return steps_[id.value()].given.ops[op].there.Done();
}

std::vector<std::byte> CudaPromptStates::TakeRankState(MicroBatchId id, int op) const {
  const RankStates& given = steps_[id.value()].given;
  const std::byte* const from = given.of(op);
  return std::vector<std::byte>(from, from + given.ops[op].bytes);
}

}  // namespace dovetail::compute
