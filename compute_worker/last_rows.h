#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "proto/attention_spec.h"

namespace dovetail::compute {

// Of K and V as kRankRows has them (proto/rank_frames.h), those from row `first` on.
//   Requires: `rows` holds whole rows of both, more than `first`
// Threads: pure.
inline std::vector<std::byte> LastRows(std::span<const std::byte> rows, const proto::SoftmaxSpec& spec, int64_t first) {
  const size_t head_bytes = static_cast<size_t>(spec.kv_heads) * SizeOf(spec.kv);
  const size_t key_row = head_bytes * static_cast<size_t>(spec.key_dim);
  const size_t value_row = head_bytes * static_cast<size_t>(spec.value_dim);
  const size_t count = rows.size() / (key_row + value_row), dropped = static_cast<size_t>(first);
  const auto keys = rows.first(count * key_row).subspan(dropped * key_row);
  const auto values = rows.subspan(count * key_row + dropped * value_row);
  std::vector<std::byte> last(keys.begin(), keys.end());
  last.insert(last.end(), values.begin(), values.end());
  return last;
}

}  // namespace dovetail::compute
