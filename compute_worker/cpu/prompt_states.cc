#include "compute_worker/cpu/prompt_states.h"

#include <algorithm>
#include <utility>

namespace dovetail::compute {

using linear_attention::LinearHead;
using linear_attention::PackedState;
using proto::StateBlock;
using proto::StateBlocks;

namespace {

constexpr size_t kMostBlockBytes = size_t{64} << 20;  // of entries that run at once, unless one alone needs more
constexpr size_t kAlignment = 64;

bool Names(const StateBlocks& blocks, int64_t block) {
  return std::any_of(blocks.begin(), blocks.end(), [&](const StateBlock& b) { return b.block == block; });
}

// Of one head before any position: a full block and all but one token of an open one.
int64_t MostBytes(const proto::LinearSpec& spec) {
  return spec.state_bytes() + (kSegmentTokens - 1) * spec.token_bytes();
}

}  // namespace

struct PromptStates::OpView {
  const ComputeWorkerCore& core;
  const MicroBatchId id;
  const int op;
  const LayerGroup group;
  const proto::LinearSpec& spec;
  const proto::SoftmaxSpec& wire_spec;  // the same op as the wire sees it
  const PackedState packed;
  StepWire& wire;
};

bool PromptStates::EntryRun::Holds(int64_t block) const { return Names(before, block) || Names(left, block); }

int64_t PromptStates::EntryRun::Held() const {
  int64_t held = 0;
  for (int64_t block = first_block; block < first_block + blocks; ++block) held += Holds(block);
  return held;
}

PromptStates::EntryRun PromptStates::EntryOf(const proto::StepPlan& plan, const StateEntry& state) {
  const proto::StepEntry& entry = plan.entries[state.entry];
  EntryRun run;
  run.state = &state;
  run.ctx_len = entry.ctx_len;
  run.end = entry.ctx_len + static_cast<Position>(entry.tokens.size());
  run.first_block = linear_attention::FirstBlock(run.ctx_len);
  run.blocks = linear_attention::BlocksTo(run.ctx_len, run.end);
  run.before = proto::StatesBefore(run.ctx_len);
  run.left = proto::StatesLeft(run.ctx_len, run.end);
  run.after = proto::StatesBefore(run.end);
  return run;
}

int64_t PromptStates::SlotBytes(const proto::AttentionTable& table) {
  int64_t bytes = 0;
  for (const LayerGroup group : table.op_group)
    if (const proto::LinearSpec* spec = table.linear(group)) bytes += spec->heads * MostBytes(*spec);
  return bytes;
}

PromptStates::PromptStates(kernels::Device& device, const proto::AttentionTable& table, int micro_batches)
    : device_(device), table_(table), heads_of_op_(device), for_next_rank_(micro_batches) {
  for (int g = 0; g < table.group_count(); ++g) {
    const proto::LinearSpec* spec = table.linear(LayerGroup(static_cast<uint16_t>(g)));
    specs_.push_back(spec != nullptr ? *spec : proto::LinearSpec());
    specs_.back().blocks_per_head = 1;
  }
  for (const LayerGroup group : table.op_group) {
    slot_at_.push_back(slot_bytes_);
    if (const proto::LinearSpec* spec = table.linear(group)) slot_bytes_ += spec->heads * MostBytes(*spec);
  }
}

absl::Status PromptStates::Grow(std::unique_ptr<kernels::Buffer>& buffer, size_t bytes) {
  if (buffer != nullptr && buffer->size_bytes() >= bytes) return absl::OkStatus();
  buffer.reset();
  DT_ASSIGN_OR_RETURN(buffer, device_.Allocate(bytes + bytes / 4));
  return absl::OkStatus();
}

size_t PromptStates::BlockBytes(const proto::LinearSpec& spec) const {
  const size_t bytes = kernels::LinearStateLayout(linear_attention::ShapeOf(spec)).bytes();
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

size_t PromptStates::EndOfWave(const ComputeWorkerCore& core, MicroBatchId id, const proto::LinearSpec& spec,
                               size_t first) const {
  const std::vector<StateEntry>& states = core.StatesOf(id);
  size_t bytes = 0, end = first;
  for (; end < states.size(); ++end) {
    bytes += EntryOf(core.PlanOf(id), states[end]).Held() * spec.heads * BlockBytes(spec);
    if (end > first && bytes > kMostBlockBytes) break;
  }
  return end;
}

absl::Status PromptStates::GrowSlots(const ComputeWorkerCore& core, MicroBatchId id) {
  for (const StateEntry& state : core.StatesOf(id)) {
    if (state.slot == StateSlots::kNone) continue;
    if (slots_.size() <= static_cast<size_t>(state.slot)) slots_.resize(state.slot + 1);
    if (slots_[state.slot] != nullptr) continue;
    DT_ASSIGN_OR_RETURN(slots_[state.slot], device_.Allocate(slot_bytes_));
  }
  return absl::OkStatus();
}

absl::Status PromptStates::Prepare(const ComputeWorkerCore& core, MicroBatchId id) {
  const std::vector<StateEntry>& states = core.StatesOf(id);
  if (states.empty() || states[0].switched) return absl::OkStatus();  // SwitchStates runs these
  runs_.reserve(states.size());
  DT_RETURN_IF_ERROR(GrowSlots(core, id));
  for (int g = 0; g < table_.group_count(); ++g) {
    const proto::LinearSpec* spec = table_.linear(LayerGroup(static_cast<uint16_t>(g)));
    if (spec == nullptr) continue;
    for (size_t first = 0; first < states.size();) {
      const size_t end = EndOfWave(core, id, *spec, first);
      linear_attention::LinearHeads::Limits limits;
      size_t pieces = 0, blocks = 0;
      for (; first < end; ++first) {
        const EntryRun run = EntryOf(core.PlanOf(id), states[first]);
        limits.heads += spec->heads;
        limits.rows += spec->heads * (run.end - run.ctx_len);
        if (run.blocks > 2) limits.unkept += spec->heads;
        pieces += spec->heads * run.blocks;
        blocks += spec->heads * run.Held();
      }
      heads_.reserve(limits.heads);
      pieces_.reserve(pieces);
      DT_RETURN_IF_ERROR(heads_of_op_.Prepare(*spec, limits));
      DT_RETURN_IF_ERROR(Grow(blocks_, blocks * BlockBytes(*spec)));
    }
  }
  return absl::OkStatus();
}

// Its heads, and memory for its blocks.
void PromptStates::AddEntry(const OpView& view, const StateEntry& state) {
  const proto::LinearSpec& spec = view.spec;
  EntryRun run = EntryOf(view.core.PlanOf(view.id), state);
  run.pieces = pieces_.size();
  size_t next = 0;  // block in blocks_
  for (const EntryRun& before : runs_) next += before.Held() * spec.heads;
  const size_t block_bytes = BlockBytes(spec), element = SizeOf(spec.wire);
  const int64_t row = view.wire.row_begin(state.entry);
  const size_t key_bytes = spec.key_dim * element, value_bytes = spec.value_dim * element;
  for (int h = 0; h < spec.heads; ++h) {
    LinearHead head;
    head.head = h;
    head.first_position = run.ctx_len;
    head.rows = static_cast<int>(run.end - run.ctx_len);
    head.q_step = head.k_step = static_cast<int64_t>(spec.heads * key_bytes);
    head.v_step = head.o_step = static_cast<int64_t>(spec.heads * value_bytes);
    head.gate_step = int64_t{spec.heads} * spec.gates();
    head.q = view.wire.query() + row * head.q_step + h * key_bytes;
    head.k = view.wire.key(view.op) + row * head.k_step + h * key_bytes;
    head.v = view.wire.value(view.op) + row * head.v_step + h * value_bytes;
    head.o = view.wire.joined(state.entry, view.group) + h * value_bytes;
    if (spec.gates() > 0) head.gates = view.wire.gates(view.op) + row * head.gate_step + int64_t{h} * spec.gates();
    head.pieces = pieces_.data() + pieces_.size();
    head.first_block = run.first_block;
    head.blocks = run.blocks;
    for (int64_t block = run.first_block; block < run.first_block + run.blocks; ++block)
      pieces_.push_back(run.Holds(block) ? blocks_->data() + next++ * block_bytes : nullptr);
    heads_.push_back(head);
  }
  runs_.push_back(std::move(run));
}

std::byte* PromptStates::SlotAt(int slot, int op, int64_t head_bytes, int head) const {
  return slots_[slot]->data() + slot_at_[op] + head * head_bytes;
}

const std::byte* PromptStates::Unpack(const OpView& view, const EntryRun& run, int head, const std::byte* from) {
  std::byte** const pieces = pieces_.data() + run.pieces + head * run.blocks;
  for (const StateBlock& block : run.before)
    from = view.packed.Unpack(block.tokens, from, pieces + (block.block - run.first_block));
  return from;
}

std::byte* PromptStates::Pack(const OpView& view, const EntryRun& run, int head, const StateBlocks& blocks,
                              std::byte* to) {
  std::byte** const pieces = pieces_.data() + run.pieces + head * run.blocks;
  for (const StateBlock& block : blocks)
    to = view.packed.Pack(block.tokens, pieces + (block.block - run.first_block), to);
  return to;
}

// From the rank before, from the slot, or as the attention workers gave it.
void PromptStates::LoadBefore(const OpView& view, const EntryRun& run) {
  if (run.before.empty()) return;
  if (run.state->chained) {
    const std::byte* from = view.core.RankState(view.id, view.op).data();
    for (int head = 0; head < view.spec.heads; ++head) from = Unpack(view, run, head, from);
    return;
  }
  if (run.state->held) {
    const int64_t head_bytes = proto::BytesOf(run.before, view.wire_spec);
    for (int head = 0; head < view.spec.heads; ++head)
      Unpack(view, run, head, SlotAt(run.state->slot, view.op, head_bytes, head));
    return;
  }
  for (const WorkerPart& part : view.core.PartsOf(view.id))
    for (const proto::ShardStep& item : part.layouts[view.group.value()].items) {
      if (item.entry != run.state->entry || item.states != proto::StateExchange::kFetch) continue;
      const std::byte* from = part.partial.data() + item.before_offset;
      for (int head = item.kv_heads.begin; head < item.kv_heads.end; ++head) from = Unpack(view, run, head, from);
    }
}

// For the attention workers, for the next rank, and for the next part of the prompt.
void PromptStates::LeaveStates(const OpView& view, const EntryRun& run) {
  const std::vector<WorkerPart>& parts = view.core.PartsOf(view.id);
  for (size_t p = 0; p < parts.size(); ++p)
    for (const proto::ShardStep& item : parts[p].layouts[view.group.value()].items) {
      if (item.entry != run.state->entry || item.states == proto::StateExchange::kTokens) continue;
      std::byte* to = view.wire.part_key_value(static_cast<int>(p), view.op) + item.state_offset;
      for (int head = item.kv_heads.begin; head < item.kv_heads.end; ++head) to = Pack(view, run, head, run.left, to);
    }
  if (run.state->passed_on) {
    std::vector<std::byte>& state = for_next_rank_[view.id.value()];
    state.resize(static_cast<size_t>(view.spec.heads * proto::BytesOf(run.after, view.wire_spec)));
    std::byte* to = state.data();
    for (int head = 0; head < view.spec.heads; ++head) to = Pack(view, run, head, run.after, to);
  }
  if (run.state->slot == StateSlots::kNone) return;
  const int64_t head_bytes = proto::BytesOf(run.after, view.wire_spec);
  for (int head = 0; head < view.spec.heads; ++head)
    Pack(view, run, head, run.after, SlotAt(run.state->slot, view.op, head_bytes, head));
}

std::vector<std::byte> PromptStates::TakeRankState(MicroBatchId id) {
  return std::exchange(for_next_rank_[id.value()], {});
}

absl::Status PromptStates::Run(const ComputeWorkerCore& core, MicroBatchId id, int op, StepWire& wire,
                               const kernels::OpContext& context) {
  const LayerGroup group = table_.op_group[op];
  const proto::LinearSpec& spec = specs_[group.value()];
  const size_t block_bytes = BlockBytes(spec);
  const OpView view{core, id, op, group, spec, table_.softmax(group), PackedState(spec, block_bytes), wire};
  const std::vector<StateEntry>& states = core.StatesOf(id);
  for (size_t first = 0; first < states.size();) {
    const size_t end = EndOfWave(core, id, spec, first);
    runs_.clear();
    heads_.clear();
    pieces_.clear();
    for (; first < end; ++first) AddEntry(view, states[first]);
    for (const EntryRun& run : runs_) LoadBefore(view, run);
    DT_RETURN_IF_ERROR(heads_of_op_.Run(context, spec, table_.constants[op], heads_, block_bytes));
    for (const EntryRun& run : runs_) LeaveStates(view, run);
  }
  return absl::OkStatus();
}

}  // namespace dovetail::compute
