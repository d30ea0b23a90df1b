#include "plan/layouts.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "proto/kv_blocks.h"

namespace dovetail::plan {
namespace {

using scheduler::PlacementPolicy;

constexpr double kGb = 1e9;
constexpr int64_t kMostWorkers = 64;  // of a cluster

const char* RoleName(Role role) {
  return role == Role::kCompute ? "compute" : role == Role::kAttention ? "attention" : "host";
}

std::string NameOf(const std::vector<Machines>& machines) {
  return absl::StrJoin(machines, ",", [](std::string* out, const Machines& m) {
    absl::StrAppend(out, RoleName(m.role), ".", m.device, ":", m.count);
  });
}

absl::StatusOr<LayoutPlan> Priced(const PlanInput& input, std::vector<Machines> machines) {
  LayoutPlan one;
  one.layout = {NameOf(machines), std::move(machines)};
  one.split = one.layout.Count(Role::kAttention) > 0;
  one.layout.machines.insert(one.layout.machines.end(), input.hosts.begin(), input.hosts.end());
  DT_ASSIGN_OR_RETURN(one.usd_low, UsdPerHour(one.layout, input.catalogue, PriceOf::kLow));
  DT_ASSIGN_OR_RETURN(one.usd_high, UsdPerHour(one.layout, input.catalogue, PriceOf::kHigh));
  return one;
}

std::vector<std::vector<Machines>> AllMachines(const PlanInput& input) {
  std::vector<std::vector<Machines>> all;
  for (const PlanDevice& compute : input.devices) {
    for (int64_t n = 1; n <= compute.most; ++n) all.push_back({{Role::kCompute, compute.profile.name, n}});
    for (const PlanDevice& attention : input.devices) {
      const bool same = &compute == &attention;
      for (int64_t c = 1; c <= std::min(compute.most, kMostWorkers); ++c)
        for (int64_t a = 1; a <= std::min(same ? compute.most - c : attention.most, kMostWorkers); ++a) {
          all.push_back({{Role::kCompute, compute.profile.name, c}, {Role::kAttention, attention.profile.name, a}});
          if (static_cast<int64_t>(all.size()) > kMostLayouts) return all;
        }
    }
  }
  return all;
}

absl::StatusOr<const DeviceProfile*> ProfileOf(const PlanInput& input, const LayoutPlan& layout, Role role) {
  const DeviceProfile* found = nullptr;
  for (const Machines& machines : layout.layout.machines) {
    if (machines.role != role) continue;
    if (found != nullptr && found->name != machines.device)
      return InvalidArgument(layout.layout.name, ": devices of one role are of one kind here");
    for (const PlanDevice& device : input.devices)
      if (device.profile.name == machines.device) found = &device.profile;
    if (found == nullptr)
      return NotFound(layout.layout.name, ": ", machines.device,
                      " has no profile; `dovetail bench device` on one of them writes it");
  }
  if (found == nullptr) return InvalidArgument(layout.layout.name, ": has no ", RoleName(role), " device");
  return found;
}

absl::StatusOr<LinkRates> LinkOf(const PlanInput& input, const DeviceProfile& a, const DeviceProfile& b) {
  if (input.link.has_value()) return *input.link;
  DT_ASSIGN_OR_RETURN(const LinkRates of_a, a.Link(input.lane));
  DT_ASSIGN_OR_RETURN(const LinkRates of_b, b.Link(input.lane));
  return LinkRates{input.lane, std::max(of_a.latency_s, of_b.latency_s), std::min(of_a.bytes_per_s, of_b.bytes_per_s)};
}

}  // namespace

absl::StatusOr<std::vector<LayoutPlan>> ListLayouts(const PlanInput& input) {
  std::vector<std::vector<Machines>> all = input.only.empty() ? AllMachines(input) : input.only;
  if (static_cast<int64_t>(all.size()) > kMostLayouts)
    return InvalidArgument("--devices: make more than ", kMostLayouts,
                           " layouts; allow fewer of each, or name some "
                           "with --layout");
  std::vector<LayoutPlan> plans;
  for (std::vector<Machines>& machines : all) {
    DT_ASSIGN_OR_RETURN(LayoutPlan one, Priced(input, std::move(machines)));
    plans.push_back(std::move(one));
  }
  const auto usd = [&](const LayoutPlan& one) { return input.price == PriceOf::kLow ? one.usd_low : one.usd_high; };
  std::stable_sort(plans.begin(), plans.end(),
                   [&](const LayoutPlan& a, const LayoutPlan& b) { return usd(a) < usd(b); });
  return plans;
}

absl::StatusOr<std::optional<Shape>> ShapeOf(const PlanInput& input, LayoutPlan& layout) {
  DT_ASSIGN_OR_RETURN(const DeviceProfile* compute, ProfileOf(input, layout, Role::kCompute));
  const DeviceProfile* attending = compute;
  std::optional<OtherDevice> other;
  if (layout.split) {
    DT_ASSIGN_OR_RETURN(attending, ProfileOf(input, layout, Role::kAttention));
    DT_ASSIGN_OR_RETURN(const LinkRates link, LinkOf(input, *compute, *attending));
    other = OtherDevice{*attending, link};
  }
  auto steps = StepModel::Create(input.work, *compute, other);
  if (!steps.ok()) return steps.status();
  const double weights = steps->weight_bytes();
  const auto room = [&](const DeviceProfile& device) { return device.memory_gb * kGb * input.memory_share; };
  if (weights > room(*compute)) {
    layout.impossible = absl::StrFormat("%.3g GB of weights do not fit %.3g GB of %s", weights / kGb,
                                        room(*compute) / kGb, compute->name);
    return std::optional<Shape>();
  }
  const double kv_bytes = room(*attending) - (layout.split ? 0 : weights);
  Shape shape{*std::move(steps)};
  shape.kv_blocks = static_cast<uint64_t>(kv_bytes / static_cast<double>(input.work.kv_block_bytes));
  const uint64_t least = 2 * proto::BlocksPerSegment(input.work.attention);
  if (shape.kv_blocks < least) {
    layout.impossible = absl::StrFormat("%.3g GB for K and V hold less than 128 tokens of a sequence", kv_bytes / kGb);
    return std::optional<Shape>();
  }
  const int64_t computes = layout.layout.Count(Role::kCompute);
  shape.replicas = layout.split ? 1 : static_cast<int>(computes);
  shape.compute_workers = layout.split ? static_cast<int>(computes) : 1;
  shape.attention_workers = layout.split ? static_cast<int>(layout.layout.Count(Role::kAttention)) : 1;
  return std::optional<Shape>(std::move(shape));
}

std::vector<Setting> SettingsOf(const Shape& shape) {
  std::vector<Setting> settings;
  for (const int micro_batches : {1, 2, 3})
    for (const PlacementPolicy placement : {PlacementPolicy::kRequest, PlacementPolicy::kHeads})
      for (const int ranks : {1, shape.compute_workers}) {
        if (placement == PlacementPolicy::kHeads && shape.attention_workers == 1) continue;
        if (ranks > proto::kMaxPrefillRanks ||
            (ranks == 1 && shape.compute_workers == 1 && !settings.empty() &&
             settings.back().micro_batches == micro_batches && settings.back().placement == placement))
          continue;
        settings.push_back({micro_batches, placement, ranks});
      }
  return settings;
}

SimulatedCluster ClusterOf(const PlanInput& input, const Shape& shape, const Setting& setting) {
  SimulatedCluster cluster;
  cluster.compute_workers = shape.compute_workers;
  cluster.attention_workers = shape.attention_workers;
  cluster.kv_blocks = shape.kv_blocks;
  scheduler::SchedulerOptions& options = cluster.options;
  options.max_num_seqs = input.max_num_seqs;
  options.max_num_batched_tokens = input.max_num_batched_tokens;
  options.prefill_itl_budget = input.prefill_itl_budget;
  options.max_model_len = static_cast<int>(input.work.max_positions);
  options.ChooseStepTokens(shape.steps.computes_on_gpu());
  options.max_queued_requests = std::max<int>(1, static_cast<int>(input.requests.size()));
  options.micro_batches = setting.micro_batches;
  options.enable_prefix_caching = false;
  options.prefill_ranks = setting.prefill_ranks;
  options.placement = setting.placement;
  options.attention = input.work.attention;
  return cluster;
}

}  // namespace dovetail::plan
