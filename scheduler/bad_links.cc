#include "scheduler/bad_links.h"

#include <algorithm>

namespace dovetail::scheduler {
namespace {

constexpr absl::Duration kSaidAgain = absl::Milliseconds(300);  // six of a worker's looks

}  // namespace

void BadLinks::Note(WorkerId reporter, WorkerId other, bool broken, const std::string& why, absl::Time now) {
  ForgetMended(now);
  BadLink& link = links_.try_emplace(EndsOf(reporter, other), BadLink{.since = now, .why = why}).first->second;
  link.said = now;
  link.broken |= broken;
  (reporter < other ? link.by_lower : link.by_higher) |= broken;
}

void BadLinks::Works(WorkerId reporter, WorkerId other) {
  const auto at = links_.find(EndsOf(reporter, other));
  if (at == links_.end() || !at->second.broken) return;
  BadLink& link = at->second;
  (reporter < other ? link.by_lower : link.by_higher) = false;
  if (!link.by_lower && !link.by_higher) links_.erase(at);
}

void BadLinks::Forget(WorkerId worker) {
  std::erase_if(links_, [&](const auto& entry) { return entry.first.first == worker || entry.first.second == worker; });
}

void BadLinks::ForgetMended(absl::Time now) {
  std::erase_if(links_,
                [&](const auto& entry) { return !entry.second.broken && now - entry.second.said > kSaidAgain; });
}

void BadLinks::Forgive(absl::Duration gap) {
  for (auto& [ends, link] : links_) {
    link.since += gap;
    link.said += gap;
  }
}

}  // namespace dovetail::scheduler
