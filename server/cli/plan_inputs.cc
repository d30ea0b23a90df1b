#include "server/cli/plan_inputs.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "absl/strings/numbers.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "compute_worker/attention_specs.h"
#include "loadgen/arrivals.h"
#include "loadgen/datasets/dataset.h"
#include "loadgen/datasets/trace_rows.h"
#include "server/cli/bench_serve_flags.h"
#include "server/cli/engine_flags.h"
#include "server/cli/itl_budget_flag.h"
#include "server/cli/link_flag.h"
#include "server/cli/model_shape.h"
#include "server/cli/text_file.h"

namespace dovetail::cli {
namespace {

constexpr int64_t kMostDevices = 1000;  // of one kind
constexpr int64_t kMostTokens = int64_t{1} << 24;

struct Named {
  std::string name;
  int64_t count = 1;
};

// "a:2,b".
absl::StatusOr<std::vector<Named>> ReadNames(const std::string& flag, const std::string& text) {
  std::vector<Named> all;
  for (const std::string& part : std::vector<std::string>(absl::StrSplit(text, ',', absl::SkipEmpty()))) {
    const std::vector<std::string> pieces = absl::StrSplit(part, ':');
    Named one{pieces[0], 1};
    if (one.name.empty() || pieces.size() > 2 ||
        (pieces.size() == 2 && (!absl::SimpleAtoi(pieces[1], &one.count) || one.count < 1 || one.count > kMostDevices)))
      return InvalidArgument(flag, ": '", part, "' is not DEVICE:COUNT with a count in 1..", kMostDevices);
    for (const Named& other : all)
      if (other.name == one.name) return InvalidArgument(flag, ": names ", one.name, " twice");
    all.push_back(std::move(one));
  }
  return all;
}

absl::StatusOr<std::vector<plan::DeviceProfile>> ReadProfiles(const std::vector<std::string>& paths) {
  std::vector<plan::DeviceProfile> profiles;
  for (const std::string& path : paths) {
    DT_ASSIGN_OR_RETURN(const std::string text, ReadText(path));
    DT_ASSIGN_OR_RETURN(plan::DeviceProfile profile, plan::ParseDeviceProfile(text, path));
    for (const plan::DeviceProfile& other : profiles)
      if (other.name == profile.name)
        return InvalidArgument("--profile: ", path, ": a second profile of ", profile.name);
    profiles.push_back(std::move(profile));
  }
  return profiles;
}

absl::StatusOr<plan::PlanDevice> FindDevice(const Named& named, const std::vector<plan::DeviceProfile>& profiles,
                                            const plan::Catalogue& catalogue) {
  std::vector<std::string> known;
  for (const plan::DeviceProfile& profile : profiles) {
    if (profile.name == named.name) {
      DT_RETURN_IF_ERROR(catalogue.Find(named.name).status());  // says that it has no price
      return plan::PlanDevice{profile, named.count};
    }
    known.push_back(profile.name);
  }
  const std::string profiled =
      known.empty() ? "no --profile was given" : "there are profiles of " + absl::StrJoin(known, ", ");
  if (catalogue.Find(named.name).ok())
    return NotFound("--devices: ", named.name, " has a price and no profile, so nothing is known of its speed; ",
                    profiled, "; `dovetail bench device --name ", named.name, "` on such a machine writes one");
  return NotFound("--devices: there is no device ", named.name, "; ", profiled);
}

absl::Status ReadDevices(const PlanFlags& flags, plan::PlanInput& input) {
  DT_ASSIGN_OR_RETURN(const auto profiles, ReadProfiles(flags.profiles));
  if (!flags.layouts.empty() && !flags.devices.empty())
    return InvalidArgument("--layout: names the machines; leave --devices out");
  DT_ASSIGN_OR_RETURN(std::vector<Named> names, ReadNames("--devices", flags.devices));
  for (const std::string& text : flags.layouts) {
    auto machines = plan::ParseMachines(text);
    if (!machines.ok()) return Annotate(machines.status(), "--layout");
    for (const plan::Machines& one : *machines) {
      const bool known = std::any_of(names.begin(), names.end(), [&](const Named& n) { return n.name == one.device; });
      if (!known && one.role != plan::Role::kHost) names.push_back({one.device, one.count});
    }
    input.only.push_back(*std::move(machines));
  }
  if (names.empty()) return InvalidArgument("--devices: names none; write as many as may be used, as epyc-zen4:4");
  for (const Named& named : names) {
    DT_ASSIGN_OR_RETURN(plan::PlanDevice device, FindDevice(named, profiles, input.catalogue));
    input.devices.push_back(std::move(device));
  }
  DT_ASSIGN_OR_RETURN(const std::vector<Named> hosts, ReadNames("--hosts", flags.hosts));
  for (const Named& host : hosts) {
    DT_RETURN_IF_ERROR(input.catalogue.Find(host.name).status());
    input.hosts.push_back({plan::Role::kHost, host.name, host.count});
  }
  return absl::OkStatus();
}

absl::Status ReadLink(const PlanFlags& flags, plan::PlanInput& input) {
  if (flags.link == "shm" || flags.link == "tcp") {
    input.lane = flags.link;
    return absl::OkStatus();
  }
  DT_ASSIGN_OR_RETURN(const LinkRate link, ParseLink("--link", flags.link));
  input.link = plan::LinkRates{link.name, link.latency_s, link.bytes_per_s};
  return absl::OkStatus();
}

absl::Status ReadModel(const PlanFlags& flags, plan::PlanInput& input) {
  DT_ASSIGN_OR_RETURN(const auto checkpoint, OpenShape(flags.model));
  EngineFlags types;
  types.kv_cache_dtype = flags.kv_cache_dtype;
  DT_ASSIGN_OR_RETURN(const proto::AttentionTable table,
                      compute::AttentionTableOf(checkpoint->config(), KvDtypeOf(types), DType::kF32));
  const KvStorage storage = KvStorageOf(types.kv_cache_dtype);
  DT_RETURN_IF_ERROR(attention::CheckKvStorage(table, storage, /*gpu=*/""));
  DT_ASSIGN_OR_RETURN(input.work, WorkOf(*checkpoint, table, storage));
  if (flags.max_model_len > input.work.max_positions)
    return InvalidArgument("--max-model-len: ", flags.max_model_len, " is more than the model's ",
                           input.work.max_positions, " positions");
  if (flags.max_model_len > 0) input.work.max_positions = flags.max_model_len;
  return absl::OkStatus();
}

// "1024/128".
bool ParseLengths(const std::string& text, int64_t& input, int64_t& output) {
  const std::vector<std::string> parts = absl::StrSplit(text, '/');
  return parts.size() == 2 && absl::SimpleAtoi(parts[0], &input) && absl::SimpleAtoi(parts[1], &output);
}

absl::StatusOr<double> ReadRate(const std::string& flag, const std::string& text) {
  double rate = 0;
  if (!absl::SimpleAtod(text, &rate) || !(rate > 0))
    return InvalidArgument(flag, ": '", text, "' is no number above 0, nor inf");
  return rate;
}

absl::Status ReadSynthetic(const PlanFlags& flags, int64_t in, int64_t out, plan::PlanInput& input) {
  if (in < 1 || out < 1 || in > kMostTokens || out > kMostTokens)
    return InvalidArgument("--workload: '", flags.workload, "': lengths are in 1..", kMostTokens);
  loadgen::ArrivalOptions arrivals;
  DT_ASSIGN_OR_RETURN(arrivals.request_rate, ReadRate("--request-rate", flags.request_rate));
  DT_ASSIGN_OR_RETURN(arrivals.burstiness, ReadRate("--burstiness", flags.burstiness));
  DT_RETURN_IF_ERROR(arrivals.Validate());
  const std::vector<double> times = loadgen::ArrivalTimes(arrivals, flags.num_prompts, flags.seed);
  std::mt19937_64 random(flags.seed);
  const auto around = [&](int64_t mean) {
    const double low = std::floor(static_cast<double>(mean) * (1 - flags.range_ratio));
    const double high = std::ceil(static_cast<double>(mean) * (1 + flags.range_ratio));
    const auto span = static_cast<uint64_t>(high - low) + 1;
    return std::max<int64_t>(1, static_cast<int64_t>(low) + static_cast<int64_t>(random() % span));
  };
  for (const double at : times) {
    const int64_t length = around(in);
    input.requests.push_back({at, length, around(out)});
  }
  return absl::OkStatus();
}

absl::Status CheckLength(const plan::PlanInput& input, const std::string& place, int64_t in, int64_t out) {
  if (in + out <= input.work.max_positions) return absl::OkStatus();
  return InvalidArgument(place, ": ", in, " and ", out, " tokens are more than the model's ", input.work.max_positions,
                         " positions");
}

absl::Status ReadTrace(const PlanFlags& flags, plan::PlanInput& input) {
  loadgen::DatasetOptions options;
  options.path = flags.workload;
  options.num_prompts = flags.num_prompts;
  options.trace_sec_multiplier = flags.trace_sec_multiplier;
  auto rows = loadgen::ReadTraceRows(options);
  if (!rows.ok()) return Annotate(rows.status(), "--workload");
  const auto scaled = [&](int64_t tokens) {
    return std::max<int64_t>(1, std::llround(static_cast<double>(tokens) * flags.length_scale));
  };
  for (const loadgen::TraceRow& row : *rows) {
    const int64_t in = scaled(row.input_len), out = scaled(row.output_len);
    DT_RETURN_IF_ERROR(CheckLength(input, absl::StrCat("--workload: ", flags.workload, ": line ", row.line), in, out));
    input.requests.push_back({row.at_s * flags.time_scale, in, out});
  }
  return absl::OkStatus();
}

absl::Status ReadWorkload(const PlanFlags& flags, plan::PlanInput& input) {
  int64_t in = 0, out = 0;
  if (!ParseLengths(flags.workload, in, out)) return ReadTrace(flags, input);
  DT_RETURN_IF_ERROR(ReadSynthetic(flags, in, out, input));
  for (const plan::SimulatedRequest& request : input.requests)
    DT_RETURN_IF_ERROR(CheckLength(input, "--workload: " + flags.workload, request.input, request.output));
  return absl::OkStatus();
}

absl::Status ReadSlo(const PlanFlags& flags, plan::PlanInput& input) {
  DT_ASSIGN_OR_RETURN(const loadgen::Goodput limits, ReadLimits("--slo", flags.slo));
  const auto seconds = [](const std::optional<double>& ms) {
    return ms.has_value() ? std::optional<double>(*ms / 1e3) : std::nullopt;
  };
  input.slo = {seconds(limits.ttft_ms), seconds(limits.tpot_ms), seconds(limits.e2el_ms), flags.slo_share};
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<plan::PlanInput> ReadPlanInput(const PlanFlags& flags) {
  plan::PlanInput input;
  DT_ASSIGN_OR_RETURN(input.catalogue, ReadPrices(flags.prices));
  DT_RETURN_IF_ERROR(ReadDevices(flags, input));
  DT_RETURN_IF_ERROR(ReadLink(flags, input));
  DT_RETURN_IF_ERROR(ReadSlo(flags, input));
  DT_RETURN_IF_ERROR(ReadModel(flags, input));
  DT_RETURN_IF_ERROR(ReadWorkload(flags, input));
  if (flags.budget > 0) input.budget = flags.budget;
  input.price = flags.price_by == "low" ? plan::PriceOf::kLow : plan::PriceOf::kHigh;
  input.utilization = flags.utilization;
  input.memory_share = flags.memory_share;
  input.max_num_seqs = flags.max_num_seqs;
  input.max_num_batched_tokens = flags.max_num_batched_tokens;
  input.prefill_itl_budget = ItlBudgetOf(flags.prefill_itl_budget);
  if (input.max_num_batched_tokens != 0 && input.max_num_batched_tokens < input.max_num_seqs)
    return InvalidArgument("--max-num-batched-tokens: ", input.max_num_batched_tokens, " is less than --max-num-seqs ",
                           input.max_num_seqs);
  return input;
}

}  // namespace dovetail::cli
