#pragma once
#include <string>
#include <utility>
#include <vector>

#include "plan/planner.h"
#include "server/cli/plan_measured.h"

namespace dovetail::cli {

// A plan as text for people, and as JSON with every number.
// Threads: pure.
std::string PlanTable(const plan::PlanInput& input, const plan::Plan& plan, const std::vector<MeasuredLoad>& measured);
std::string PlanJson(const plan::PlanInput& input, const plan::Plan& plan, const std::vector<MeasuredLoad>& measured);

// What no prediction has in it.
inline constexpr const char* kNotPredicted[] = {
    "devices of one kind are alike, and their profiles hold under this load",
    "prefixes that prompts share, HTTP and tokenising take nothing and save nothing",
    "a whole layout of several devices is as many servers, to which requests go in turn",
    "links are as fast for all workers at a time as for one"};

// What steps are made of, by name, in seconds.
std::vector<std::pair<const char*, double>> PartsOf(const plan::StepParts& parts);

// "200 requests of 1024 and 128 tokens on average, 2 a second"
std::string LoadText(const plan::PlanInput& input);

// "99 % of requests with ttft <= 500 ms, tpot <= 50 ms"
std::string SloText(const plan::Slo& slo);

// Why no layout was found, and which came nearest.
std::string NoLayoutText(const plan::PlanInput& input, const plan::Plan& plan);

}  // namespace dovetail::cli
