#pragma once
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "base/check.h"
#include "scheduler/core/events.h"

namespace dovetail::scheduler {

// The event that the core handles at the moment: when it happened, and what is asked for because of it. The parts of
// the core hold a reference to the one Turn of their core.
// Threads: thread-compatible.
class Turn {
 public:
  // `actions` outlives the turn; actions are appended.
  void Begin(absl::Time now, std::vector<Action>& actions) {
    now_ = now;
    actions_ = &actions;
  }
  void End() { actions_ = nullptr; }

  absl::Time now() const { return now_; }  // of the last turn, between turns

  template <typename A>
  void Act(A&& action) {
    static_assert(!std::is_lvalue_reference_v<A>, "actions are given away");
    DT_CHECK(actions_ != nullptr, "an action outside of a turn");
    actions_->emplace_back(std::in_place_type<A>, std::forward<A>(action));
  }
  // By reference all the way: an update is large, and there is one per sequence and step.
  void Emit(GenerationUpdate&& update) { actions_->emplace_back(std::in_place_type<EmitUpdate>, std::move(update)); }

  // The event is late, or of something unknown: it was dropped.
  void CountLate() { ++late_; }
  uint64_t late() const { return late_; }  // since the core began

 private:
  uint64_t late_ = 0;
  absl::Time now_;
  std::vector<Action>* actions_ = nullptr;
};

}  // namespace dovetail::scheduler
