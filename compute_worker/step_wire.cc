#include "compute_worker/step_wire.h"

#include <algorithm>
#include <cstring>

namespace dovetail::compute {
namespace {

// Copies rows of `heads` heads between a full tensor (row stride `full_heads`) and a dense part of it.
struct HeadSlice {
  int64_t rows = 0;
  int64_t full_row_bytes = 0;  // of the full tensor
  int64_t offset_bytes = 0;    // of the slice in a row
  int64_t slice_bytes = 0;     // of the slice in a row
};

void CopyOut(const std::byte* full, std::byte* part, const HeadSlice& s) {
  for (int64_t row = 0; row < s.rows; ++row)
    std::memcpy(part + row * s.slice_bytes, full + row * s.full_row_bytes + s.offset_bytes, s.slice_bytes);
}

void CopyIn(const std::byte* part, std::byte* full, const HeadSlice& s) {
  for (int64_t row = 0; row < s.rows; ++row)
    std::memcpy(full + row * s.full_row_bytes + s.offset_bytes, part + row * s.slice_bytes, s.slice_bytes);
}

HeadSlice SliceOf(int64_t rows, int64_t heads, int64_t first, int64_t count, int64_t head_bytes) {
  return HeadSlice{rows, heads * head_bytes, first * head_bytes, count * head_bytes};
}

}  // namespace

absl::Status StepWire::Grow(SharedBuffer& buffer, size_t bytes) {
  if (buffer != nullptr && buffer->size_bytes() >= bytes) return absl::OkStatus();
  buffer.reset();
  DT_ASSIGN_OR_RETURN(buffer, device_.Allocate(bytes + bytes / 4));
  return absl::OkStatus();
}

int64_t StepWire::KeyBytes(LayerGroup group) const {
  const proto::SoftmaxSpec& spec = table_.softmax(group);
  return rows_ * spec.kv_heads * spec.key_dim * static_cast<int64_t>(SizeOf(spec.kv));
}

int64_t StepWire::GatesAt(LayerGroup group) const {
  const proto::SoftmaxSpec& spec = table_.softmax(group);
  const int64_t values = rows_ * spec.kv_heads * spec.value_dim * static_cast<int64_t>(SizeOf(spec.kv));
  return (KeyBytes(group) + values + 3) / 4 * 4;
}

absl::Status StepWire::GrowSlots(std::vector<SharedBuffer>& buffers, size_t bytes) {
  if (buffers.size() < static_cast<size_t>(slots_)) buffers.resize(slots_);
  for (int slot = 0; slot < slots_; ++slot) DT_RETURN_IF_ERROR(Grow(buffers[slot], bytes));
  return absl::OkStatus();
}

std::byte* StepWire::joined(int entry, LayerGroup group) {
  const proto::SoftmaxSpec& spec = table_.softmax(group);
  return joined_->data() + row_begin_[entry] * spec.query_heads * spec.value_dim * SizeOf(spec.kv);
}

absl::Status StepWire::Prepare(const ComputeWorkerCore& core, MicroBatchId id) {
  const proto::StepPlan& plan = core.PlanOf(id);
  const std::vector<WorkerPart>& parts = core.PartsOf(id);
  rows_ = 0;
  row_begin_.clear();
  for (const proto::StepEntry& entry : plan.entries) {
    row_begin_.push_back(rows_);
    rows_ += static_cast<int64_t>(entry.tokens.size());
  }
  groups_.resize(table_.group_count());
  const bool local = !core.PromptsOf(id).empty();
  slots_ = local || !core.StatesOf(id).empty() ? core.options().key_values_in_flight : 1;
  size_t query = 0, key_value = 0, joined = 0;
  for (int g = 0; g < table_.group_count(); ++g) {
    const LayerGroup group(static_cast<uint16_t>(g));
    const proto::SoftmaxSpec& spec = table_.softmax(group);
    const size_t row_elements = rows_ * SizeOf(spec.kv);
    query = std::max(query, row_elements * spec.query_heads * spec.key_dim);
    const size_t gates = rows_ * spec.kv_heads * spec.gates * sizeof(float);
    key_value = std::max(key_value, row_elements * spec.kv_heads * (spec.key_dim + spec.value_dim) + 3 + gates);
    joined = std::max(joined, row_elements * spec.query_heads * spec.value_dim);
    groups_[g].whole_key_value = IsWhole(parts, group);
    groups_[g].whole = groups_[g].whole_key_value && (spec.linear() || !local);
    FindLocals(core, id, group, groups_[g].locals);
    PlanSplits(parts, group);
  }
  DT_RETURN_IF_ERROR(Grow(query_, query));
  DT_RETURN_IF_ERROR(GrowSlots(key_value_, key_value));
  DT_RETURN_IF_ERROR(Grow(joined_, joined));
  if (part_query_.size() < parts.size()) {
    part_query_.resize(parts.size());
    part_key_value_.resize(parts.size());
  }
  for (size_t p = 0; p < parts.size(); ++p) {
    size_t part_query = 0, part_key_value = 0;
    for (int g = 0; g < table_.group_count(); ++g) {
      if (!groups_[g].whole) part_query = std::max<size_t>(part_query, parts[p].layouts[g].query_bytes);
      if (!groups_[g].whole_key_value)
        part_key_value = std::max<size_t>(part_key_value, parts[p].layouts[g].key_value_bytes);
    }
    DT_RETURN_IF_ERROR(Grow(part_query_[p], part_query));
    DT_RETURN_IF_ERROR(GrowSlots(part_key_value_[p], part_key_value));
  }
  return absl::OkStatus();
}

bool StepWire::IsWhole(const std::vector<WorkerPart>& parts, LayerGroup group) const {
  if (parts.size() != 1) return false;
  const auto& items = parts[0].layouts[group.value()].items;
  if (items.size() != row_begin_.size()) return false;
  const int kv_heads = table_.softmax(group).kv_heads;
  return std::all_of(items.begin(), items.end(), [&](const proto::ShardStep& item) {
    return item.tokens.whole() && item.kv_heads.size() == kv_heads && item.states == proto::StateExchange::kTokens;
  });
}

void StepWire::FindLocals(const ComputeWorkerCore& core, MicroBatchId id, LayerGroup group,
                          std::vector<LocalPartial>& locals) {
  locals.clear();
  if (core.table().linear(group) != nullptr) return;
  for (const PromptEntry& prompt : core.PromptsOf(id)) {
    const proto::StepEntry& entry = core.PlanOf(id).entries[prompt.entry];
    LocalPartial local;
    local.entry = prompt.entry;
    local.ctx_len = entry.ctx_len;
    local.q_len = static_cast<int>(entry.tokens.size());
    const auto add = [&](const proto::HeadRange& heads) {
      local.kv_heads = heads;
      const bool by_rank = prompt.ring || prompt.asks_ranks;
      for (int rank = 0; by_rank && rank < core.PlanOf(id).part.rank; ++rank) {
        const proto::TokenRange shard = core.ShardOf(id, rank);
        local.begin = shard.begin;
        local.end = shard.end;
        local.rank = rank;
        locals.push_back(local);
      }
      local.begin = by_rank ? core.ShardOf(id, core.PlanOf(id).part.rank).begin : prompt.begin;
      local.end = local.ctx_len + local.q_len;
      local.rank = LocalPartial::kOwn;
      locals.push_back(local);
    };
    if (prompt.begin == 0) {
      add({0, core.table().softmax(group).kv_heads});
      continue;
    }
    const size_t first = locals.size();
    for (const proto::Shard& shard : entry.placement) {
      if (shard.group != group) continue;
      const bool known = std::any_of(locals.begin() + static_cast<std::ptrdiff_t>(first), locals.end(),
                                     [&](const LocalPartial& l) { return l.kv_heads == shard.kv_heads; });
      if (!known) add(shard.kv_heads);
    }
  }
}

StepWire::TokenSplit& StepWire::SplitOf(Group& plan, int entry, const proto::HeadRange& heads, LayerGroup group) {
  for (TokenSplit& split : plan.splits)
    if (split.entry == entry && split.kv_heads == heads) return split;
  TokenSplit& split = plan.splits.emplace_back();
  split.entry = entry;
  split.kv_heads = heads;
  split.query_heads = heads.size() * table_.softmax(group).group_size();
  return split;
}

bool StepWire::IsLocal(const Group& plan, int entry) {
  return std::any_of(plan.locals.begin(), plan.locals.end(), [&](const LocalPartial& l) { return l.entry == entry; });
}

void StepWire::PlanSplits(const std::vector<WorkerPart>& parts, LayerGroup group) {
  Group& plan = groups_[group.value()];
  plan.splits.clear();
  plan.merges.clear();
  for (size_t p = 0; p < parts.size(); ++p) {
    const auto& items = parts[p].layouts[group.value()].items;
    for (size_t i = 0; i < items.size(); ++i) {
      if (items[i].finished() || items[i].rows.q_count == 0) continue;
      if (join_ == Join::kElsewhere && IsLocal(plan, items[i].entry)) continue;
      TokenSplit& split = SplitOf(plan, items[i].entry, items[i].kv_heads, group);
      split.ctx_len = items[i].ctx_len;
      split.q_len = items[i].q_len;
      split.shards.push_back(ItemRef{static_cast<int>(p), static_cast<int>(i)});
    }
  }
  for (size_t i = 0; i < plan.locals.size(); ++i) {
    const LocalPartial& local = plan.locals[i];
    if (local.whole() || join_ == Join::kElsewhere) continue;
    TokenSplit& split = SplitOf(plan, local.entry, local.kv_heads, group);
    split.ctx_len = local.ctx_len;
    split.q_len = local.q_len;
    split.locals.push_back(static_cast<int>(i));
  }
  for (TokenSplit& split : plan.splits) {
    std::sort(split.shards.begin(), split.shards.end(), [&](const ItemRef& a, const ItemRef& b) {
      return parts[a.part].layouts[group.value()].items[a.item].tokens.begin <
             parts[b.part].layouts[group.value()].items[b.item].tokens.begin;
    });
    split.partials.resize(split.shards.size() + split.locals.size());
  }
  plan.merges.resize(plan.splits.size());
}

void StepWire::CopyQuery(const proto::StepLayout& layout, LayerGroup group, std::byte* out) const {
  const proto::SoftmaxSpec& spec = table_.softmax(group);
  const int64_t head_bytes = spec.key_dim * static_cast<int64_t>(SizeOf(spec.kv));
  for (const proto::ShardStep& item : layout.items) {
    const HeadSlice slice = SliceOf(item.rows.q_count, spec.query_heads, item.kv_heads.begin * spec.group_size(),
                                    item.query_heads, head_bytes);
    CopyOut(query_->data() + (row_begin_[item.entry] + item.rows.q_first) * slice.full_row_bytes,
            out + item.query_offset, slice);
  }
}

transport::LentBytes StepWire::PackQuery(const std::vector<WorkerPart>& parts, int p, LayerGroup group) {
  const proto::StepLayout& layout = parts[p].layouts[group.value()];
  if (groups_[group.value()].whole) return transport::Lend(query_, layout.query_bytes);
  if (!layout.with_states) CopyQuery(layout, group, part_query_[p]->data());
  return transport::Lend(part_query_[p], layout.query_bytes);
}

transport::LentBytes StepWire::PackKeyValue(const std::vector<WorkerPart>& parts, int p, int op) {
  const LayerGroup group = table_.op_group[op];
  const proto::StepLayout& layout = parts[p].layouts[group.value()];
  if (groups_[group.value()].whole_key_value) return transport::Lend(key_value_[SlotOf(op)], layout.key_value_bytes);
  const proto::SoftmaxSpec& spec = table_.softmax(group);
  const int64_t element = static_cast<int64_t>(SizeOf(spec.kv));
  std::byte* out = part_key_value(p, op);
  if (layout.with_states) CopyQuery(layout, group, out);
  for (const proto::ShardStep& item : layout.items) {
    const int64_t row = row_begin_[item.entry] + item.rows.kv_first;
    const HeadSlice k =
        SliceOf(item.rows.kv_count, spec.kv_heads, item.kv_heads.begin, item.kv_heads.size(), spec.key_dim * element);
    CopyOut(key(op) + row * k.full_row_bytes, out + item.key_offset, k);
    const HeadSlice v =
        SliceOf(item.rows.kv_count, spec.kv_heads, item.kv_heads.begin, item.kv_heads.size(), spec.value_dim * element);
    CopyOut(value(op) + row * v.full_row_bytes, out + item.value_offset, v);
    if (spec.gates == 0) continue;
    const HeadSlice gates = SliceOf(item.rows.kv_count, spec.kv_heads, item.kv_heads.begin, item.kv_heads.size(),
                                    spec.gates * static_cast<int64_t>(sizeof(float)));
    CopyOut(key(op) + GatesAt(group) + row * gates.full_row_bytes, out + item.gate_offset, gates);
  }
  return transport::Lend(part_key_value_[p][SlotOf(op)], layout.key_value_bytes);
}

std::vector<std::byte> StepWire::RankRows(int op, int64_t first_row) {
  const proto::SoftmaxSpec& spec = table_.softmax(table_.op_group[op]);
  const int64_t head_bytes = spec.kv_heads * static_cast<int64_t>(SizeOf(spec.kv));
  const int64_t key_bytes = (rows_ - first_row) * head_bytes * spec.key_dim;
  const int64_t value_bytes = (rows_ - first_row) * head_bytes * spec.value_dim;
  std::vector<std::byte> rows(static_cast<size_t>(key_bytes + value_bytes));
  std::memcpy(rows.data(), key(op) + first_row * head_bytes * spec.key_dim, static_cast<size_t>(key_bytes));
  std::memcpy(rows.data() + key_bytes, value(op) + first_row * head_bytes * spec.value_dim,
              static_cast<size_t>(value_bytes));
  return rows;
}

void StepWire::CopyWholeItems(const std::vector<WorkerPart>& parts, LayerGroup group) {
  const proto::SoftmaxSpec& spec = table_.softmax(group);
  const int64_t head_bytes = spec.value_dim * static_cast<int64_t>(SizeOf(spec.kv));
  for (const WorkerPart& part : parts)
    for (const proto::ShardStep& item : part.layouts[group.value()].items) {
      if (!item.finished() || item.rows.q_count == 0) continue;
      const HeadSlice slice = SliceOf(item.rows.q_count, spec.query_heads, item.kv_heads.begin * spec.group_size(),
                                      item.query_heads, head_bytes);
      CopyIn(part.partial.data() + item.partial_offset,
             joined_->data() + (row_begin_[item.entry] + item.rows.q_first) * slice.full_row_bytes, slice);
    }
}

absl::StatusOr<const std::byte*> StepWire::JoinPartials(const std::vector<WorkerPart>& parts, int op,
                                                        const kernels::OpContext& context) {
  const LayerGroup group = table_.op_group[op];
  Group& plan = groups_[group.value()];
  if (plan.whole) return parts[0].partial.data();
  CopyWholeItems(parts, group);
  if (plan.splits.empty()) return joined_->data();
  const proto::SoftmaxSpec& spec = table_.softmax(group);
  for (size_t s = 0; s < plan.splits.size(); ++s) {
    TokenSplit& split = plan.splits[s];
    for (size_t i = 0; i < split.shards.size(); ++i) {
      const WorkerPart& part = parts[split.shards[i].part];
      const proto::ShardStep& item = part.layouts[group.value()].items[split.shards[i].item];
      kernels::ShardPartials& partial = split.partials[i];
      partial.token_begin = item.tokens.begin;
      partial.token_end = item.attended_end();
      partial.o = reinterpret_cast<const float*>(part.partial.data() + item.partial_offset);
      partial.ml = partial.o + item.nodes * item.query_heads * spec.value_dim;
    }
    for (size_t i = 0; i < split.locals.size(); ++i) {
      const LocalPartial& local = plan.locals[split.locals[i]];
      split.partials[split.shards.size() + i] = {local.begin, local.end, local.o, local.ml};
    }
    const int64_t head_bytes = spec.value_dim * static_cast<int64_t>(SizeOf(spec.kv));
    kernels::MergeItem& merge = plan.merges[s];
    merge.shards = split.partials;
    merge.q_rows = split.q_len;
    merge.heads = split.query_heads;
    merge.value_dim = spec.value_dim;
    merge.window = spec.window;
    merge.first_position = split.ctx_len;
    merge.dtype = spec.kv;
    const float* sinks = table_.sinks(op);
    merge.sinks = sinks != nullptr ? sinks + split.kv_heads.begin * spec.group_size() : nullptr;
    merge.o = joined_->data() +
              (row_begin_[split.entry] * spec.query_heads + split.kv_heads.begin * spec.group_size()) * head_bytes;
    merge.o_row_step = int64_t{spec.query_heads} * spec.value_dim;
  }
  DT_RETURN_IF_ERROR(kernels::MergeShardPartials(context, plan.merges));
  return joined_->data();
}

}  // namespace dovetail::compute
