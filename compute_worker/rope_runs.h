#pragma once
#include <algorithm>
#include <cstdint>
#include <list>
#include <utility>

#include "base/status.h"
#include "model/rope.h"
#include "proto/step_plan.h"

namespace dovetail::compute {

// What a CPU and a GPU share of a step's rotations: which rows have the same frequencies, and a cache of those.

// Rows of a step that follow each other and whose sequences share frequencies.
struct RopeRun {
  int64_t first = 0, rows = 0;
  int64_t length = 0, variant = 0;  // as model::MakeRopeTable and RopeVariant have them
};

// Calls `run` for each of the plan's, in order, until one fails. Allocates nothing.
// Errors: run's.
// Threads: thread-safe.
template <typename Run>
absl::Status ForEachRopeRun(const model::RopeSpec& spec, const proto::StepPlan& plan, const Run& run) {
  int64_t row = 0;
  for (size_t begin = 0; begin < plan.entries.size();) {
    const int64_t length = plan.entries[begin].rope_length;
    RopeRun found{.first = row, .length = length, .variant = model::RopeVariant(spec, length)};
    for (; begin < plan.entries.size() && model::RopeVariant(spec, plan.entries[begin].rope_length) == found.variant;
         ++begin)
      found.rows += static_cast<int64_t>(plan.entries[begin].tokens.size());
    row += found.rows;
    DT_RETURN_IF_ERROR(run(found));
  }
  return absl::OkStatus();
}

// Frequencies by rope of the config and variant, the last kMost that were used. `Table`: what a device keeps of them.
// Threads: thread-compatible.
template <typename Table>
class RopeCache {
 public:
  static constexpr size_t kMost = 256;

  // The table, made by `make` if it is not there; valid until the next call. Errors: make's.
  template <typename Make>
  absl::StatusOr<const Table*> Get(int rope, int64_t variant, const Make& make) {
    const auto it = std::find_if(kept_.begin(), kept_.end(),
                                 [&](const Kept& kept) { return kept.rope == rope && kept.variant == variant; });
    if (it != kept_.end()) {
      kept_.splice(kept_.begin(), kept_, it);
    } else {
      DT_ASSIGN_OR_RETURN(Table table, make());
      if (kept_.size() >= kMost) kept_.pop_back();
      kept_.push_front({rope, variant, std::move(table)});
    }
    return &kept_.front().table;
  }
  size_t size() const { return kept_.size(); }

 private:
  struct Kept {
    int rope = 0;
    int64_t variant = 0;
    Table table;
  };
  std::list<Kept> kept_;  // front: used last
};

}  // namespace dovetail::compute
