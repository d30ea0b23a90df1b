#pragma once
#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>
#include <vector>

// What the commands of the binary share on their command lines: checks whose texts name the flag, the limit and the
// remedy, help that fits a terminal, and the nearest name for one that does not exist.
// Threads: pure.

namespace dovetail::cli {

inline constexpr int kUsageError = 2;  // the exit code of a command line that is wrong; others fail with 1

// A whole number in [min, max]. `remedy` ends the text of the error: "--port: 70000 is outside 0..65535; 0 takes ...".
CLI::Validator WholeNumber(int64_t min, int64_t max, const std::string& remedy = "");
CLI::Validator Number(double min, double max, const std::string& remedy = "");
CLI::Validator OneOf(const std::vector<std::string>& names);

// Help in two columns of together at most 100 characters, with the default of each flag at the end of its description.
std::shared_ptr<CLI::FormatterBase> HelpFormatter();

// The name that `text` probably meant, or "" if none is near.
std::string NearestName(const std::string& text, const std::vector<std::string>& names);

// What is wrong with this command line, in one line: "serve: there is no flag --prot; did you mean --port?".
std::string ExplainUsage(const CLI::App& app, int argc, char** argv, const CLI::ParseError& error);

}  // namespace dovetail::cli
