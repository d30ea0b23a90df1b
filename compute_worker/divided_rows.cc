#include "compute_worker/divided_rows.h"

#include <algorithm>

#include "exchange/divided_payloads.h"

namespace dovetail::compute {
namespace {

using Copy = DividedRows::Copy;
using Tensor = DividedRows::Tensor;

// Why an item cannot be exchanged by GPUs; OK: it can.
absl::Status CheckItem(const proto::ShardStep& item, const proto::SoftmaxSpec& spec) {
  if (item.states != proto::StateExchange::kTokens)
    return FailedPrecondition("the linear layers of a prompt run on the compute worker, and states cross");
  if (spec.linear() && item.q_len > exchange::kMostStateTokens)
    return FailedPrecondition("a sequence has more than ", exchange::kMostStateTokens,
                              " new tokens for linear states of attention workers");
  if (item.attend_end != proto::kOpenEnd || item.gather_count > 0 || item.rows.q_count == 0)
    return FailedPrecondition("a prompt of a divided sequence is attended on the compute worker");
  return absl::OkStatus();
}

// Items that follow each other in the step and in the payload are one copy.
void Add(const Copy& copy, std::vector<Copy>& copies) {
  if (copy.rows == 0) return;
  if (!copies.empty()) {
    Copy& last = copies.back();
    const bool alike = last.part == copy.part && last.tensor == copy.tensor && last.row_bytes == copy.row_bytes;
    if (alike && last.tensor_at + last.rows * last.tensor_step == copy.tensor_at &&
        last.payload_at + last.rows * last.payload_step == copy.payload_at) {
      last.rows += copy.rows;
      return;
    }
  }
  copies.push_back(copy);
}

// Rows of `heads` heads of `head_bytes`, from head `first` on, of a tensor of `all` heads.
struct Heads {
  int64_t all = 0, first = 0, count = 0, head_bytes = 0;
  Copy Rows(int part, Tensor tensor, int64_t row, int64_t rows, int64_t payload_at) const {
    return {.part = part,
            .tensor = tensor,
            .tensor_at = (row * all + first) * head_bytes,
            .tensor_step = all * head_bytes,
            .payload_at = payload_at,
            .payload_step = count * head_bytes,
            .rows = rows,
            .row_bytes = count * head_bytes};
  }
};

struct ItemRows {
  int part = 0;
  int64_t row = 0;  // of the step: the entry's first
  const proto::ShardStep* item = nullptr;
  const exchange::DividedPayloads::Item* payload = nullptr;
  const proto::SoftmaxSpec* spec = nullptr;

