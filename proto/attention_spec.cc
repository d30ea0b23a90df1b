#include "proto/attention_spec.h"

#include <cmath>

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

}  // namespace

absl::StatusOr<AttentionTable> AttentionTable::Build(const std::vector<AttentionSpec>& ops) {
  if (ops.empty() || ops.size() > kMaxAttentionOps)
    return InvalidArgument("a model has ", ops.size(), " attention ops; 1..", kMaxAttentionOps, " are supported");
  AttentionTable table;
  for (size_t op = 0; op < ops.size(); ++op) {
    DT_RETURN_IF_ERROR(ValidateSpec(std::get<SoftmaxSpec>(ops[op]), op));
    size_t group = 0;
    while (group < table.groups.size() && !(table.groups[group] == ops[op])) ++group;
    if (group == table.groups.size()) {
      if (group == kMaxLayerGroups)
        return InvalidArgument("attention ops have more than ", kMaxLayerGroups, " different specs");
      table.groups.push_back(ops[op]);
      table.ops_in_group.push_back(0);
    }
    table.op_group.push_back(LayerGroup(static_cast<uint16_t>(group)));
    table.op_index_in_group.push_back(table.ops_in_group[group]++);
  }
  return table;
}

}  // namespace dovetail::proto
