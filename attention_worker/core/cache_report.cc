#include "attention_worker/core/attention_worker_core.h"
#include "proto/cache_frames.h"

namespace dovetail::attention {

// Before the other actions of the frame, at `at`: the report does not depend on whether these succeed. Something can be
// found here only after the scheduler has ordered something, so its node is known.
void AttentionWorkerCore::ReportCache(size_t at, std::vector<Action>& actions) {
  std::vector<Action> reports;
  proto::CacheChanged report;
  const auto send = [&] {
    SendFrame frame{*scheduler_, proto::kCacheChanged, StepId(), MicroBatchId(0), {}, options_.epoch};
    proto::Encode(report, frame.message);
    reports.push_back(std::move(frame));
    report.changes.clear();
  };
  for (const PrefixIndex::Change& change : sequences_.index().TakeChanges()) {
    const PrefixKey& key = change.key;
    report.changes.push_back({key.hash, LayerGroup(key.group), {key.head_begin, key.head_end}, change.findable});
    if (report.changes.size() == proto::kMaxCacheChanges) send();
  }
  if (!report.changes.empty()) send();
  actions.insert(actions.begin() + static_cast<ptrdiff_t>(at), std::make_move_iterator(reports.begin()),
                 std::make_move_iterator(reports.end()));
}

}  // namespace dovetail::attention
