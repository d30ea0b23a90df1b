// What a step of CudaDense begins with: tokens, positions, the angles of rotations.
#include <algorithm>
#include <cstring>
#include <utility>

#include "compute_worker/cuda/cuda_dense.h"
#include "kernels/cuda/rows/row_ops.h"
#include "kernels/cuda/runtime/enqueue.h"
#include "proto/drawn_token.h"

namespace dovetail::compute {

using kernels::cuda::CudaStream;
using kernels::cuda::WireType;

namespace {

static_assert(proto::kMaxStepTokens <= kernels::cuda::kMaxOpRows, "a step's rows are one launch's");

float* Floats(const std::unique_ptr<kernels::Buffer>& buffer) { return reinterpret_cast<float*>(buffer->data()); }

// x = factor table[ids].
struct EmbedRecord {
  const kernels::cuda::CudaWeights* table = nullptr;
  const int32_t* ids = nullptr;
  const kernels::cuda::SampleOutput* drawn = nullptr;  // for ids that are -1 - i
  void* x = nullptr;
  Real factor = 1.0f;
  WireType table_type = WireType::kBF16;
  int32_t rows = 0, size = 0;
};

absl::Status StartEmbed(CudaStream& stream, const EmbedRecord& record) {
  kernels::cuda::EmbedLaunch embed;
  embed.ids = record.ids;
  embed.drawn = record.drawn;
  embed.out = record.x;
  embed.table_type = record.table_type;
  embed.out_type = WireType::kF32;
  embed.factor = record.factor;
  embed.rows = record.rows;
  embed.size = record.size;
  return kernels::cuda::EmbedFrom(stream, *record.table, embed);
}

// RopeTableLaunch.
struct RopeRecord {
  const int32_t* positions = nullptr;
  const float* inv_freq = nullptr;
  float *cos = nullptr, *sin = nullptr;
  Real multiplier = 1.0f;
  int32_t rows = 0;
  int64_t count = 0;
};

absl::Status StartRope(CudaStream& stream, const RopeRecord& record) {
  kernels::cuda::RopeTableLaunch table;
  table.positions = record.positions;
  table.inv_freq = record.inv_freq;
  table.cos = record.cos;
  table.sin = record.sin;
  table.multiplier = record.multiplier;
  table.rows = record.rows;
  table.count = static_cast<int32_t>(record.count);
  return kernels::cuda::RopeTable(stream, table);
}

}  // namespace

// The ids of the step's rows, -1 - i for what row i of the step before draws, and their positions.
absl::Status CudaDense::UploadTokens(const ComputeWorkerCore& core, MicroBatchId id, int32_t* ids,
                                     int32_t* positions) const {
  const int64_t vocab = model_.model().config().vocab_size;
  const std::optional<MicroBatchId> before = core.DrawnBy(id);
  for (const proto::StepEntry& entry : core.PlanOf(id).entries) {
    const bool drawn = before.has_value() && proto::IsDrawnBefore(entry);
    if (drawn) {
      int32_t row = 0;
      for (const proto::StepEntry& asked : core.PlanOf(*before).entries) {
        if (asked.sequence == entry.sequence) break;
        row += asked.sample ? 1 : 0;
      }
      *ids++ = -1 - row;
    }
    for (size_t i = 0; i < entry.tokens.size(); ++i) {
      *positions++ = static_cast<int32_t>(entry.ctx_len + static_cast<Position>(i));
      if (drawn) continue;
      if (entry.tokens[i] < 0 || entry.tokens[i] >= vocab)
        return InvalidArgument("token ", entry.tokens[i], " is outside the vocabulary of ", vocab);
      *ids++ = entry.tokens[i];
    }
  }
  return absl::OkStatus();
}

absl::Status CudaDense::EmbedTokens(const ComputeWorkerCore& core, MicroBatchId id) {
  MicroBatch& batch = micro_batches_[id.value()];
  kernels::cuda::UploadLayout layout;
  const size_t ids_at = layout.Add<int32_t>(batch.rows), positions_at = layout.Add<int32_t>(batch.rows);
  batch.crossing->AddTo(layout, batch);
  DT_ASSIGN_OR_RETURN(std::byte* const host, batch.upload->Begin(batch.stream(), layout.bytes()));
  DT_RETURN_IF_ERROR(UploadTokens(core, id, reinterpret_cast<int32_t*>(host + ids_at),
                                  reinterpret_cast<int32_t*>(host + positions_at)));
  const std::byte* const sent = batch.upload->device();
  batch.crossing->Fill(host, sent, batch);
  DT_RETURN_IF_ERROR(batch.upload->Send(batch.stream()));
  EmbedRecord embed;
  embed.table = &model_.embedding();
  embed.ids = reinterpret_cast<const int32_t*>(sent + ids_at);
  if (const auto before = core.DrawnBy(id); before.has_value()) {
    const MicroBatch& drawn = micro_batches_[before->value()];
    embed.drawn = drawn.lane->sampler->drawn(DrawId(drawn));
    if (drawn.lane != batch.lane) DT_RETURN_IF_ERROR(drawn.lane->sampler->LetWait(batch.stream(), DrawId(drawn)));
  }
  embed.x = batch.x->data();
  embed.table_type = model_.type();
  embed.factor = model_.model().config().embedding_scale;
  embed.rows = static_cast<int32_t>(batch.rows);
  embed.size = static_cast<int32_t>(hidden());
  DT_RETURN_IF_ERROR(batch.Enqueue(embed, StartEmbed));
  return ComputeAngles(core.PlanOf(id), reinterpret_cast<const int32_t*>(sent + positions_at), batch);
}

absl::StatusOr<const CudaDense::RopeOnGpu*> CudaDense::RopeFor(int rope, const RopeRun& run) {
  return rope_cache_.Get(rope, run.variant, [&]() -> absl::StatusOr<RopeOnGpu> {
    const model::RopeTable table = model::MakeRopeTable(model_.model().config().ropes[rope], run.length);
    RopeOnGpu made{table.multiplier, nullptr};
    const size_t bytes = table.inv_freq.size() * sizeof(float);
    DT_ASSIGN_OR_RETURN(made.inv_freq, model_.device().Allocate(bytes));
    DT_RETURN_IF_ERROR(stream_.Copy(made.inv_freq->data(), table.inv_freq.data(), bytes));
    DT_RETURN_IF_ERROR(stream_.SynchronizeStatus());  // a new length of a dynamic kind: rare
    return made;
  });
}

absl::Status CudaDense::ComputeAngles(const proto::StepPlan& plan, const int32_t* positions, MicroBatch& batch) {
  for (size_t rope = 0; rope < batch.angles.size(); ++rope) {
    RopeAngles& angles = batch.angles[rope];
    const auto start = [&](const RopeRun& run) -> absl::Status {
      DT_ASSIGN_OR_RETURN(const RopeOnGpu* const frequencies, RopeFor(static_cast<int>(rope), run));
      RopeRecord table;
      table.positions = positions + run.first;
      table.inv_freq = Floats(frequencies->inv_freq);
      table.cos = Floats(angles.cos) + run.first * angles.pairs;
      table.sin = Floats(angles.sin) + run.first * angles.pairs;
      table.multiplier = frequencies->multiplier;
      table.rows = static_cast<int32_t>(run.rows);
      table.count = angles.pairs;
      return batch.Enqueue(table, StartRope);
    };
    DT_RETURN_IF_ERROR(ForEachRopeRun(model_.model().config().ropes[rope], plan, start));
  }
  return absl::OkStatus();
}

}  // namespace dovetail::compute
