#include "server/cli/plan_command.h"

#include <cstdio>

#include "plan/planner.h"
#include "server/cli/command_line.h"
#include "server/cli/engine_flags.h"
#include "server/cli/itl_budget_flag.h"
#include "server/cli/plan_curves.h"
#include "server/cli/plan_html_report.h"
#include "server/cli/plan_inputs.h"
#include "server/cli/plan_measured.h"
#include "server/cli/plan_report.h"
#include "server/cli/report_file.h"

namespace dovetail::cli {
namespace {

constexpr int64_t kMostPrompts = 100'000;

template <typename Value>
CLI::Option* Add(CLI::App& command, const char* group, const char* flag, Value& value, const std::string& text,
                 const char* type) {
  return command.add_option(flag, value, text)->type_name(type)->group(group);
}

void AddMachineFlags(CLI::App& command, PlanFlags& f) {
  constexpr const char* kGroup = "Machines";
  Add(command, kGroup, "--devices", f.devices, "What may be used, and how many of each at most", "DEVICE:COUNT,...");
  Add(command, kGroup, "--profile", f.profiles, "Of each device, as `dovetail bench device` writes it", "FILE");
  Add(command, kGroup, "--layout", f.layouts,
      "Predict this layout, in place of looking for the cheapest; compute devices alone are servers of their own. Can "
      "be "
      "given several times",
      "ROLE.DEVICE:COUNT,...");
  Add(command, kGroup, "--hosts", f.hosts, "Machines of schedulers and servers, which are paid for with each layout",
      "DEVICE:COUNT,...");
  Add(command, kGroup, "--link", f.link,
      "Between compute and attention workers: shm or tcp as profiles have it; nvlink, rdma-400g, ethernet-25g; or "
      "bandwidth and latency as 12.5GB/s:10us",
      "LINK");
  Add(command, kGroup, "--memory-share", f.memory_share, "Of a device's memory, for weights and for K and V", "SHARE")
      ->check(Number(0.01, 1));
}

void AddWorkloadFlags(CLI::App& command, PlanFlags& f) {
  constexpr const char* kGroup = "Workload";
  Add(command, kGroup, "--workload", f.workload,
      "Tokens of prompts and answers, as 1024/128; or a trace: JSON lines (Mooncake's) or Azure's CSV, gzip or not",
      "IN/OUT|FILE")
      ->required();
  Add(command, kGroup, "--request-rate", f.request_rate, "Without a trace: requests a second; inf: all at once",
      "RATE");
  Add(command, kGroup, "--burstiness", f.burstiness, "Without a trace: 1 is Poisson, less comes in bursts", "B");
  Add(command, kGroup, "--range-ratio", f.range_ratio, "Without a trace: lengths vary by this share", "R")
      ->check(Number(0, 1));
  Add(command, kGroup, "--num-prompts", f.num_prompts, "Requests that are simulated; of a trace the first ones", "N")
      ->check(WholeNumber(1, kMostPrompts));
  Add(command, kGroup, "--seed", f.seed, "Of arrivals and lengths", "N");
  Add(command, kGroup, "--time-scale", f.time_scale, "Times of the trace are multiplied by this", "X")
      ->check(Number(1e-6, 1e6));
  Add(command, kGroup, "--length-scale", f.length_scale, "Lengths of the trace are multiplied by this", "X")
      ->check(Number(1e-6, 1e6));
  Add(command, kGroup, "--timed-trace-sec-multiplier", f.trace_sec_multiplier,
      "0.001 where the trace's times are milliseconds", "X")
      ->check(Number(1e-9, 1e9));
}

void AddGoalFlags(CLI::App& command, PlanFlags& f) {
  constexpr const char* kGroup = "Goal";
  Add(command, kGroup, "--slo", f.slo, "Limits in milliseconds: ttft:500 tpot:50 e2el:5000", "NAME:MS")
      ->expected(1, -1);
  Add(command, kGroup, "--slo-share", f.slo_share, "Of the requests, that have to keep to them", "SHARE")
      ->check(Number(0.01, 1));
  Add(command, kGroup, "--budget", f.budget, "Dollars an hour that a layout may cost; 0: any", "USD")
      ->check(Number(0, 1e9));
  AddPriceFlags(command, f.prices, kGroup);
  Add(command, kGroup, "--by", f.price_by, "Compare by the low or the high prices of the table", "low|high")
      ->check(OneOf({"low", "high"}));
  Add(command, kGroup, "--utilization", f.utilization, "Share of the hours paid for that are under this load", "SHARE")
      ->check(Number(0.001, 1));
}

void AddEngineLimits(CLI::App& command, PlanFlags& f) {
  constexpr const char* kGroup = "Engine";
  Add(command, kGroup, "--kv-cache-dtype", f.kv_cache_dtype,
      "K and V in memory: bfloat16, float16, float32, int8, fp8_e4m3; auto: bfloat16", "TYPE")
      ->check(OneOf({"auto", "bfloat16", "float16", "float32", "int8", "int8_per_token_head", "fp8", "fp8_e4m3"}));
  Add(command, kGroup, "--max-model-len", f.max_model_len, "Tokens of a sequence; 0: the model's positions", "TOKENS")
      ->check(WholeNumber(0, int64_t{1} << 26));
  Add(command, kGroup, "--max-num-seqs", f.max_num_seqs, "Sequences that run at a time, of a server", "N")
      ->check(WholeNumber(1, proto::kMaxStepEntries));
  Add(command, kGroup, "--max-num-batched-tokens", f.max_num_batched_tokens,
      "New tokens of a step; 0: what a server takes by default, on a CPU or a GPU", "TOKENS")
      ->check(WholeNumber(1, proto::kMaxStepTokens));
  AddItlBudgetFlag(command, kGroup, f.prefill_itl_budget);
}

absl::Status WritePlanReport(const PlanFlags& flags, const plan::PlanInput& input, const plan::Plan& plan,
                             const std::vector<MeasuredLoad>& measured) {
  if (flags.report.empty()) return absl::OkStatus();
  DT_ASSIGN_OR_RETURN(const PlanCurves curves, CurvesOf(input, plan));
  DT_ASSIGN_OR_RETURN(const auto break_even, BreakEvenOf(input, plan));
  return WriteReport(PlanReport(input, plan, curves, measured, break_even), flags.report);
}

}  // namespace

void AddPlanFlags(CLI::App& command, PlanFlags& flags) {
  command
      .add_option("MODEL", flags.model,
                  "A .gguf file, or a Hugging Face folder, of which config.json is enough; weights are not loaded")
      ->required();
  AddMachineFlags(command, flags);
  AddWorkloadFlags(command, flags);
  AddGoalFlags(command, flags);
  AddEngineLimits(command, flags);
  command.add_flag("--json", flags.json, "Print JSON")->group("Output");
  Add(command, "Output", "--measured", flags.measured,
      "What `dovetail bench serve` measured on a layout of the plan under this load, to be set against its prediction. "
      "Can be given several times",
      "LAYOUT=RESULT.json");
  Add(command, "Output", "--report", flags.report,
      std::string(kReportHelp) + ". Takes about ten times as long, as other loads and limits are tried for it",
      "FILE.html");
}

absl::Status RunPlan(const PlanFlags& flags) {
  DT_RETURN_IF_ERROR(CheckReportPath(flags.report));
  DT_ASSIGN_OR_RETURN(const plan::PlanInput input, ReadPlanInput(flags));
  DT_ASSIGN_OR_RETURN(const plan::Plan plan, plan::MakePlan(input));
  std::vector<MeasuredLoad> measured;
  for (const std::string& text : flags.measured) {
    DT_ASSIGN_OR_RETURN(MeasuredLoad load, ReadMeasured(text, plan));
    measured.push_back(std::move(load));
  }
  std::fputs((flags.json ? PlanJson : PlanTable)(input, plan, measured).c_str(), stdout);
  DT_RETURN_IF_ERROR(WritePlanReport(flags, input, plan, measured));
  if (!plan.best.has_value() && flags.layouts.empty()) return FailedPrecondition(NoLayoutText(input, plan));
  return absl::OkStatus();
}

}  // namespace dovetail::cli
