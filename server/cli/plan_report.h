#pragma once
#include <string>

#include "plan/planner.h"

namespace dovetail::cli {

// A plan as text for people, and as JSON with every number. Pure.
std::string PlanTable(const plan::PlanInput& input, const plan::Plan& plan);
std::string PlanJson(const plan::PlanInput& input, const plan::Plan& plan);

// "99 % of requests with ttft <= 500 ms, tpot <= 50 ms"
std::string SloText(const plan::Slo& slo);

// Why no layout was found, and which came nearest.
std::string NoLayoutText(const plan::PlanInput& input, const plan::Plan& plan);

}  // namespace dovetail::cli
