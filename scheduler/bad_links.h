#pragma once
#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "absl/time/time.h"
#include "base/ids.h"

namespace dovetail::scheduler {

// A link between two members that does not work, as its ends say.
struct BadLink {
  absl::Time since, said;                    // first and last report
  bool broken = false;                       // until its ends have connected again; else silent, which may pass
  bool by_lower = false, by_higher = false;  // which of its ends, by id, said that it is broken
  std::string why;
};

// The links that do not work, as a value. One fault is told by several reports, in any order, before or after the word
// that a member has ended: a link is judged only when those of the same fault have come.
//
// Bounds: one entry for each pair of members.
// Threads: thread-compatible; deterministic.
class BadLinks {
 public:
  using Ends = std::pair<WorkerId, WorkerId>;  // the lower id first

  // `reporter` says it of its link with `other`. A silent link is reported again as long as it is silent.
  void Note(WorkerId reporter, WorkerId other, bool broken, const std::string& why, absl::Time now);
  // `reporter` is connected with `other`: a broken link works again once all that called it broken have said so.
  void Works(WorkerId reporter, WorkerId other);
  // The member has ended, and what was said about it is settled.
  void Forget(WorkerId worker);
  // Silent links that were not reported lately work again.
  void ForgetMended(absl::Time now);
  // Nothing could be heard for `gap`.
  void Forgive(absl::Duration gap);

  bool Contains(WorkerId one, WorkerId other) const { return links_.contains(EndsOf(one, other)); }
  const std::map<Ends, BadLink>& links() const { return links_; }  // iterated in a fixed order

 private:
  static Ends EndsOf(WorkerId one, WorkerId other) { return std::minmax(one, other); }

  std::map<Ends, BadLink> links_;
};

}  // namespace dovetail::scheduler
