// How much longer prompts take by what the planner chooses than by the best way that could have been forced. Simulated:
// workers have rates that the planner does not know, their steps vary, and ranks may share cores, which no rate says.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <random>

#include "proto/head_switch.h"
#include "scheduler/core/prefill_planner.h"

namespace dovetail::scheduler {
namespace {

using proto::LinearExchange;
using proto::PrefixExchange;

constexpr int kStepTokens = 512, kRankTokens = 128;
constexpr WorkerId kAttention{1};

// A host of workers, as it is.
struct Host {
  int workers = 2;
  ComputeRates compute;
  PlaneRates plane;
  double shares_cores = 0;  // how much longer a step takes for each further rank
};

struct Prompt {
  Position cached = 0, tokens = 0;
};

proto::AttentionTable FourOps() {
  const proto::SoftmaxSpec spec{.query_heads = 8, .kv_heads = 2, .key_dim = 64, .value_dim = 64, .scale = 1};
  return *proto::AttentionTable::Build({spec, spec, spec, spec});
}

proto::AttentionTable Hybrid() {
  const proto::SoftmaxSpec softmax{.query_heads = 8, .kv_heads = 2, .key_dim = 64, .value_dim = 64, .scale = 1};
  const proto::LinearSpec linear{.heads = 8, .key_dim = 64, .value_dim = 64, .token_decay = true};
  return *proto::AttentionTable::Build({linear, linear, linear, softmax}, std::vector<proto::LinearConstants>(4));
}

class Simulation {
 public:
  Simulation(const Host& host, const proto::AttentionTable& table, const PrefillPlannerOptions& options, uint64_t seed)
      : host_(host), table_(table), planner_(table, options), random_(seed) {
    for (int w = 0; w < host.workers; ++w)
      for (int other = 0; other < w; ++other) planner_.Link(Worker(other), Worker(w), true);
  }

  // Seconds.
  double Take(const Prompt& prompt, int most_ranks) {
    held_.assign(static_cast<size_t>(host_.workers), {});
    double seconds = 0;
    const Position end = prompt.cached + prompt.tokens;
    for (Position base = prompt.cached; base < end;) seconds += Step({base, end, where_}, most_ranks, base);
    return seconds;
  }

 private:
  static WorkerId Worker(int w) { return WorkerId(static_cast<uint32_t>(10 + w)); }

  // A group, or an ordinary step of the first worker; `base` moves on.
  double Step(const PromptToPlan& prompt, int most_ranks, Position& base) {
    std::vector<FreeRank> free;
    for (int w = 0; w < host_.workers; ++w) free.push_back({Worker(w), held_[w]});
    PrefillChoice choice = planner_.Choose(prompt, free, most_ranks);
    if (choice.ranks() == 1) {
      const int tokens = static_cast<int>(choice.cuts[1] - choice.cuts[0]);
      choice.free_rank = {0};
      choice.forecast = planner_.ChooseExchange(prompt, free[0], tokens);
    }
    std::vector<StepWork> work;
    const int ranks = choice.ranks();
    for (int r = 0; r < ranks; ++r) {
      const size_t w = choice.free_rank[static_cast<size_t>(r)];
      work.push_back(WorkOf(table_, {.ctx_len = choice.cuts[r],
                                     .base = choice.cuts[0],
                                     .tokens = choice.cuts[r + 1] - choice.cuts[r],
                                     .group_end = choice.cuts.back(),
                                     .rank = r,
                                     .ranks = ranks,
                                     .exchange = choice.forecast.exchange,
                                     .held = held_[w],
                                     .last = choice.cuts[r + 1] == prompt.end,
                                     .chained = r > 0 && choice.forecast.linear == LinearExchange::kChain,
                                     .switched = choice.forecast.linear == LinearExchange::kSwitch}));
      held_[w] = work.back().held;
    }
    const double slower = (1 + host_.shares_cores * (ranks - 1)) * std::uniform_real_distribution(0.95, 1.05)(random_);
    const std::vector<ComputeRates> rates(work.size(), host_.compute);
    choice.forecast.measured_s = Predict(work, rates, host_.plane).seconds * slower;
    for (int r = 0; r < ranks; ++r) {
      // What a rank gets comes from the one before it.
      proto::RankTransfer given;
      if (r + 1 < ranks) given = {free[choice.free_rank[r + 1]].worker, RankBytesOf(work[r + 1].traffic), 0};
      Learn(free[choice.free_rank[r]].worker, work[r], given, slower, r > 0);
    }
    planner_.LearnTime(choice.forecast);
    base = choice.cuts.back();
    return choice.forecast.measured_s;
  }

  void Learn(WorkerId worker, const StepWork& work, proto::RankTransfer given, double slower, bool follows) {
    const auto us = [&](double seconds) { return static_cast<int64_t>(1e6 * slower * seconds); };
    proto::StepResult result;
    result.work = {.tokens = work.tokens,
                   .step_tokens = work.tokens,
                   .here_flops = work.here_flops,
                   .asked_flops = work.asked_flops,
                   .scratch_blocks = UINT32_MAX,
                   .gives_rows = true,
                   .passes_on_rows = true,
                   .switches_heads = true,
                   .gives_states = true};
    given.busy_us = us(static_cast<double>(given.bytes) * *host_.compute.link_byte_s);
    if (given.bytes > 0) result.transfers = {given};
    result.prefix = work.traffic;
    result.timings.dense_us = us(static_cast<double>(work.tokens) * *host_.compute.token_s);
    result.timings.prompt_us = us(work.here_flops * *host_.compute.flop_s);
    result.timings.attention_us = us(work.asked_flops * *host_.plane.flop_s);
    result.timings.attention_wait_us =
        result.timings.attention_us + us(static_cast<double>(PlaneBytesOf(work.traffic)) * *host_.plane.byte_s);
    planner_.Learn(worker, where_, result, follows);
  }

