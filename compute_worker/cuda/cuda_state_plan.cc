#include "compute_worker/cuda/cuda_state_plan.h"

#include <algorithm>

#include "compute_worker/cuda/cuda_hybrid.h"
#include "compute_worker/cuda/wire_element.h"
#include "kernels/cuda/state/cuda_state.h"
#include "kernels/cuda/state/state_pack.h"
#include "linear_attention/linear_heads.h"

namespace dovetail::compute {

using kernels::cuda::StateItem;
using kernels::cuda::StateLaunch;
using kernels::cuda::StateSection;
using kernels::cuda::WireType;
using proto::StateBlock;
using proto::StateBlocks;

namespace {

constexpr int64_t kAlignment = 256;

int64_t EndOf(const StateSection& section) { return section.offset + int64_t{section.rows} * section.row_bytes; }

bool Names(const StateBlocks& blocks, int64_t block) {
  return std::any_of(blocks.begin(), blocks.end(), [&](const StateBlock& b) { return b.block == block; });
}

}  // namespace

absl::StatusOr<StateShapeOnGpu> StateShapeOnGpu::Of(const proto::LinearSpec& spec) {
  if (spec.wire == DType::kF32)
    return Unimplemented("linear-attention states with float32 on the wire: GPUs take bfloat16 or float16");
  const kernels::LinearStateShape shape = linear_attention::ShapeOf(spec);
  DT_RETURN_IF_ERROR(shape.Validate());
  StateShapeOnGpu out;
  // That of a CPU takes more.
  DT_ASSIGN_OR_RETURN(out.launch, kernels::cuda::StateLaunchFor(shape, kernels::LinearStateLayout(shape).bytes(),
                                                                static_cast<WireType>(spec.wire)));
  StateLaunch& launch = out.launch;
  launch.even = 1;
  launch.token_decay = spec.token_decay;
  launch.token_rate = spec.token_rate;
  launch.gates = spec.gates();
  launch.normalise = spec.normalise;
  launch.query_scale = spec.query_scale;
  launch.conv_width = spec.conv_width;
  launch.conv_linear = spec.conv_linear;
  launch.model_heads = launch.heads = spec.heads;
  const kernels::cuda::StateLayout& layout = launch.layout;
  for (const StateSection* section :
       {&layout.state, &layout.keys, &layout.values, &layout.decays, &layout.history, &layout.midway})
    out.block_bytes = std::max(out.block_bytes, EndOf(*section));
  out.block_bytes = (out.block_bytes + kAlignment - 1) / kAlignment * kAlignment;
  launch.step = out.block_bytes;
  out.pack = kernels::cuda::StatePackFor(launch);
  return out;
}

// One group of one step.
struct StatePlan::Builder {
  StatePlan& plan;
  const ComputeWorkerCore& core;
  const MicroBatchId id;
  const LayerGroup group;
  const StateShapeOnGpu& shape;
  const proto::LinearSpec& spec;
  const StepWire& wire;
  int64_t next_block = 0;  // offset, in the wave

  // One entry, and where its blocks lie.
  struct Run {
    const StateEntry& state;
    Position ctx_len = 0, end = 0;
    int64_t first_block = 0, blocks = 0;
    StateBlocks before, left, after;
    std::vector<int64_t> at;  // by block from first_block on: offset of its first head, or kNotKept
    bool Holds(int64_t block) const { return Names(before, block) || Names(left, block); }
  };

  Run RunOf(const StateEntry& state) const {
    const proto::StepEntry& entry = core.PlanOf(id).entries[state.entry];
    Run run{state};
    run.ctx_len = entry.ctx_len;
    run.end = entry.ctx_len + static_cast<Position>(entry.tokens.size());
    run.first_block = linear_attention::FirstBlock(run.ctx_len);
    run.blocks = linear_attention::BlocksTo(run.ctx_len, run.end);
    run.before = proto::StatesBefore(run.ctx_len);
    run.left = proto::StatesLeft(run.ctx_len, run.end);
    run.after = proto::StatesBefore(run.end);
    return run;
  }
  int64_t BytesOf(const Run& run) const {
    int64_t held = 0;
    for (int64_t block = run.first_block; block < run.first_block + run.blocks; ++block) held += run.Holds(block);
    return held * spec.heads * shape.block_bytes;
  }
  int64_t PackedBytes(const StateBlocks& blocks) const { return proto::BytesOf(blocks, core.table().softmax(group)); }

  // A job for each block of each of these heads; `at` is where the first packed one lies.
  Jobs AddJobs(const Run& run, const StateBlocks& blocks, const proto::HeadRange& heads, int64_t at) {
    Jobs added{static_cast<int64_t>(plan.jobs.size()), 0};
    for (int head = heads.begin; head < heads.end; ++head)
      for (const StateBlock& block : blocks) {
        plan.jobs.push_back({nullptr, at, block.tokens, 0});
        plan.job_blocks.push_back(run.at[block.block - run.first_block] + head * shape.block_bytes);
        at += PackedBytes({block});
        ++added.count;
      }
    return added;
  }