  int64_t element() const { return static_cast<int64_t>(SizeOf(spec->kv)); }
  Heads QueryHeads(int dim) const {
    return {spec->query_heads, int64_t{item->kv_heads.begin} * spec->group_size(), item->query_heads, dim * element()};
  }
  Heads KvHeads(int dim) const {
    return {spec->kv_heads, item->kv_heads.begin, item->kv_heads.size(), dim * element()};
  }
  Copy Query() const {
    return QueryHeads(spec->key_dim)
        .Rows(part, Tensor::kQuery, row + item->rows.q_first, item->rows.q_count, payload->query_at);
  }
  Copy Key() const {
    return KvHeads(spec->key_dim)
        .Rows(part, Tensor::kKey, row + item->rows.kv_first, item->rows.kv_count, item->key_offset);
  }
  Copy Value() const {
    return KvHeads(spec->value_dim)
        .Rows(part, Tensor::kValue, row + item->rows.kv_first, item->rows.kv_count, item->value_offset);
  }
  Copy Gates() const {
    const auto bytes = spec->gates * static_cast<int64_t>(sizeof(float));
    return Heads{spec->kv_heads, item->kv_heads.begin, item->kv_heads.size(), bytes}.Rows(
        part, Tensor::kGates, row + item->rows.kv_first, item->rows.kv_count, item->gate_offset);
  }
  Copy Output() const {
    return QueryHeads(spec->value_dim)
        .Rows(part, Tensor::kOutput, row + item->rows.q_first, item->rows.q_count, payload->o_at);
  }
};

void AddPartial(const ItemRows& rows, DividedRows::Group& group) {
  const proto::ShardStep& item = *rows.item;
  const int64_t row_bytes = int64_t{rows.spec->query_heads} * rows.spec->value_dim * rows.element();
  const int first_head = item.kv_heads.begin * rows.spec->group_size();
  const int64_t o_at = rows.row * row_bytes + first_head * rows.spec->value_dim * rows.element();
  auto join = std::find_if(group.joins.begin(), group.joins.end(), [&](const DividedRows::Join& other) {
    return other.o_at == o_at && other.heads == item.query_heads;
  });
  if (join == group.joins.end()) {
    group.joins.push_back({.o_at = o_at, .first_head = first_head, .heads = item.query_heads, .rows = item.q_len});
    join = group.joins.end() - 1;
  }
  join->partials.push_back(
      {rows.part, rows.payload->o_at, rows.payload->ml_at, item.rows.q_first, item.rows.q_count, item.tokens.begin});
}

// One kind of copies after the other, so that those of neighbouring items may become one.
void AddItems(const std::vector<ItemRows>& items, DividedRows::Group& group) {
  for (const ItemRows& item : items)
    if (!item.payload->shares_query) Add(item.Query(), group.leaving);
  for (const ItemRows& item : items) Add(item.Key(), group.leaving);
  for (const ItemRows& item : items) Add(item.Value(), group.leaving);
  for (const ItemRows& item : items)
    if (item.spec->gates > 0) Add(item.Gates(), group.leaving);
  for (const ItemRows& item : items) {
    if (item.item->finished())
      Add(item.Output(), group.arriving);
    else
      AddPartial(item, group);
  }
}

void SortJoins(DividedRows::Group& group) {
  for (DividedRows::Join& join : group.joins) {
    std::sort(join.partials.begin(), join.partials.end(),
              [](const DividedRows::Partial& a, const DividedRows::Partial& b) { return a.begin < b.begin; });
    group.joined_rows_and_heads = std::max(group.joined_rows_and_heads, int64_t{join.rows} * join.heads);
  }
}

}  // namespace

absl::Status DivideRows(const ComputeWorkerCore& core, MicroBatchId id, DividedRows& divided) {
  if (!core.PromptsOf(id).empty())
    return FailedPrecondition("a prompt of a step with divided sequences is attended on the compute worker");
  const std::vector<WorkerPart>& parts = core.PartsOf(id);
  std::vector<int64_t> row_begin;
  int64_t rows = 0;
  for (const proto::StepEntry& entry : core.PlanOf(id).entries) {
    row_begin.push_back(rows);
    rows += static_cast<int64_t>(entry.tokens.size());
  }
  divided.query_bytes.assign(parts.size(), 0);
  divided.key_value_bytes.assign(parts.size(), 0);
  divided.answer_bytes.assign(parts.size(), 0);
  divided.groups.resize(static_cast<size_t>(core.table().group_count()));
  std::vector<ItemRows> items;
  for (size_t g = 0; g < divided.groups.size(); ++g) {
    DividedRows::Group& group = divided.groups[g];
    group.parts.clear();
    group.leaving.clear();
    group.arriving.clear();
    group.joins.clear();
    group.joined_rows_and_heads = 0;
    const proto::SoftmaxSpec& spec = core.table().softmax(LayerGroup(static_cast<uint16_t>(g)));
    for (size_t p = 0; p < parts.size(); ++p) {
      const proto::StepLayout& layout = parts[p].layouts[g];
      if (layout.items.empty()) continue;
      const exchange::DividedPayloads payloads = exchange::DividedPayloadsOf(layout, spec);
      items.clear();
      for (size_t i = 0; i < layout.items.size(); ++i) {
        const proto::ShardStep& item = layout.items[i];
        DT_RETURN_IF_ERROR(CheckItem(item, spec));
        items.push_back(
            {static_cast<int>(p), row_begin[static_cast<size_t>(item.entry)], &item, &payloads.items[i], &spec});
      }
      group.parts.push_back(static_cast<int>(p));
      AddItems(items, group);
      divided.query_bytes[p] = std::max(divided.query_bytes[p], payloads.query_bytes);
      divided.key_value_bytes[p] = std::max(divided.key_value_bytes[p], layout.key_value_bytes);
      divided.answer_bytes[p] = std::max(divided.answer_bytes[p], payloads.answer_bytes);
    }
    SortJoins(group);
  }
  return absl::OkStatus();
}

}  // namespace dovetail::compute