  const Host host_;
  const proto::AttentionTable& table_;
  const std::vector<WorkerId> where_ = {kAttention};
  PrefillPlanner planner_;
  std::mt19937_64 random_;
  std::vector<HeldTokens> held_;
};

struct Regret {
  double sum = 0, worst = 0;
  int cells = 0;
};

std::vector<proto::PrefillWay> WaysToForce(const proto::AttentionTable& table, int ranks) {
  std::vector<proto::PrefillWay> ways;
  for (const PrefixExchange softmax : {PrefixExchange::kAsk, PrefixExchange::kGather, PrefixExchange::kGatherDirect,
                                       PrefixExchange::kRing, PrefixExchange::kSwitch})
    for (const LinearExchange linear : {LinearExchange::kStates, LinearExchange::kChain, LinearExchange::kSwitch}) {
      const proto::PrefillWay way{softmax, linear};
      if (linear == LinearExchange::kSwitch && softmax != PrefixExchange::kSwitch) continue;
      if (softmax == PrefixExchange::kSwitch && ranks > proto::MostSwitchRanks(table)) continue;
      if ((ranks == 1 && IsBetweenRanks(way)) || (IsBetweenRanks(linear) && !table.has_linear())) continue;
      ways.push_back(way);
    }
  return ways;
}

// All lengths and cached shares of one host, by turns, as one server would get them.
void AddCells(const Host& host, const proto::AttentionTable& table, uint64_t seed, Regret& regret) {
  constexpr int kRounds = 12, kWarm = 4;
  PrefillPlannerOptions options{.exchange = std::nullopt, .max_step_tokens = kStepTokens, .rank_tokens = kRankTokens};
  std::vector<Prompt> prompts;
  for (const Position length : {512, 2048, 8192, 32768})
    for (const int percent : {0, 50, 90}) {
      const Position cached = length * percent / 100 / 64 * 64;
      prompts.push_back({cached, length - cached});
    }
  const auto times_of = [&](const PrefillPlannerOptions& way, int ranks) {
    Simulation simulation(host, table, way, seed);
    std::vector<double> times(prompts.size());
    for (int round = 0; round < kRounds; ++round)
      for (size_t i = 0; i < prompts.size(); ++i) {
        const double seconds = simulation.Take(prompts[i], ranks);
        if (round >= kWarm) times[i] += seconds;
      }
    return times;
  };
  const std::vector<double> chosen = times_of(options, host.workers);
  std::vector<double> best(prompts.size(), 1e300);
  options.choose_ranks = false;
  for (int ranks = 1; ranks <= host.workers; ++ranks)
    for (const proto::PrefillWay& way : WaysToForce(table, ranks)) {
      options.exchange = way.softmax;
      options.linear = way.linear;
      const std::vector<double> forced = times_of(options, ranks);
      for (size_t i = 0; i < prompts.size(); ++i) best[i] = std::min(best[i], forced[i]);
    }
  for (size_t i = 0; i < prompts.size(); ++i) {
    const double more = std::max(0.0, chosen[i] / best[i] - 1);
    regret.sum += more;
    regret.worst = std::max(regret.worst, more);
    ++regret.cells;
  }
}

TEST(PrefillRegret, WhatIsChosenTakesHardlyLongerThanTheBestThatCouldHaveBeenForced) {
  for (const uint64_t seed : {1, 2}) {
    Regret regret;
    for (const bool hybrid : {false, true})
      for (const int workers : {1, 2, 4})
        for (const double link_bytes_per_s : {50e9, 3e9, 100e6})
          for (const double plane_over_here : {0.25, 1.0, 4.0})  // how fast attention workers attend
            for (const double shares_cores : {0.0, 1.0}) {
              const double flop_s = 1 / 40e9;
              // Every second host has slower links between compute workers than with the attention worker.
              const double rank_link = link_bytes_per_s / (regret.cells / 12 % 2 == 0 ? 1 : 8);
              AddCells({.workers = workers,
                        .compute = {1 / 2000.0, flop_s, 1 / rank_link},
                        .plane = {flop_s / plane_over_here, 1 / link_bytes_per_s},
                        .shares_cores = shares_cores},
                       hybrid ? Hybrid() : FourOps(), seed, regret);
            }
    std::printf("seed %llu, simulated: mean regret %.2f %% over %d cells, the worst %.1f %%\n",
                static_cast<unsigned long long>(seed), 100 * regret.sum / regret.cells, regret.cells,
                100 * regret.worst);
    EXPECT_LE(regret.sum / regret.cells, 0.05) << seed;
    EXPECT_EQ(regret.cells, 2 * 3 * 3 * 3 * 2 * 12);
  }
}

}  // namespace
}  // namespace dovetail::scheduler
