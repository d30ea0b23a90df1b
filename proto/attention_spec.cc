#include "proto/attention_spec.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace dovetail::proto {
namespace {

absl::Status ValidateSpec(const SoftmaxSpec& spec, size_t op) {
  if (spec.kv_heads < 1 || spec.query_heads < 1 || spec.query_heads > kMaxHeads)
    return InvalidArgument("attention op ", op, ": ", spec.query_heads, " query and ", spec.kv_heads,
                           " KV heads are outside 1..", kMaxHeads);
  if (spec.query_heads % spec.kv_heads != 0)
    return InvalidArgument("attention op ", op, ": ", spec.query_heads, " query heads are no multiple of ",
                           spec.kv_heads, " KV heads");
  for (const int dim : {spec.key_dim, spec.value_dim})
    if (dim < 2 || dim > kMaxHeadDim || dim % 2 != 0)
      return InvalidArgument("attention op ", op, ": head dimension ", dim, " is not an even number in 2..",
                             kMaxHeadDim);
  if (!std::isfinite(spec.scale) || spec.window < 0)
    return InvalidArgument("attention op ", op, ": scale ", spec.scale, " or window ", spec.window, " is not usable");
  return absl::OkStatus();
}

absl::Status ValidateSpec(const LinearSpec& spec, size_t op) {
  if (spec.heads < 1 || spec.heads > kMaxHeads)
    return InvalidArgument("attention op ", op, ": ", spec.heads, " heads are outside 1..", kMaxHeads);
  for (const int dim : {spec.key_dim, spec.value_dim})
    if (dim < 1 || dim > kMaxHeadDim)
      return InvalidArgument("attention op ", op, ": head dimension ", dim, " is outside 1..", kMaxHeadDim);
  if (spec.conv_width != 0 && (spec.conv_width < 2 || spec.conv_width > LinearSpec::kMaxConvWidth))
    return InvalidArgument("attention op ", op, ": a convolution over ", spec.conv_width, " tokens; 2..",
                           LinearSpec::kMaxConvWidth, " are supported");
  if (!std::isfinite(spec.query_scale) || spec.blocks_per_head < 1 || (spec.vector_decay && !spec.token_decay) ||
      (spec.delta && !spec.token_rate) || (spec.state != DType::kF32 && spec.state != DType::kBF16))
    return InvalidArgument("attention op ", op, ": this linear state contradicts itself");
  return absl::OkStatus();
}

absl::Status ValidateConstants(const AttentionSpec& op, const LinearConstants& constants, size_t index) {
  const auto* linear = std::get_if<LinearSpec>(&op);
  const auto* softmax = std::get_if<SoftmaxSpec>(&op);
  const LinearSpec none;
  const LinearSpec& spec = linear != nullptr ? *linear : none;
  const size_t heads = spec.heads, channels = heads * spec.channels();
  const auto sized = [](const std::vector<float>& values, size_t size, bool optional) {
    return values.size() == size || (optional && values.empty());
  };
  if (!sized(constants.log_decay, spec.token_decay ? 0 : heads, false) ||
      !sized(constants.conv, spec.conv_width * channels, false) ||
      !sized(constants.conv_bias, spec.conv_width > 0 ? channels : 0, true) ||
      !sized(constants.skip, spec.conv_width > 0 ? heads : 0, true) ||
      !sized(constants.sinks, softmax != nullptr ? softmax->query_heads : 0, true))
    return InvalidArgument("attention op ", index, ": its constants do not fit its spec");
  for (const auto* values :
       {&constants.log_decay, &constants.conv, &constants.conv_bias, &constants.skip, &constants.sinks})
    for (const float value : *values)
      if (!std::isfinite(value)) return InvalidArgument("attention op ", index, ": a constant is not finite");
  return absl::OkStatus();
}

SoftmaxSpec ViewOf(const AttentionSpec& spec) {
  if (const auto* softmax = std::get_if<SoftmaxSpec>(&spec)) return *softmax;
  const auto& linear = std::get<LinearSpec>(spec);
  SoftmaxSpec view;
  view.query_heads = view.kv_heads = linear.heads;
  view.key_dim = linear.key_dim;
  view.value_dim = linear.value_dim;
  view.scale = 1;
  view.window = kSegmentTokens + 1;
  view.kv = linear.wire;
  view.gates = linear.gates();
  view.blocks_per_head = linear.blocks_per_head;
  view.state_bytes = linear.state_bytes();
  view.token_bytes = linear.token_bytes();
  return view;
}

}  // namespace

int64_t LinearSpec::state_bytes() const {
  return int64_t{key_dim} * value_dim * static_cast<int64_t>(SizeOf(state)) +
         int64_t{conv_history()} * channels() * static_cast<int64_t>(SizeOf(wire));
}

int64_t LinearSpec::token_bytes() const {
  const int64_t floats = key_dim + value_dim + (vector_decay ? key_dim : 1);
  return floats * static_cast<int64_t>(sizeof(float)) +
         (conv_width > 0 ? channels() * static_cast<int64_t>(SizeOf(wire)) : 0);
}

absl::StatusOr<AttentionTable> AttentionTable::Build(const std::vector<AttentionSpec>& ops,
                                                     std::vector<LinearConstants> constants) {
  if (ops.empty() || ops.size() > kMaxAttentionOps)
    return InvalidArgument("a model has ", ops.size(), " attention ops; 1..", kMaxAttentionOps, " are supported");
  const auto is_linear = [](const AttentionSpec& spec) { return std::holds_alternative<LinearSpec>(spec); };
  const bool any_constants =
      std::any_of(ops.begin(), ops.end(), is_linear) ||
      std::any_of(constants.begin(), constants.end(), [](const LinearConstants& c) { return c != LinearConstants(); });
  if (any_constants && constants.size() != ops.size())
    return InvalidArgument("a model of ", ops.size(), " attention ops has constants of ", constants.size());
  AttentionTable table;
  if (any_constants) table.constants = std::move(constants);
  for (size_t op = 0; op < ops.size(); ++op) {
    DT_RETURN_IF_ERROR(std::visit([op](const auto& spec) { return ValidateSpec(spec, op); }, ops[op]));
    if (any_constants) DT_RETURN_IF_ERROR(ValidateConstants(ops[op], table.constants[op], op));
    size_t group = 0;
    while (group < table.groups.size() && !(table.groups[group] == ops[op])) ++group;
    if (group == table.groups.size()) {
      if (group == kMaxLayerGroups)
        return InvalidArgument("attention ops have more than ", kMaxLayerGroups, " different specs");
      table.groups.push_back(ops[op]);
      table.views.push_back(ViewOf(ops[op]));
      table.ops_in_group.push_back(0);
    }
    table.op_group.push_back(LayerGroup(static_cast<uint16_t>(group)));
    table.op_index_in_group.push_back(table.ops_in_group[group]++);
  }
  return table;
}

}  // namespace dovetail::proto