  void AddItem(const Run& run, Wave& wave) {
    const int64_t row = wire.row_begin(run.state.entry), rows = wire.rows(), heads = spec.heads;
    const int64_t key = heads * spec.key_dim * kElement, value = heads * spec.value_dim * kElement;
    StateItem& item = plan.items.emplace_back();
    item.query_offset = item.key_offset = row * key;
    item.value_offset = rows * key + row * value;
    item.gate_offset = CudaHybrid::GatesAt(core.table().softmax(group), rows) +
                       row * heads * spec.gates() * static_cast<int64_t>(sizeof(float));
    item.out_offset = row * value;
    item.first_position = run.ctx_len;
    item.table = static_cast<int64_t>(plan.blocks.size());
    item.first_block = run.first_block;
    item.rows = static_cast<int32_t>(run.end - run.ctx_len);
    item.heads = spec.heads;
    plan.blocks.insert(plan.blocks.end(), run.at.begin(), run.at.end());
    const auto index = static_cast<int32_t>(plan.items.size() - 1 - wave.first_item);
    for (int head = 0; head < spec.heads; ++head) plan.units.push_back({index, head});
    wave.units += spec.heads;
    const int64_t chunks = (run.end - 1) / kSegmentTokens - run.ctx_len / kSegmentTokens + 1;
    wave.most_chunks = std::max(wave.most_chunks, static_cast<int32_t>(chunks));
  }

  void AddEntry(const StateEntry& state, Wave& wave) {
    Run run = RunOf(state);
    for (int64_t block = run.first_block; block < run.first_block + run.blocks; ++block) {
      const bool holds = run.Holds(block);
      run.at.push_back(holds ? next_block : kNotKept);
      if (holds) next_block += spec.heads * shape.block_bytes;
    }
    plan.block_bytes = std::max(plan.block_bytes, next_block);
    AddItem(run, wave);
    const proto::HeadRange all{0, spec.heads};
    Entry& entry = wave.entries.emplace_back();
    entry.state = state;
    if (state.held || state.chained) {
      entry.before = AddJobs(run, run.before, all, 0);
      entry.before_bytes = spec.heads * PackedBytes(run.before);
    }
    if (state.passed_on || state.slot != StateSlots::kNone) {
      entry.after = AddJobs(run, run.after, all, 0);
      entry.after_bytes = spec.heads * PackedBytes(run.after);
    }
    runs.push_back(std::move(run));
  }

  // Those of a wave lie behind one another, so that a launch takes them all.
  void AddCrossings(Wave& wave) {
    const auto each = [&](bool fetch, Jobs& jobs, std::vector<Crossing>& crossings, int64_t& bytes) {
      jobs.first = static_cast<int64_t>(plan.jobs.size());
      const std::vector<WorkerPart>& parts = core.PartsOf(id);
      for (const Run& run : runs)
        for (size_t p = 0; p < parts.size(); ++p) {
          const std::vector<proto::ShardStep>& items = parts[p].layouts[group.value()].items;
          for (size_t i = 0; i < items.size(); ++i) {
            if (items[i].entry != run.state.entry || items[i].states == proto::StateExchange::kTokens) continue;
            if (fetch && items[i].states != proto::StateExchange::kFetch) continue;
            const StateBlocks& blocks = fetch ? run.before : run.left;
            Crossing crossing{static_cast<int>(p), static_cast<int>(i), bytes, 0};
            crossing.bytes = items[i].kv_heads.size() * PackedBytes(blocks);
            jobs.count += AddJobs(run, blocks, items[i].kv_heads, bytes).count;
            bytes += (crossing.bytes + kAlignment - 1) / kAlignment * kAlignment;
            crossings.push_back(crossing);
          }
        }
    };
    each(/*fetch=*/true, wave.fetched, wave.fetches, wave.arriving_bytes);
    each(/*fetch=*/false, wave.left, wave.leaves, wave.leaving_bytes);
  }

  void Build(int64_t most_bytes) {
    const std::vector<StateEntry>& states = core.StatesOf(id);
    for (size_t first = 0; first < states.size();) {
      Wave& wave = plan.waves.emplace_back();
      wave.first_item = static_cast<int64_t>(plan.items.size());
      wave.first_unit = static_cast<int64_t>(plan.units.size());
      next_block = 0;
      runs.clear();
      do {
        AddEntry(states[first++], wave);
      } while (first < states.size() && next_block + BytesOf(RunOf(states[first])) <= most_bytes);
      AddCrossings(wave);
    }
  }

  std::vector<Run> runs;  // of the wave
};

void StatePlan::Make(const ComputeWorkerCore& core, MicroBatchId id, LayerGroup group, const StateShapeOnGpu& shape,
                     const StepWire& wire, int64_t most_bytes) {
  *this = StatePlan();
  Builder builder{*this, core, id, group, shape, *core.table().linear(group), wire};
  builder.Build(most_bytes);
}

}  // namespace dovetail::compute
