#include "exchange/divided_payloads.h"

#include <map>
#include <tuple>

namespace dovetail::exchange {
namespace {

constexpr int64_t kFloat = sizeof(float);
constexpr int64_t kBoundary = 256;  // bytes

int64_t RoundUp(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

// Every shard answers its rows through the entry's last one.
void PlaceQueries(const proto::StepLayout& layout, int64_t head_bytes, DividedPayloads& out) {
  struct Rows {
    int first = 0;    // of the entry's new tokens
    size_t item = 0;  // that begins there and brings them
    int64_t at = -1;
  };
  std::map<std::tuple<int, int, int>, Rows> rows_of;  // by entry and heads
  const auto key_of = [](const proto::ShardStep& item) {
    return std::tuple(item.entry, item.kv_heads.begin, item.kv_heads.end);
  };
  for (size_t i = 0; i < layout.items.size(); ++i) {
    const proto::ShardStep& item = layout.items[i];
    if (item.rows.q_count == 0) continue;
    Rows& rows = rows_of.try_emplace(key_of(item), Rows{item.rows.q_first, i}).first->second;
    if (item.rows.q_first < rows.first) rows = {item.rows.q_first, i};
  }
  for (size_t i = 0; i < layout.items.size(); ++i) {
    const proto::ShardStep& item = layout.items[i];
    if (item.rows.q_count == 0) continue;
    Rows& rows = rows_of[key_of(item)];
    const int64_t row_bytes = item.query_heads * head_bytes;
    if (rows.at < 0) {
      rows.at = out.query_bytes;
      out.query_bytes += (item.q_len - rows.first) * row_bytes;
    }
    out.items[i].query_at = rows.at + (item.rows.q_first - rows.first) * row_bytes;
    out.items[i].shares_query = rows.item != i;
  }
}

void PlaceAnswers(const proto::StepLayout& layout, const proto::SoftmaxSpec& spec, DividedPayloads& out) {
  const auto element = static_cast<int64_t>(SizeOf(spec.kv));
  int64_t finished = 0, floats = 0;
  for (size_t i = 0; i < layout.items.size(); ++i) {
    const proto::ShardStep& item = layout.items[i];
    if (!item.finished()) continue;
    out.items[i].o_at = finished;
    finished += item.rows.q_count * item.query_heads * spec.value_dim * element;
  }
  out.partials_at = RoundUp(finished, kBoundary);
  for (size_t i = 0; i < layout.items.size(); ++i) {
    const proto::ShardStep& item = layout.items[i];
    if (item.finished() || item.rows.q_count == 0) continue;
    const int64_t row = int64_t{item.query_heads} * spec.value_dim;
    floats = RoundUp(floats, row);
    out.items[i].o_at = floats;  // until the beginning of all is added
    floats += item.rows.q_count * row;
  }
  out.ml_at = RoundUp(out.partials_at + floats * kFloat, kBoundary);
  for (size_t i = 0; i < layout.items.size(); ++i) {
    if (layout.items[i].finished()) continue;
    out.items[i].ml_at = out.ml_at + out.items[i].o_at / spec.value_dim * 2 * kFloat;
    out.items[i].o_at = out.partials_at + out.items[i].o_at * kFloat;
  }
  out.answer_bytes = floats == 0 ? finished : out.ml_at + floats / spec.value_dim * 2 * kFloat;
}

}  // namespace

DividedPayloads DividedPayloadsOf(const proto::StepLayout& layout, const proto::SoftmaxSpec& spec) {
  DividedPayloads out;
  out.items.resize(layout.items.size());
  PlaceQueries(layout, spec.key_dim * static_cast<int64_t>(SizeOf(spec.kv)), out);
  PlaceAnswers(layout, spec, out);
  return out;
}

}  // namespace dovetail::exchange
