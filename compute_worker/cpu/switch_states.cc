#include "compute_worker/cpu/switch_states.h"

#include <algorithm>
#include <cstring>

#include "proto/state_blocks.h"

namespace dovetail::compute {

using linear_attention::LinearHead;
using linear_attention::PackedState;
using proto::HeadRange;
using proto::StateBlock;
using proto::StateBlocks;
using proto::TokenRange;

namespace {

constexpr size_t kAlignment = 64;

HeadRange OwnHeads(const proto::StepPlan& plan, const proto::LinearSpec& spec) {
  return proto::HeadsOfRank(spec.heads, plan.part.rank, plan.part.ranks);
}

bool Names(const StateBlocks& blocks, int64_t block) {
  return std::any_of(blocks.begin(), blocks.end(), [&](const StateBlock& b) { return b.block == block; });
}

// Bytes of a token and head.
struct RowBytes {
  explicit RowBytes(const proto::LinearSpec& spec)
      : key(spec.key_dim * static_cast<int64_t>(SizeOf(spec.wire))),
        value(spec.value_dim * static_cast<int64_t>(SizeOf(spec.wire))),
        gates(spec.gates() * static_cast<int64_t>(sizeof(float))) {}
  int64_t key, value, gates;
};

// `rows` rows of some heads of a tensor [rows][all heads][bytes] to one of `heads` heads, or back.
void CopyOut(const std::byte* tensor, int64_t all_heads, const HeadRange& heads, int64_t bytes, int64_t rows,
             std::byte* to) {
  for (int64_t row = 0; row < rows; ++row, to += heads.size() * bytes)
    std::memcpy(to, tensor + (row * all_heads + heads.begin) * bytes, static_cast<size_t>(heads.size() * bytes));
}
void CopyIn(const std::byte* from, int64_t all_heads, const HeadRange& heads, int64_t bytes, int64_t rows,
            std::byte* tensor) {
  for (int64_t row = 0; row < rows; ++row, from += heads.size() * bytes)
    std::memcpy(tensor + (row * all_heads + heads.begin) * bytes, from, static_cast<size_t>(heads.size() * bytes));
}

}  // namespace

struct SwitchStates::OpView {
  const ComputeWorkerCore& core;
  const MicroBatchId id;
  const int op;
  const LayerGroup group;
  const proto::StepPlan& plan;
  const proto::LinearSpec& spec;
  const proto::SoftmaxSpec& wire_spec;  // the same op as the wire sees it
  const PackedState packed;
  StepWire& wire;

  int64_t BytesOf(const StateBlocks& blocks) const { return proto::BytesOf(blocks, wire_spec); }  // of a head

  // Calls visit(head, bytes) for each of these heads with where its states lie in what goes to attention workers.
  template <typename Visit>
  void ForEachLeft(const HeadRange& heads, int64_t head_bytes, Visit&& visit) const {
    const std::vector<WorkerPart>& parts = core.PartsOf(id);
    for (size_t p = 0; p < parts.size(); ++p)
      for (const proto::ShardStep& item : parts[p].layouts[group.value()].items) {
        std::byte* const at = wire.part_key_value(static_cast<int>(p), op) + item.state_offset;
        for (int head = std::max(heads.begin, item.kv_heads.begin); head < std::min(heads.end, item.kv_heads.end);
             ++head)
          visit(head, at + (head - item.kv_heads.begin) * head_bytes);
      }
  }
};

// One rank's tokens at one op.
struct SwitchStates::TokenRun {
  TokenRun(const proto::StepPlan& plan, int of_rank, const HeadRange& own)
      : rank(of_rank),
        tokens(proto::TokensOfRank(plan, of_rank)),
        heads(own),
        first_block(linear_attention::FirstBlock(tokens.begin)),
        blocks(linear_attention::BlocksTo(tokens.begin, tokens.end)),
        before(proto::StatesBefore(tokens.begin)),
        left(proto::StatesLeft(tokens.begin, tokens.end)),
        after(proto::StatesBefore(tokens.end)) {}

