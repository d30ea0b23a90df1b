#pragma once
#include <CLI/CLI.hpp>
#include <string>

#include "scheduler/core/chunk_budget.h"

namespace dovetail::cli {

// --prefill-itl-budget: `flag` gets "auto" or milliseconds.
// Threads: thread-compatible.
void AddItlBudgetFlag(CLI::App& command, const std::string& group, std::string& flag);
// What it means.
// Threads: pure.
scheduler::ItlBudget ItlBudgetOf(const std::string& flag);

}  // namespace dovetail::cli
