#include "compute_worker/cuda/cuda_partial_join.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/segment_tree.h"
#include "compute_worker/cuda/wire_element.h"
#include "kernels/cuda/attention/merge_partials.h"

namespace dovetail::compute {

void CudaPartialJoin::FindAnswers(const ComputeWorkerCore& core, MicroBatchId id, LayerGroup group,
                                  const StepWire::LocalPartial& local, Joined& joined, int64_t& nodes) const {
  const std::vector<WorkerPart>& parts = core.PartsOf(id);
  const auto item_of = [&](const Answer& answer) -> const proto::ShardStep& {
    return parts[answer.part].layouts[group.value()].items[answer.item];
  };
  for (size_t p = 0; p < parts.size(); ++p) {
    const auto& items = parts[p].layouts[group.value()].items;
    for (size_t i = 0; i < items.size(); ++i)
      if (items[i].entry == local.entry && items[i].kv_heads == local.kv_heads && items[i].rows.q_count > 0)
        joined.answers.push_back({static_cast<int>(p), static_cast<int>(i), 0});
  }
  std::sort(joined.answers.begin(), joined.answers.end(),
            [&](const Answer& a, const Answer& b) { return item_of(a).tokens.begin < item_of(b).tokens.begin; });
  for (Answer& answer : joined.answers) {
    answer.node = nodes;
    nodes += item_of(answer).nodes;
  }
}

// first[rows + 1], then the numbers of each row's subtrees from left to right. Of a rank none of whose tokens a row
// sees there may be no subtree.
void CudaPartialJoin::AppendOrder(const ComputeWorkerCore& core, MicroBatchId id, LayerGroup group,
                                  const Joined& joined, int64_t own_node, std::vector<int32_t>& numbers) {
  const int window = core.table().softmax(group).window;
  const size_t first_at = numbers.size();
  numbers.resize(first_at + joined.rows + 1);
  std::vector<int64_t> node;
  for (const Answer& answer : joined.answers) node.push_back(answer.node);
  const size_t order_at = numbers.size();
  for (int row = 0; row < joined.rows; ++row) {
    numbers[first_at + row] = static_cast<int32_t>(numbers.size() - order_at);
    for (size_t a = 0; a < joined.answers.size(); ++a) {
      const auto& layout = core.PartsOf(id)[joined.answers[a].part].layouts[group.value()];
      const proto::ShardStep& item = layout.items[joined.answers[a].item];
      if (row < item.rows.q_first) continue;
      const int count = CountSubtrees(VisibleSegments(item.ctx_len + row, window, item.tokens.begin,
                                                      std::max(item.tokens.begin, item.attended_end())));
      for (int i = 0; i < count; ++i) numbers.push_back(static_cast<int32_t>(node[a]++));
    }
    for (const RankShard& shard : joined.shards)
      if (window == 0 || shard.ctx_len + row - window + 1 < shard.end)
        numbers.push_back(static_cast<int32_t>(shard.node + row));
    numbers.push_back(static_cast<int32_t>(own_node + row));
  }
  numbers[first_at + joined.rows] = static_cast<int32_t>(numbers.size() - order_at);
}

absl::Status CudaPartialJoin::Plan(const ComputeWorkerCore& core, MicroBatchId id, LayerGroup group,
                                   std::span<const StepWire::LocalPartial> locals, std::span<const int64_t> row_begin,
                                   kernels::cuda::CudaStream& stream) {
  const proto::SoftmaxSpec& spec = core.table().softmax(group);
  joins_.clear();
  first_node_.assign(locals.size(), 0);
  int64_t floats = 0;
  std::vector<int32_t> numbers;
  std::vector<size_t> first_at;
  for (size_t l = 0; l < locals.size(); ++l) {
    if (locals[l].whole()) continue;
    Joined& joined = joins_.emplace_back();
    joined.kv_heads = locals[l].kv_heads;
    joined.row = row_begin[locals[l].entry];
    joined.rows = locals[l].q_len;
    joined.query_heads = joined.kv_heads.size() * spec.group_size();
    const int64_t node_floats = int64_t{joined.query_heads} * spec.value_dim;
    joined.o_at = floats = (floats + node_floats - 1) / node_floats * node_floats;
    int64_t nodes = 0;
    FindAnswers(core, id, group, locals[l], joined, nodes);
    for (; locals[l].rank != StepWire::LocalPartial::kOwn; ++l) {  // our own follow
      first_node_[l] = floats / node_floats + nodes;
      joined.shards.push_back({nodes, locals[l].ctx_len, locals[l].end});
      nodes += joined.rows;
    }
    first_node_[l] = floats / node_floats + nodes;
    first_at.push_back(numbers.size());
    AppendOrder(core, id, group, joined, nodes, numbers);
    floats += (nodes + joined.rows) * node_floats;
  }
  ml_at_ = floats;
  ml_floats_ = floats / spec.value_dim * 2;
  if (joins_.empty()) return absl::OkStatus();
  DT_ASSIGN_OR_RETURN(std::byte* const host, order_.Begin(stream, numbers.size() * sizeof(int32_t)));
  std::memcpy(host, numbers.data(), numbers.size() * sizeof(int32_t));
  const auto* const there = reinterpret_cast<const int32_t*>(order_.device());
  for (size_t j = 0; j < joins_.size(); ++j) {
    joins_[j].first = there + first_at[j];
    joins_[j].order = joins_[j].first + joins_[j].rows + 1;
  }
  return order_.Send(stream);
}

absl::Status CudaPartialJoin::Run(const std::vector<WorkerPart>& parts, const proto::SoftmaxSpec& spec,
                                  LayerGroup group, float* partials, std::byte* o, const float* sinks,
                                  kernels::cuda::CudaStream& stream) const {
  for (const Joined& joined : joins_) {
    float* const first_o = partials + joined.o_at;
    float* const first_ml = partials + ml_at_ + joined.o_at / spec.value_dim * 2;
    for (const Answer& answer : joined.answers) {
      const WorkerPart& part = parts[answer.part];
      const proto::ShardStep& item = part.layouts[group.value()].items[answer.item];
      const std::byte* const answered = part.partial.data() + item.partial_offset;
      const int64_t ml = item.nodes * joined.query_heads * 2, floats = item.nodes * joined.query_heads * spec.value_dim;
      DT_RETURN_IF_ERROR(
          stream.Copy(first_o + answer.node * joined.query_heads * spec.value_dim, answered, floats * sizeof(float)));
      DT_RETURN_IF_ERROR(stream.Copy(first_ml + answer.node * joined.query_heads * 2, answered + floats * sizeof(float),
                                     ml * sizeof(float)));
    }
    const int64_t head = int64_t{joined.kv_heads.begin} * spec.group_size();
    kernels::cuda::MergeLaunch merge;
    merge.partial_o = first_o;
    merge.partial_ml = first_ml;
    merge.first = joined.first;
    merge.order = joined.order;
    merge.sinks = sinks != nullptr ? sinks + head : nullptr;
    merge.o = o + (joined.row * spec.query_heads + head) * spec.value_dim * kElement;
    merge.o_row_step = int64_t{spec.query_heads} * spec.value_dim;
    merge.o_type = spec.kv == DType::kBF16 ? kernels::cuda::WireType::kBF16 : kernels::cuda::WireType::kF16;
    merge.rows = joined.rows;
    merge.heads = joined.query_heads;
    merge.value_dim = spec.value_dim;
    DT_RETURN_IF_ERROR(kernels::cuda::MergePartials(stream, merge));
  }
  return absl::OkStatus();
}

}  // namespace dovetail::compute
