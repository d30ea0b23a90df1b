#include "kernels/reference/paged_attention.h"

#include <algorithm>
#include <cmath>

namespace dovetail::kernels::reference {

std::vector<double> AttentionRow(const AttentionShape& shape, const AttentionItem& item, int row, int head,
                                 const float* sink) {
  const KvBlockLayout layout = shape.layout();
  const int kv_head = head / shape.group;
  const int64_t position = item.first_position + row;
  const int64_t q_step = item.q_row_step != 0 ? item.q_row_step : int64_t{item.kv_heads} * shape.group * shape.key_dim;
  const std::byte* q =
      static_cast<const std::byte*>(item.q) + (row * q_step + int64_t{head} * shape.key_dim) * SizeOf(shape.dtype);
  std::vector<double> scores, o(shape.value_dim, 0.0);
  std::vector<int64_t> tokens;
  for (int64_t t = item.token_begin; t < item.token_end; ++t) {
    if (t > position || (shape.window > 0 && position - t >= shape.window)) continue;
    const std::byte* block = item.blocks.block(kv_head, static_cast<int32_t>(t / kSegmentTokens));
    double dot = 0;
    for (int i = 0; i < shape.key_dim; ++i) {
      dot += double{KvBlockLayout::LoadElement(shape.dtype, q + i * SizeOf(shape.dtype))} *
             layout.Key(block, static_cast<int>(t % kSegmentTokens), i);
    }
    scores.push_back(dot * shape.scale);
    tokens.push_back(t);
  }
  if (scores.empty()) return o;
  double max = *std::max_element(scores.begin(), scores.end());
  if (sink != nullptr) max = std::max(max, double{*sink});
  double sum = sink != nullptr ? std::exp(*sink - max) : 0.0;
  for (size_t n = 0; n < scores.size(); ++n) {
    const double weight = std::exp(scores[n] - max);
    sum += weight;
    const std::byte* block = item.blocks.block(kv_head, static_cast<int32_t>(tokens[n] / kSegmentTokens));
    for (int i = 0; i < shape.value_dim; ++i)
      o[i] += weight * layout.Value(block, static_cast<int>(tokens[n] % kSegmentTokens), i);
  }
  for (double& x : o) x /= sum;
  return o;
}

}  // namespace dovetail::kernels::reference
