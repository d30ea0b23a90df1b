// Which members must reach each other, and which do.
#include "scheduler/control_members.h"

namespace dovetail::scheduler {

using control::Role;

std::vector<std::string> ControlMembers::Unconnected(const Member& member) const {
  std::vector<std::string> names;
  if (!IsUp(member)) return names;
  if (!member.known.contains(kSchedulerNode)) names.push_back("scheduler");
  for (const auto& [id, other] : members_)
    if (NeedsPeer(member, other) && (!Connected(member, other) || bad_links_.Contains(member.worker, other.worker)))
      names.push_back(other.request.name);
  return names;
}

// Frames flow between the scheduler and every worker, between workers of different roles, and between attention workers
// when a sequence moves.
bool ControlMembers::NeedsPeer(const Member& member, const Member& other) const {
  const bool linked = member.request.role == Role::kAttentionWorker || options_.compute_links != ComputeLinks::kNone;
  return IsUp(member) && IsUp(other) &&
         (member.request.role != other.request.role || (linked && member.worker != other.worker));
}

// Neither can serve while the other does, unless they reach each other.
bool ControlMembers::MustReach(const Member& member, const Member& other) const {
  const bool between_compute =
      member.request.role == Role::kComputeWorker && other.request.role == Role::kComputeWorker;
  return NeedsPeer(member, other) && (!between_compute || options_.compute_links == ComputeLinks::kRequired);
}

bool ControlMembers::Connected(const Member& a, const Member& b) const {
  return a.known.contains(b.request.node) && b.known.contains(a.request.node);
}

// Of compute workers that serve: which pairs of them came to reach each other since it was told last, or do no more.
void ControlMembers::TellLinks(std::vector<MemberAction>& actions) {
  if (options_.compute_links != ComputeLinks::kWherePossible) return;
  const auto computes = [](const Member& member) {
    return member.request.role == Role::kComputeWorker && IsServing(member);
  };
  for (const auto& [one, member] : members_) {
    for (auto other = members_.upper_bound(one); computes(member) && other != members_.end(); ++other) {
      if (!computes(other->second)) continue;
      const BadLinks::Ends ends(one, other->first);
      const auto bad = bad_links_.links().find(ends);
      const bool linked = bad == bad_links_.links().end();
      if (linked && !Connected(member, other->second)) continue;  // not yet
      if (const auto told = told_links_.find(ends); told != told_links_.end() && told->second == linked) continue;
      told_links_[ends] = linked;
      actions.push_back(LinkComputeWorkers{one, other->first, linked, linked ? std::string() : bad->second.why});
    }
  }
}

}  // namespace dovetail::scheduler
