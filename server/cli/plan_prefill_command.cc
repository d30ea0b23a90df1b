#include "server/cli/plan_prefill_command.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <memory>
#include <optional>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "compute_worker/attention_specs.h"
#include "compute_worker/prompt_scratch_size.h"
#include "engine/measurements/prefill_rates.h"
#include "kernels/thread_pool.h"
#include "model/checkpoint.h"
#include "model/dense_work.h"
#include "nlohmann/json.hpp"
#include "scheduler/core/prefill_table.h"
#include "server/cli/command_line.h"
#include "server/cli/engine_flags.h"
#include "server/cli/link_flag.h"
#include "server/cli/model_shape.h"

namespace dovetail::cli {
namespace {

using Json = nlohmann::ordered_json;

// Where nothing is measured or given: one H200 with an 8B model in bf16, its attention on prompts by cuDNN and the
// attention over earlier tokens by paged kernels (bench/results/2026-11-22-cuda-prompts.md).
constexpr double kAssumedDenseFlops = 600e12;
constexpr double kAssumedAttentionFlops = 594e12;
constexpr double kAssumedPlaneFlops = 304e12;

constexpr int64_t kMostTokens = int64_t{1} << 30;
constexpr int kMostRanks = 4096;

struct Rate {
  double value = 0;
  std::string source;  // measured, given or assumed
};

struct Rates {
  Rate dense_tokens, attention_flops, plane_flops;
};

absl::StatusOr<int64_t> ParseTokens(const std::string& flag, const std::string& text) {
  int64_t number = 0;
  int64_t factor = 1;
  std::string digits = text;
  if (!digits.empty() && (digits.back() == 'K' || digits.back() == 'k')) factor = 1024;
  if (!digits.empty() && (digits.back() == 'M' || digits.back() == 'm')) factor = 1024 * 1024;
  if (factor > 1) digits.pop_back();
  if (!absl::SimpleAtoi(digits, &number) || number < 0 || number > kMostTokens / factor)
    return InvalidArgument(flag, ": '", text, "' is no number of tokens up to 2^30; write 131072, 128K or 1M");
  return number * factor;
}

absl::StatusOr<std::vector<int>> ParseRanks(const std::string& text) {
  std::vector<int> ranks;
  for (const auto piece : absl::StrSplit(text, ',', absl::SkipWhitespace())) {
    int rank = 0;
    if (!absl::SimpleAtoi(piece, &rank) || rank < 1 || rank > kMostRanks)
      return InvalidArgument("--ranks: '", std::string(piece), "' is no number of ranks in 1..", kMostRanks,
                             "; write 8, or 4,8,16");
    ranks.push_back(rank);
  }
  if (ranks.empty()) return InvalidArgument("--ranks: is empty; write 8, or 4,8,16");
  return ranks;
}

absl::StatusOr<std::vector<LinkRate>> ParseLinks(const std::string& text) {
  std::vector<LinkRate> links;
  for (const auto piece : absl::StrSplit(text, ',', absl::SkipWhitespace())) {
    DT_ASSIGN_OR_RETURN(LinkRate link, ParseLink("--link", std::string(piece)));
    links.push_back(std::move(link));
  }
  if (links.empty()) return InvalidArgument("--link: is empty; write nvlink, rdma-400g, ethernet-25g or 12.5GB/s:10us");
  return links;
}

// {"dense_tokens_per_s": N, "attention_flops_per_s": N, "attention_worker_flops_per_s": N}, each of them or not.
absl::Status ReadRates(const std::string& path, Rates& rates) {
  std::ifstream file(path);
  if (!file) return absl::NotFoundError(absl::StrCat("--rates: cannot read ", path));
  const Json json = Json::parse(file, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return InvalidArgument("--rates: ", path, " holds no JSON object");
  for (const auto& [name, value] : json.items()) {
    Rate* const rate = name == "dense_tokens_per_s"             ? &rates.dense_tokens
                       : name == "attention_flops_per_s"        ? &rates.attention_flops
                       : name == "attention_worker_flops_per_s" ? &rates.plane_flops
                                                                : nullptr;
    if (rate == nullptr)
      return InvalidArgument("--rates: ", path, ": '", name,
                             "' is none of dense_tokens_per_s, attention_flops_per_s and attention_worker_flops_per_s");
    if (!value.is_number() || value.get<double>() <= 0)
      return InvalidArgument("--rates: ", path, ": ", name, " is no positive number");
    *rate = {value.get<double>(), "measured"};
  }
  return absl::OkStatus();
}

// An engine that takes a prompt in steps of so many tokens.
EngineFlags EngineOf(const PlanPrefillFlags& flags, int step_tokens) {
  EngineFlags engine;
  engine.model = flags.model;
  engine.kv_cache_dtype = flags.kv_cache_dtype;
  engine.device = "cpu";
  engine.threads = flags.threads;
  engine.max_num_seqs = 1;
  engine.max_num_batched_tokens = std::to_string(step_tokens);
  engine.max_model_len = engine::kPromptSteps * step_tokens + 8;
  engine.enable_prefix_caching = false;
  engine.prefill_exchange = "plane";  // with little scratch, attention workers are asked
  return engine;
}

absl::StatusOr<engine::PrefillRates> MeasureWith(const EngineFlags& flags, int step,
                                                 const proto::AttentionTable& attention,
                                                 std::optional<uint64_t> scratch_bytes) {
  DT_ASSIGN_OR_RETURN(const RunningEngine engine, StartEngine(flags, {}));
  engine::PromptSource prompts{static_cast<int>(engine.model->config().vocab_size)};
  DT_ASSIGN_OR_RETURN(const auto steps,
                      engine::MeasurePromptSteps(*engine.cluster, prompts, attention, step,
                                                 compute::PromptScratchBlocks(attention, step, scratch_bytes)));
  return engine::FitRates(steps);
}

// On this machine's CPU: once with all of a prompt in the scratch, and once with as little there as a step needs, so
// that the rest is asked about.
absl::Status Measure(const PlanPrefillFlags& flags, const model::Checkpoint& checkpoint,
                     const proto::AttentionTable& attention, Rates& rates) {
  const int64_t positions = checkpoint.config().max_positions;
  const int64_t longest = std::min<int64_t>(flags.max_num_batched_tokens, (positions - 8) / engine::kPromptSteps);
  const int step = static_cast<int>(longest / kSegmentTokens * kSegmentTokens);
  if (step < kSegmentTokens)
    return InvalidArgument("--measure: the model has ", positions, " positions, too few for ", engine::kPromptSteps,
                           " steps of ", kSegmentTokens, " tokens");
  EngineFlags engine = EngineOf(flags, step);
  DT_ASSIGN_OR_RETURN(const engine::PrefillRates here, MeasureWith(engine, step, attention, std::nullopt));
  rates.dense_tokens = {here.dense_tokens_per_s, "measured"};
  if (here.attention_flops_per_s > 0) rates.attention_flops = {here.attention_flops_per_s, "measured"};
  const uint64_t one_op = compute::PromptScratchBytesOfAStep(attention, step);
  if (one_op == 0) return absl::OkStatus();  // no softmax attention
  engine.prompt_scratch = std::to_string(one_op);
  DT_ASSIGN_OR_RETURN(const engine::PrefillRates asked, MeasureWith(engine, step, attention, one_op));
  if (asked.attention_worker_flops_per_s > 0) rates.plane_flops = {asked.attention_worker_flops_per_s, "measured"};
  return absl::OkStatus();
}

absl::StatusOr<Rates> RatesOf(const PlanPrefillFlags& flags, const model::Checkpoint& checkpoint,
                              const proto::AttentionTable& attention) {
  const double dense_flops_per_token = model::DenseFlopsPerToken(checkpoint.config());
  Rates rates{{kAssumedDenseFlops / dense_flops_per_token, "assumed"},
              {kAssumedAttentionFlops, "assumed"},
              {kAssumedPlaneFlops, "assumed"}};
  if (flags.measure) DT_RETURN_IF_ERROR(Measure(flags, checkpoint, attention, rates));
  if (!flags.rates.empty()) DT_RETURN_IF_ERROR(ReadRates(flags.rates, rates));
  if (flags.dense_tokens_per_s > 0) rates.dense_tokens = {flags.dense_tokens_per_s, "given"};
  if (flags.attention_tflops > 0) rates.attention_flops = {flags.attention_tflops * 1e12, "given"};
  if (flags.attention_worker_tflops > 0) rates.plane_flops = {flags.attention_worker_tflops * 1e12, "given"};
  return rates;
}

// Of exchanges that run, with rates that were measured, a time is a prediction; all others are simulated. A link is
// never measured here.
const char* LabelOf(const Rates& rates, const scheduler::PrefillTableRow& row, int ranks) {
  const bool measured = rates.dense_tokens.source == "measured" && rates.attention_flops.source == "measured";
  return measured && row.built && ranks == 1 ? "predicted" : "simulated";
}

std::string NameOf(const scheduler::PrefillTableRow& row) {
  if (row.softmax.empty()) return row.linear;
  return row.linear.empty() || row.linear == row.softmax ? row.softmax : absl::StrCat(row.softmax, " + ", row.linear);
}

struct Table {
  int ranks = 1;
  LinkRate link;
  std::vector<scheduler::PrefillTableRow> rows;
};

void Print(const Table& table, const Rates& rates) {
  std::printf("\n%d ranks, %s: %.4g GB/s, %.4g us a message\n", table.ranks, table.link.name.c_str(),
              table.link.bytes_per_s / 1e9, table.link.latency_s * 1e6);
  std::printf("  %-28s %-5s %14s %12s %9s %10s  %-28s %s\n", "exchange", "built", "MiB of a rank", "seconds",
              "speed-up", "efficiency", "most of it is", "");
  for (const auto& row : table.rows) {
    if (!row.possible) {
      std::printf("  %-28s %-5s not possible: %s\n", NameOf(row).c_str(), row.built ? "yes" : "no",
                  row.why_not.c_str());
      continue;
    }
    std::printf("  %-28s %-5s %14.2f %12.4g %8.2fx %9.0f%%  %-28s %s\n", NameOf(row).c_str(), row.built ? "yes" : "no",
                static_cast<double>(row.rank_bytes) / (1 << 20), row.seconds, row.speedup, 100 * row.efficiency,
                scheduler::NameOf(row.bound), LabelOf(rates, row, table.ranks));
  }
}

Json JsonOf(const Rate& rate, const char* unit) {
  return {{"value", rate.value}, {"unit", unit}, {"source", rate.source}};
}

Json JsonOf(const Table& table, const Rates& rates) {
  Json rows = Json::array();
  for (const auto& row : table.rows) {
    Json one = {{"exchange", NameOf(row)}, {"built", row.built}, {"possible", row.possible}};
    if (!row.possible) one["why_not"] = row.why_not;
    one["rank_bytes"] = row.rank_bytes;
    one["total_bytes"] = row.total_bytes;
    if (row.built)
      one["bytes"] = {{"plane", row.traffic.asked_bytes},          {"gather", row.traffic.gathered_bytes},
                      {"state", row.traffic.state_bytes},          {"chain", row.traffic.chain_bytes},
                      {"gather-direct", row.traffic.direct_bytes}, {"ring", row.traffic.ring_bytes},
                      {"switch", row.traffic.switch_bytes},        {"pass-q", row.traffic.pass_q_bytes}};
    one["seconds"] = row.seconds;
    one["time_is"] = LabelOf(rates, row, table.ranks);
    one["most_of_it_is"] = scheduler::NameOf(row.bound);
    one["speedup"] = row.speedup;
    one["efficiency"] = row.efficiency;
    rows.push_back(std::move(one));
  }
  return {{"ranks", table.ranks},
          {"link",
           {{"name", table.link.name},
            {"bytes_per_s", table.link.bytes_per_s},
            {"latency_s", table.link.latency_s},
            {"source", "given"}}},
          {"exchanges", rows}};
}

void PrintHead(const PlanPrefillFlags& flags, const Rates& rates, const scheduler::PrefillTableInput& input) {
  std::printf("%s: a prompt of %lld tokens after %lld cached ones\n", flags.model.c_str(),
              static_cast<long long>(input.new_tokens), static_cast<long long>(input.earlier_tokens));
  std::printf("bytes are exact; times are simulated unless the line says otherwise\n");
  std::printf("a rank: dense layers %.4g tokens/s (%s), attention %.4g TFLOP/s (%s)\n", rates.dense_tokens.value,
              rates.dense_tokens.source.c_str(), rates.attention_flops.value / 1e12,
              rates.attention_flops.source.c_str());
  std::printf("attention workers together: %.4g TFLOP/s (%s)\n", rates.plane_flops.value / 1e12,
              rates.plane_flops.source.c_str());
}

absl::StatusOr<uint32_t> ScratchBlocks(const PlanPrefillFlags& flags, const proto::AttentionTable& table) {
  std::optional<uint64_t> bytes;
  if (flags.prompt_scratch != "auto") {
    DT_ASSIGN_OR_RETURN(bytes, ParseBytes("--prompt-scratch", flags.prompt_scratch, "auto"));
  }
  return compute::PromptScratchBlocks(table, flags.max_num_batched_tokens, bytes);
}

void AddClusterFlags(CLI::App& command, PlanPrefillFlags& flags) {
  command.add_option("--ranks", flags.ranks, "Compute workers that take it together: 8, or 4,8,16")
      ->type_name("N,...")
      ->group("Cluster");
  command
      .add_option(
          "--link", flags.links,
          "Links between workers: nvlink (450 GB/s, 2 us), rdma-400g (50 GB/s, 5 us), ethernet-25g (3.125 GB/s, "
          "30 us), or bandwidth and latency as 12.5GB/s:10us; several with commas")
      ->type_name("LINK,...")
      ->group("Cluster");
  command.add_option("--max-num-batched-tokens", flags.max_num_batched_tokens, "New tokens of a step, a rank")
      ->check(WholeNumber(kSegmentTokens, proto::kMaxStepTokens))
      ->type_name("TOKENS")
      ->group("Cluster");
  command.add_option("--prefill-rank-tokens", flags.prefill_rank_tokens, "The least that a rank gets of a prompt")
      ->check(WholeNumber(kSegmentTokens, proto::kMaxStepTokens))
      ->type_name("TOKENS")
      ->group("Cluster");
  command
      .add_option("--prompt-scratch", flags.prompt_scratch,
                  "Memory of a rank for K and V of prompts, as 512MiB; auto: as compute workers have it")
      ->type_name("SIZE")
      ->group("Cluster");
  command.add_option("--kv-cache-dtype", flags.kv_cache_dtype, "K and V on the wire: bfloat16, float16, float32; auto")
      ->check(OneOf({"auto", "bfloat16", "float16", "float32"}))
      ->type_name("TYPE")
      ->group("Cluster");
}

void AddRateFlags(CLI::App& command, PlanPrefillFlags& flags) {
  command
      .add_option("--rates", flags.rates,
                  "A JSON file of measured rates: dense_tokens_per_s, attention_flops_per_s, "
                  "attention_worker_flops_per_s")
      ->type_name("FILE")
      ->group("Rates");
  command
      .add_flag(
          "--measure", flags.measure,
          "Load the model and measure rates on this machine's CPU, with --threads for a rank and for the attention "
          "worker")
      ->group("Rates");
  command.add_option("--threads", flags.threads, "Threads to measure with; 0: one per core")
      ->check(WholeNumber(0, kernels::ThreadPool::kMaxThreads, "0 takes one per core"))
      ->type_name("N")
      ->group("Rates");
  command
      .add_option("--dense-rate", flags.dense_tokens_per_s,
                  "Tokens/s of a rank's dense and linear layers; 0: 600 TFLOP/s, assumed")
      ->check(Number(0, 1e12))
      ->type_name("TOKENS/S")
      ->group("Rates");
  command
      .add_option("--attention-rate", flags.attention_tflops,
                  "TFLOP/s of a rank's attention over prompts; 0: 594, assumed")
      ->check(Number(0, 1e9))
      ->type_name("TFLOP/S")
      ->group("Rates");
  command
      .add_option("--attention-worker-rate", flags.attention_worker_tflops,
                  "TFLOP/s of all attention workers together, over prompts; 0: 304, assumed")
      ->check(Number(0, 1e9))
      ->type_name("TFLOP/S")
      ->group("Rates");
}

}  // namespace

void AddPlanPrefillFlags(CLI::App& command, PlanPrefillFlags& flags) {
  command
      .add_option(
          "MODEL", flags.model,
          "A .gguf file, or a Hugging Face folder, of which config.json is enough; weights are read by --measure alone")
      ->required();
  command.add_option("--tokens", flags.tokens, "New tokens of the prompt: 131072, 128K or 1M")
      ->type_name("TOKENS")
      ->group("Prompt");
  command.add_option("--cached-tokens", flags.cached_tokens, "Tokens before them that lie on attention workers")
      ->type_name("TOKENS")
      ->group("Prompt");
  AddClusterFlags(command, flags);
  AddRateFlags(command, flags);
  command.add_flag("--json", flags.json, "Print JSON")->group("Output");
}

absl::Status RunPlanPrefill(const PlanPrefillFlags& flags) {
  scheduler::PrefillTableInput input;
  DT_ASSIGN_OR_RETURN(input.new_tokens, ParseTokens("--tokens", flags.tokens));
  if (input.new_tokens == 0) return InvalidArgument("--tokens: 0 tokens are no prompt; write 128K");
  DT_ASSIGN_OR_RETURN(input.earlier_tokens, ParseTokens("--cached-tokens", flags.cached_tokens));
  DT_ASSIGN_OR_RETURN(const std::vector<int> ranks, ParseRanks(flags.ranks));
  DT_ASSIGN_OR_RETURN(const std::vector<LinkRate> links, ParseLinks(flags.links));
  DT_ASSIGN_OR_RETURN(const auto checkpoint, OpenShape(flags.model));
  EngineFlags types;
  types.kv_cache_dtype = flags.kv_cache_dtype;
  DT_ASSIGN_OR_RETURN(input.attention, compute::AttentionTableOf(checkpoint->config(), KvDtypeOf(types), DType::kF32));
  DT_ASSIGN_OR_RETURN(input.scratch_blocks, ScratchBlocks(flags, input.attention));
  DT_ASSIGN_OR_RETURN(const Rates rates, RatesOf(flags, *checkpoint, input.attention));
  input.hidden = checkpoint->config().hidden_size;
  input.max_step_tokens = flags.max_num_batched_tokens;
  input.rank_tokens = flags.prefill_rank_tokens;
  input.token_s = 1 / rates.dense_tokens.value;
  input.flop_s = 1 / rates.attention_flops.value;
  input.plane_flop_s = 1 / rates.plane_flops.value;
  Json tables = Json::array();
  if (!flags.json) PrintHead(flags, rates, input);
  for (const LinkRate& link : links) {
    for (const int n : ranks) {
      input.ranks = n;
      input.link_byte_s = 1 / link.bytes_per_s;
      input.link_latency_s = link.latency_s;
      const Table table{n, link, scheduler::MakePrefillTable(input)};
      if (flags.json)
        tables.push_back(JsonOf(table, rates));
      else
        Print(table, rates);
    }
  }
  if (!flags.json) return absl::OkStatus();
  const Json all = {{"model", flags.model},
                    {"new_tokens", input.new_tokens},
                    {"cached_tokens", input.earlier_tokens},
                    {"rates",
                     {{"dense", JsonOf(rates.dense_tokens, "tokens/s of a rank")},
                      {"attention", JsonOf(rates.attention_flops, "FLOP/s of a rank")},
                      {"attention_workers", JsonOf(rates.plane_flops, "FLOP/s together")}}},
                    {"plans", tables}};
  std::printf("%s\n", all.dump(2).c_str());
  return absl::OkStatus();
}

}  // namespace dovetail::cli
