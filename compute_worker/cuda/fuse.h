#pragma once
#include <span>
#include <string_view>

#include "compute_worker/cuda/launch_list.h"

namespace dovetail::compute {

// What rules have to know of the steps that a list is for.
struct FuseFor {
  // In how many parts products of the step's rows leave what the next norm sums (CudaProduct::PartsFor); 1: in one.
  int parts = 1;
  // Rows have the same bits among any others (ComputeWorkerOptions::deterministic).
  bool in_order = false;
};

// Replaces launches that follow each other by fewer or cheaper ones that give the same x. A rule sees the list from
// `at` on; it changes nothing and returns false where it does not apply. Records that a rule takes out must have left
// nothing that is read later: scratch is read by the piece that wrote it only (launch_records.h).
// Threads: pure, thread-safe.
struct FusionRule {
  std::string_view name;
  bool (*apply)(LaunchList& list, size_t at, const FuseFor& shape);
};

// All of them, in the order in which they are tried. A new fused kernel is a record, a rule here, and how its record is
// launched (launch_runner.h).
std::span<const FusionRule> FusionRules();

// Applies each rule everywhere, one after the other.
LaunchList Fuse(LaunchList list, const FuseFor& shape);
// The same with these rules.
LaunchList Fuse(LaunchList list, const FuseFor& shape, std::span<const FusionRule> rules);

}  // namespace dovetail::compute
