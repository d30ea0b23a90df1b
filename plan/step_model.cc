#include "plan/step_model.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "proto/prefix_traffic.h"
#include "scheduler/core/limits.h"

namespace dovetail::plan {
namespace {

std::array<double, 6> Values(const StepParts& p) {  // by Bound
  return {p.weights_s, p.arithmetic_s, p.prompts_s, p.attention_s, p.link_s, p.overhead_s};
}

// Experts that `rows` rows meet, if each takes `chosen` of them at random.
double ExpertsMet(const ModelProduct& product, double rows) {
  const double experts = static_cast<double>(product.experts);
  return experts * (1 - std::pow(1 - static_cast<double>(product.chosen) / experts, rows));
}

}  // namespace

void StepParts::Add(const StepParts& other) {
  weights_s += other.weights_s;
  arithmetic_s += other.arithmetic_s;
  prompts_s += other.prompts_s;
  attention_s += other.attention_s;
  link_s += other.link_s;
  overhead_s += other.overhead_s;
}

double StepParts::Sum() const {
  double sum = 0;
  for (const double value : Values(*this)) sum += value;
  return sum;
}

const char* NameOf(Bound bound) {
  static constexpr const char* kNames[] = {"weights",  "arithmetic", "prompts' attention",
                                           "KV reads", "link",       "overhead"};
  return kNames[static_cast<size_t>(bound)];
}

Bound LargestOf(const StepParts& parts) {
  const auto values = Values(parts);
  return static_cast<Bound>(std::max_element(values.begin(), values.end()) - values.begin());
}

absl::StatusOr<StepModel> StepModel::Create(const ModelWork& work, const DeviceProfile& compute,
                                            const std::optional<OtherDevice>& attention) {
  StepModel model(work, compute, attention);
  DT_RETURN_IF_ERROR(model.Init());
  return model;
}

absl::Status StepModel::Init() {
  for (const ModelProduct& product : work_.products) {
    DT_ASSIGN_OR_RETURN(const double bytes, compute_.BytesPerWeight(product.weights));
    const double copies = static_cast<double>(product.count);
    weight_bytes_ += bytes * copies * static_cast<double>(product.outputs * product.inputs);
    const double of_a_row =
        product.experts > 0 ? static_cast<double>(product.chosen) / static_cast<double>(product.experts) : 1;
    if (!product.head) layer_values_ += of_a_row * copies * static_cast<double>(product.outputs + product.inputs);
  }
  cached_ = compute_.CachedShare(weight_bytes_);
  for (int group = 0; group < work_.attention.group_count(); ++group)
    DT_RETURN_IF_ERROR(AddGroup(LayerGroup(static_cast<uint16_t>(group))));
  return absl::OkStatus();
}

absl::Status StepModel::AddGroup(LayerGroup id) {
  const DeviceProfile& attending = attention_.has_value() ? attention_->profile : compute_;
  const proto::SoftmaxSpec& spec = work_.attention.softmax(id);
  const double element = static_cast<double>(SizeOf(spec.kv));
  Group group;
  group.ops = work_.attention.ops_in_group[id.value()];
  group.answer_bytes = (spec.key_dim + spec.value_dim) * element;
  group.append_bytes = (spec.key_dim + spec.value_dim) * element + 4.0 * spec.gates;
  if (const proto::LinearSpec* const linear = work_.attention.linear(id); linear != nullptr) {
    group.linear = true;
    linear_layers_ += group.ops;
    group.values_of_a_head = static_cast<double>(linear->key_dim) * linear->value_dim;
    const int dim = std::max(linear->key_dim, linear->value_dim);
    DT_ASSIGN_OR_RETURN(const StateRates there, attending.State(dim, linear->delta, linear->vector_decay));
    DT_ASSIGN_OR_RETURN(const StateRates here, compute_.State(dim, linear->delta, linear->vector_decay));
    group.decode_rate = there.decode_s_per_value;
    group.prompt_rate = here.prompt_s_per_value;
  } else {
    const int dim = std::max(spec.key_dim, spec.value_dim);
    const KvStorage storage = work_.kv_storage;
    DT_ASSIGN_OR_RETURN(const AttentionRates there, attending.Attention(spec.kv, dim, spec.group_size(), storage));
    auto here = compute_.Attention(spec.kv, dim, spec.group_size(), storage);
    if (!here.ok()) here = compute_.Attention(spec.kv, dim, spec.group_size());  // a GPU attends prompts as they come
    DT_RETURN_IF_ERROR(here.status());
    group.token_bytes = KvTokenBytes(spec.kv, storage, spec.key_dim, spec.value_dim);
    group.decode_rate = there.decode_bytes_per_s;
    group.prompt_rate = here->prompt_flops_per_s;
    group.asked_rate = there.prompt_flops_per_s;
  }
  groups_.push_back(group);
  return absl::OkStatus();
}

double StepModel::ProductSeconds(double rows, double drawn) const {
  double seconds = 0;
  for (const ModelProduct& product : work_.products) {
    double with = product.head ? drawn : rows;
    double copies = static_cast<double>(product.count);
    if (with <= 0) continue;
    if (product.experts > 0) {
      const double met = ExpertsMet(product, with);
      copies *= met / static_cast<double>(product.experts);
      with = std::max(1.0, with * static_cast<double>(product.chosen) / met);
    }
    // Formats were looked up by Init.
    const double weights = static_cast<double>(product.outputs) * static_cast<double>(product.inputs);
    seconds += copies * *compute_.ProductSeconds(product.weights, with, weights, cached_);
  }
  return seconds;
}

size_t StepModel::PlaceOf(WorkerId worker, StepCost& cost, std::vector<double>& link_bytes) {
  for (size_t i = 0; i < cost.attention.size(); ++i)
    if (cost.attention[i].worker == worker) return i;
  cost.attention.push_back({worker, 0});
  link_bytes.push_back(0);
  return cost.attention.size() - 1;
}

void StepModel::AddDecode(const proto::StepEntry& entry, StepCost& cost, std::vector<double>& link_bytes) const {
  const double rows = static_cast<double>(entry.tokens.size());
  for (const proto::Shard& shard : entry.placement) {
    const Group& group = groups_[shard.group.value()];
    const proto::SoftmaxSpec& spec = work_.attention.softmax(shard.group);
    const double heads = group.ops * static_cast<double>(shard.kv_heads.size());
    const size_t at = PlaceOf(shard.worker, cost, link_bytes);
    if (group.linear) {
      cost.attention[at].seconds += heads * rows * group.values_of_a_head * group.decode_rate;
    } else {
      const Position end =
          std::min<Position>(entry.ctx_len + static_cast<Position>(entry.tokens.size()), shard.tokens.end);
      const Position begin =
          std::max<Position>(shard.tokens.begin, spec.window > 0 ? entry.ctx_len + 1 - spec.window : Position{0});
      const double seen = static_cast<double>(std::max<Position>(0, end - begin));
      cost.attention[at].seconds += heads * seen * group.token_bytes / group.decode_rate;
    }
    link_bytes[at] += rows * heads * (group.answer_bytes * spec.group_size() + group.append_bytes);
  }
}

void StepModel::AddPrompt(const proto::StepPlan& plan, const proto::StepEntry& entry, StepCost& cost,
                          std::vector<double>& link_bytes) const {
  const auto rows = static_cast<int64_t>(entry.tokens.size());
  const Position own = plan.part.in_group() ? entry.ctx_len : 0;  // tokens before it are asked about
  cost.work.tokens += rows;
  for (size_t id = 0; id < groups_.size(); ++id) {
    const Group& group = groups_[id];
    const proto::SoftmaxSpec& spec = work_.attention.softmax(LayerGroup(static_cast<uint16_t>(id)));
    if (group.linear) {
      const double seconds =
          group.ops * static_cast<double>(spec.kv_heads * rows) * group.values_of_a_head * group.prompt_rate;
      cost.parts.prompts_s += seconds;
      cost.linear_s += seconds;
      continue;
    }
    const auto flops = [&](Position begin, Position end) {
      return group.ops * proto::AttentionFlops(proto::SeenTokens(entry.ctx_len, rows, spec.window, begin, end),
                                               spec.query_heads, spec);
    };
    const double here = flops(own, entry.ctx_len + rows);
    const double asked = own > 0 ? flops(0, own) : 0.0;
    cost.parts.prompts_s += here / group.prompt_rate;
    cost.work.here_flops += here;
    cost.work.asked_flops += asked;
    for (const proto::Shard& shard : entry.placement) {
      if (shard.group.value() != id) continue;
      const size_t at = PlaceOf(shard.worker, cost, link_bytes);
      const double share = static_cast<double>(shard.kv_heads.size()) / spec.kv_heads;
      cost.attention[at].seconds += share * asked / group.asked_rate;
      const double heads = group.ops * static_cast<double>(shard.kv_heads.size() * rows);
      link_bytes[at] += heads * (group.append_bytes + (asked > 0 ? group.answer_bytes * spec.group_size() : 0.0));
    }
  }
}

StepCost StepModel::CostOf(const proto::StepPlan& plan) const {
  StepCost cost;
  std::vector<double> link_bytes;
  double rows = 0, drawn = 0;
  for (const proto::StepEntry& entry : plan.entries) {
    rows += static_cast<double>(entry.tokens.size());
    drawn += entry.sample ? 1 : 0;
    if (static_cast<int>(entry.tokens.size()) >= scheduler::kLeastPlannedPrompt)
      AddPrompt(plan, entry, cost, link_bytes);
    else
      AddDecode(entry, cost, link_bytes);
  }
  if (cost.work.tokens > 0) cost.work.step_tokens = static_cast<int64_t>(rows);
  const double sequences = static_cast<double>(plan.entries.size());
  const double all = ProductSeconds(rows, drawn), one = ProductSeconds(1, drawn > 0 ? 1 : 0);
  cost.parts.weights_s = std::min(all, one);
  cost.parts.arithmetic_s = all - cost.parts.weights_s;
  const StepOverhead& steps = compute_.steps;
  cost.parts.overhead_s = steps.step_s + sequences * steps.sequence_s +
                          work_.layers * (steps.layer_s + sequences * steps.layer_sequence_s) +
                          linear_layers_ * steps.linear_layer_s + rows * layer_values_ * steps.value_s +
                          drawn * static_cast<double>(work_.vocabulary) * steps.choice_s;
  cost.compute_s = cost.parts.weights_s + cost.parts.arithmetic_s + cost.parts.prompts_s + cost.parts.overhead_s;
  for (const StepCost::Worker& worker : cost.attention)
    cost.parts.attention_s = std::max(cost.parts.attention_s, worker.seconds);
  if (attention_.has_value()) {
    const double bytes = link_bytes.empty() ? 0 : *std::max_element(link_bytes.begin(), link_bytes.end());
    cost.link_s = 2.0 * work_.attention.op_count() * attention_->link.latency_s + bytes / attention_->link.bytes_per_s;
  }
  cost.parts.link_s = cost.link_s;
  return cost;
}

}  // namespace dovetail::plan
