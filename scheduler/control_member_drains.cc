#include <utility>
#include <vector>

#include "scheduler/control_members.h"

// Members that are asked to go.

namespace dovetail::scheduler {

const Member* ControlMembers::PartnerOf(const Member& member) const {
  if (member.request.process == 0) return nullptr;
  for (const auto& [id, other] : members_)
    if (other.request.process == member.request.process && other.request.role != member.request.role) return &other;
  return nullptr;
}

absl::Status ControlMembers::Drain(WorkerId worker, std::vector<MemberAction>& actions) {
  const Member* member = Find(worker);
  if (member == nullptr) return NotFound("worker ", worker.value(), " is no member; `dovetail status` lists them");
  std::vector<WorkerId> all = {worker};
  if (const Member* partner = PartnerOf(*member); partner != nullptr) all.push_back(partner->worker);
  for (const WorkerId one : all) DrainOne(*Mutable(one), actions);
  return absl::OkStatus();
}

void ControlMembers::DrainOne(Member& member, std::vector<MemberAction>& actions) {
  if (member.state == MemberState::kDraining) return;
  if (member.state != MemberState::kServing) return Remove(member.worker, kDrained, /*dismissed=*/true, actions);
  member.state = MemberState::kDraining;
  actions.push_back(DrainMember{member.worker});
}

absl::Status ControlMembers::MayDrainAlone(WorkerId worker) const {
  const Member* member = Find(worker);
  if (member == nullptr) return absl::OkStatus();
  for (const auto& [id, other] : members_)
    if (id != worker && other.state == MemberState::kDraining && other.request.role == member->request.role)
      return absl::AbortedError(absl::StrCat(other.request.name, " drains"));
  return absl::OkStatus();
}

void ControlMembers::Drained(WorkerId worker, std::vector<MemberAction>& actions) {
  const Member* member = Find(worker);
  if (member == nullptr || member->state != MemberState::kDraining) return;
  Remove(worker, kDrained, /*dismissed=*/true, actions);
}

}  // namespace dovetail::scheduler
