#pragma once
#include <filesystem>
#include <optional>
#include <string>

#include "base/status.h"

// Data outside the project, found through the environment variable DOVETAIL_TEST_DATA.

namespace dovetail::test {

// The path of `relative` below DOVETAIL_TEST_DATA, or nullopt when the variable is unset or the path is not there.
std::optional<std::filesystem::path> TestData(const std::string& relative);

// A file of the project by its path from the project's root. That root is the folder that was configured, or what the
// environment variable DOVETAIL_SOURCE_DIR names where the tests run on another machine.
std::filesystem::path ProjectFile(const std::string& relative);

// Data committed with the project: tests/data/<relative>.
std::filesystem::path ProjectData(const std::string& relative);

// The whole file as bytes. Fails the test if it cannot be read.
std::string ReadFile(const std::filesystem::path& path);

// A new empty folder, removed when the process ends.
std::filesystem::path TempFolder();

}  // namespace dovetail::test

// DOVETAIL_DATA_OR_SKIP(auto path, "tokenizers/llama2"): the path, or the test is skipped by name and counted
// (./check turns that into a failure when DOVETAIL_TEST_DATA is set).
#define DOVETAIL_DATA_OR_SKIP(lhs, relative)                                                     \
  auto DT_CONCAT(dovetail_data_, __LINE__) = ::dovetail::test::TestData(relative);               \
  if (!DT_CONCAT(dovetail_data_, __LINE__)) GTEST_SKIP() << "missing test data: " << (relative); \
  lhs = *DT_CONCAT(dovetail_data_, __LINE__)
