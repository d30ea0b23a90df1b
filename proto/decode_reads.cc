#include "proto/decode_reads.h"

#include <algorithm>

namespace dovetail::proto {

double DecodeBytes(const AttentionTable& table, KvStorage storage, int64_t tokens) {
  double bytes = 0;
  for (int g = 0; g < table.group_count(); ++g) {
    const LayerGroup group(static_cast<uint16_t>(g));
    const double ops = table.ops_in_group[g];
    if (const LinearSpec* const linear = table.linear(group); linear != nullptr) {
      const double state = static_cast<double>(linear->key_dim) * linear->value_dim;
      bytes += 2 * ops * linear->heads * state * static_cast<double>(SizeOf(linear->state));
      continue;
    }
    const SoftmaxSpec& spec = table.softmax(group);
    const int64_t seen = spec.window > 0 ? std::min<int64_t>(tokens, spec.window) : tokens;
    bytes +=
        ops * spec.kv_heads * static_cast<double>(seen) * KvTokenBytes(spec.kv, storage, spec.key_dim, spec.value_dim);
  }
  return bytes;
}

}  // namespace dovetail::proto