  int rank;
  TokenRange tokens;
  HeadRange heads;
  int64_t first_block, blocks;
  StateBlocks before, left, after;

  int64_t rows() const { return tokens.end - tokens.begin; }
  bool Holds(int64_t block) const { return Names(before, block) || Names(left, block); }
  int64_t Held() const {
    int64_t held = 0;
    for (int64_t block = first_block; block < first_block + blocks; ++block) held += Holds(block);
    return held;
  }
};

SwitchStates::SwitchStates(kernels::Device& device, const proto::AttentionTable& table, int micro_batches)
    : device_(device), table_(table), heads_of_op_(device), micro_batches_(micro_batches) {
  for (int g = 0; g < table.group_count(); ++g) {
    const proto::LinearSpec* spec = table.linear(LayerGroup(static_cast<uint16_t>(g)));
    specs_.push_back(spec != nullptr ? *spec : proto::LinearSpec());
    specs_.back().blocks_per_head = 1;
  }
}

SwitchStates::OpView SwitchStates::ViewOf(const ComputeWorkerCore& core, MicroBatchId id, int op,
                                          StepWire& wire) const {
  const LayerGroup group = table_.op_group[op];
  const proto::LinearSpec& spec = specs_[group.value()];
  return {core, id, op, group, core.PlanOf(id), spec, table_.softmax(group), PackedState(spec, BlockBytes(spec)), wire};
}

size_t SwitchStates::BlockBytes(const proto::LinearSpec& spec) const {
  const size_t bytes = kernels::LinearStateLayout(linear_attention::ShapeOf(spec)).bytes();
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

absl::Status SwitchStates::Prepare(const ComputeWorkerCore& core, MicroBatchId id) {
  const std::vector<StateEntry>& states = core.StatesOf(id);
  if (states.empty() || !states[0].switched) return absl::OkStatus();
  const proto::StepPlan& plan = core.PlanOf(id);
  size_t bytes = 0;
  for (int g = 0; g < table_.group_count(); ++g) {
    const proto::LinearSpec* const spec = table_.linear(LayerGroup(static_cast<uint16_t>(g)));
    if (spec == nullptr) continue;
    const HeadRange own = OwnHeads(plan, *spec);
    const auto heads = static_cast<size_t>(own.size());
    for (int rank = 0; rank < plan.part.ranks; ++rank) {
      const TokenRun run(plan, rank, own);
      heads_.reserve(heads);
      pieces_.reserve(heads * static_cast<size_t>(run.blocks));
      DT_RETURN_IF_ERROR(heads_of_op_.Prepare(
          specs_[g], {.heads = heads, .rows = own.size() * run.rows(), .unkept = run.blocks > 2 ? heads : 0}));
      bytes = std::max(bytes, heads * static_cast<size_t>(run.Held()) * BlockBytes(specs_[g]));
    }
  }
  if (blocks_ != nullptr && blocks_->size_bytes() >= bytes) return absl::OkStatus();
  blocks_.reset();
  DT_ASSIGN_OR_RETURN(blocks_, device_.Allocate(bytes + bytes / 4));
  return absl::OkStatus();
}

// The states before the group, as an attention worker gave them to rank 0.
void SwitchStates::TakeBefore(const OpView& view, const HeadRange& heads, std::vector<std::byte>& carried) const {
  const int64_t head_bytes = view.BytesOf(proto::StatesBefore(view.plan.part.base));
  carried.resize(static_cast<size_t>(heads.size() * head_bytes));
  if (carried.empty()) return;
  for (const WorkerPart& part : view.core.PartsOf(view.id))
    for (const proto::ShardStep& item : part.layouts[view.group.value()].items) {
      if (item.states != proto::StateExchange::kFetch) continue;
      const HeadRange both{std::max(heads.begin, item.kv_heads.begin), std::min(heads.end, item.kv_heads.end)};
      if (both.begin >= both.end) continue;
      std::memcpy(carried.data() + (both.begin - heads.begin) * head_bytes,
                  part.partial.data() + item.before_offset + (both.begin - item.kv_heads.begin) * head_bytes,
                  static_cast<size_t>(both.size() * head_bytes));
    }
}

std::vector<std::byte> SwitchStates::Pack(const ComputeWorkerCore& core, MicroBatchId id, int op,
                                          const HeadRange& heads, StepWire& wire) const {
  const OpView view = ViewOf(core, id, op, wire);
  const RowBytes row(view.spec);
  const TokenRange tokens = proto::TokensOfRank(view.plan, view.plan.part.rank);
  const int64_t rows = tokens.end - tokens.begin, all = view.spec.heads;
  std::vector<std::byte> before;
  if (view.plan.part.rank == 0) TakeBefore(view, heads, before);
  std::vector<std::byte> packed(
      static_cast<size_t>(proto::LinearRowsBytes(view.wire_spec, tokens, view.plan.part.rank, heads.size())));
  std::byte* to = packed.data();
  const auto add = [&](const std::byte* tensor, int64_t bytes) {
    CopyOut(tensor, all, heads, bytes, rows, to);
    to += rows * heads.size() * bytes;
  };
  if (row.gates > 0) add(reinterpret_cast<const std::byte*>(wire.gates(op)), row.gates);
  add(wire.query(), row.key);
  add(wire.key(op), row.key);
  add(wire.value(op), row.value);
  if (!before.empty()) std::memcpy(to, before.data(), before.size());
  return packed;
}

// q, k, v and gates of the rank's tokens, where they lie, and memory for the blocks that they need and leave.
void SwitchStates::AddHeads(const OpView& view, const TokenRun& run, MicroBatch& batch) {
  const RowBytes row(view.spec);
  const bool own = run.rank == view.plan.part.rank;
  const int64_t count = run.heads.size(), all = own ? view.spec.heads : count, first = own ? run.heads.begin : 0;
  const std::byte* const sent = own ? nullptr : view.core.RankHeads(view.id, view.op, run.rank).data();
  const std::byte* const gates =
      own ? (row.gates > 0 ? reinterpret_cast<const std::byte*>(view.wire.gates(view.op)) : nullptr) : sent;
  const std::byte* const q = own ? view.wire.query() : sent + run.rows() * count * row.gates;
  const std::byte* const k = own ? view.wire.key(view.op) : q + run.rows() * count * row.key;
  const std::byte* const v = own ? view.wire.value(view.op) : k + run.rows() * count * row.key;
  std::byte* const o = own ? view.wire.joined(0, view.group) : batch.outputs.data();
  size_t next = 0;
  for (int64_t h = 0; h < count; ++h) {
    LinearHead head;
    head.head = run.heads.begin + static_cast<int>(h);
    head.first_position = run.tokens.begin;
    head.rows = static_cast<int>(run.rows());
    head.q_step = head.k_step = all * row.key;
    head.v_step = head.o_step = all * row.value;
    head.gate_step = all * view.spec.gates();
    head.q = q + (first + h) * row.key;
    head.k = k + (first + h) * row.key;
    head.v = v + (first + h) * row.value;
    head.o = o + (first + h) * row.value;
    if (row.gates > 0) head.gates = reinterpret_cast<const float*>(gates + (first + h) * row.gates);
    head.pieces = pieces_.data() + pieces_.size();
    head.first_block = run.first_block;
    head.blocks = run.blocks;
    for (int64_t block = run.first_block; block < run.first_block + run.blocks; ++block)
      pieces_.push_back(run.Holds(block) ? blocks_->data() + next++ * BlockBytes(view.spec) : nullptr);
    heads_.push_back(head);
  }
}

void SwitchStates::Load(const OpView& view, const TokenRun& run, const std::vector<std::byte>& carried) {
  const std::byte* from = carried.data();
  for (int64_t head = 0; head < run.heads.size(); ++head)
    for (const StateBlock& block : run.before)
      from = view.packed.Unpack(block.tokens, from, pieces_.data() + head * run.blocks + block.block - run.first_block);
}

// For the rank whose tokens they are, or the attention workers; and for the next rank's tokens.
void SwitchStates::Leave(const OpView& view, const TokenRun& run, MicroBatch& batch) {
  const auto pack = [&](int64_t head, const StateBlocks& blocks, std::byte* to) {
    for (const StateBlock& block : blocks)
      to = view.packed.Pack(block.tokens, pieces_.data() + head * run.blocks + block.block - run.first_block, to);
    return to;
  };
  if (run.rank == view.plan.part.rank) {
    view.ForEachLeft(run.heads, view.BytesOf(run.left),
                     [&](int head, std::byte* to) { pack(head - run.heads.begin, run.left, to); });
  } else {
    std::byte* to = batch.outputs.data() + run.rows() * run.heads.size() * RowBytes(view.spec).value;
    for (int64_t head = 0; head < run.heads.size(); ++head) to = pack(head, run.left, to);
  }
  if (run.rank + 1 == view.plan.part.ranks) return;
  batch.carried.resize(static_cast<size_t>(run.heads.size() * view.BytesOf(run.after)));
  std::byte* to = batch.carried.data();
  for (int64_t head = 0; head < run.heads.size(); ++head) to = pack(head, run.after, to);
}

absl::Status SwitchStates::Run(const ComputeWorkerCore& core, const AttendHeads& attend, StepWire& wire,
                               const kernels::OpContext& context) {
  const OpView view = ViewOf(core, attend.micro_batch, attend.op, wire);
  const TokenRun run(view.plan, attend.rank, OwnHeads(view.plan, view.spec));
  MicroBatch& batch = micro_batches_[attend.micro_batch.value()];
  const bool own = attend.rank == view.plan.part.rank;
  batch.outputs.clear();
  if (!own)
    batch.outputs.resize(static_cast<size_t>(proto::LinearOutputBytes(view.wire_spec, run.tokens, run.heads.size())));
  if (attend.rank == 0 && own) TakeBefore(view, run.heads, batch.carried);
  if (attend.rank == 0 && !own) {
    const std::span<const std::byte> sent = core.RankHeads(attend.micro_batch, attend.op, 0);
    const auto before = sent.last(static_cast<size_t>(run.heads.size() * view.BytesOf(run.before)));
    batch.carried.assign(before.begin(), before.end());
  }
  heads_.clear();
  pieces_.clear();
  AddHeads(view, run, batch);
  Load(view, run, batch.carried);
  DT_RETURN_IF_ERROR(heads_of_op_.Run(context, view.spec, table_.constants[attend.op], heads_, BlockBytes(view.spec)));
  Leave(view, run, batch);
  return absl::OkStatus();
}

void SwitchStates::Place(const ComputeWorkerCore& core, const PlaceRankOutputs& place, StepWire& wire) const {
  const OpView view = ViewOf(core, place.micro_batch, place.op, wire);
  const RowBytes row(view.spec);
  const HeadRange heads = proto::HeadsOfRank(view.spec.heads, place.rank, view.plan.part.ranks);
  const TokenRange tokens = proto::TokensOfRank(view.plan, view.plan.part.rank);
  const int64_t rows = tokens.end - tokens.begin;
  const std::byte* const outputs = place.outputs.bytes.data();
  CopyIn(outputs, view.spec.heads, heads, row.value, rows, wire.joined(0, view.group));
  const int64_t head_bytes = view.BytesOf(proto::StatesLeft(tokens.begin, tokens.end));
  const std::byte* const states = outputs + rows * heads.size() * row.value;
  view.ForEachLeft(heads, head_bytes, [&](int head, std::byte* to) {
    std::memcpy(to, states + (head - heads.begin) * head_bytes, static_cast<size_t>(head_bytes));
  });
}

}  // namespace dovetail::compute
