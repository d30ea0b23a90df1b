#include "compute_worker/row_spread.h"

#include <algorithm>

namespace dovetail::compute {
namespace {

constexpr int kNobody = -1;

// Nothing of it is asked of its worker, which only keeps its K and V.
bool IsAttendedHere(const proto::ShardStep& item) {
  return item.tokens.whole() && item.attend_end == 0 && item.gather_count == 0 && item.rows.kv_count == item.q_len;
}

// Notes whose the items of a layer group are; false if one is not a whole sequence, or is another part's in `of`.
bool TakeItems(const proto::StepLayout& layout, int kv_heads, int part, bool first_group, std::vector<int>& of) {
  for (const proto::ShardStep& item : layout.items) {
    const bool whole = (item.finished() && item.rows.q_count > 0) || IsAttendedHere(item);
    if (!whole || item.kv_heads.size() != kv_heads) return false;
    int& owner = of[item.entry];
    if (owner != (first_group ? kNobody : part)) return false;
    owner = part;
  }
  return true;
}

// Numbers the rows of q and o, and of k and v, part by part.
void FindRuns(const ComputeWorkerCore& core, MicroBatchId id, RowSpread& spread) {
  const std::vector<proto::StepEntry>& entries = core.PlanOf(id).entries;
  std::vector<bool> here(entries.size());
  for (const PromptEntry& prompt : core.PromptsOf(id)) here[prompt.entry] = true;
  std::vector<int64_t> asked(spread.part_rows.size()), all(spread.part_rows.size());
  int64_t row = 0;
  spread.runs.clear();
  for (size_t e = 0; e < entries.size(); ++e) {
    const int part = spread.entry_part[e];
    const auto count = static_cast<int64_t>(entries[e].tokens.size());
    if (spread.runs.empty() || spread.runs.back().part != part || spread.runs.back().attended_here != here[e])
      spread.runs.push_back({part, here[e], row, 0, asked[part], all[part]});
    spread.runs.back().count += count;
    row += count;
    all[part] += count;
    if (!here[e]) asked[part] += count;
  }
}

}  // namespace

bool SpreadRows(const ComputeWorkerCore& core, MicroBatchId id, RowSpread& spread) {
  const std::vector<WorkerPart>& parts = core.PartsOf(id);
  const std::vector<proto::StepEntry>& entries = core.PlanOf(id).entries;
  spread.entry_part.assign(entries.size(), kNobody);
  spread.part_rows.assign(parts.size(), 0);
  spread.rows.clear();
  for (size_t p = 0; p < parts.size(); ++p) {
    for (int g = 0; g < core.table().group_count(); ++g) {
      const proto::StepLayout& layout = parts[p].layouts[g];
      const int kv_heads = core.table().softmax(LayerGroup(static_cast<uint16_t>(g))).kv_heads;
      if (layout.items.size() != parts[p].layouts[0].items.size() ||
          !TakeItems(layout, kv_heads, static_cast<int>(p), g == 0, spread.entry_part))
        return false;
    }
  }
  for (size_t e = 0; e < entries.size(); ++e) {
    const int part = spread.entry_part[e];
    if (part == kNobody) return false;
    for (size_t i = 0; i < entries[e].tokens.size(); ++i) spread.rows.push_back({part, spread.part_rows[part]++});
  }
  FindRuns(core, id, spread);
  return true;
}

bool CrossesAsDivided(const ComputeWorkerCore& core, MicroBatchId id, RowSpread& spread) {
  return core.table().has_linear() || !SpreadRows(core, id, spread);
}

}  // namespace dovetail::compute
