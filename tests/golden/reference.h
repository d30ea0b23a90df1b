#pragma once
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "base/ids.h"
#include "base/status.h"

// Reference outputs of the test data (DOVETAIL_TEST_DATA), and how far ours may be from them.

namespace dovetail::test {

// Row-major, f32.
struct Matrix {
  int64_t rows = 0, cols = 0;
  std::vector<float> values;

  std::span<const float> row(int64_t r) const { return std::span(values).subspan(r * cols, cols); }
};

// NumPy's format 1.0, little-endian f32, two dimensions.
absl::StatusOr<Matrix> ReadNpy(const std::filesystem::path& path);

// Every two-dimensional F32 tensor of a safetensors file, by name.
absl::StatusOr<std::map<std::string, Matrix>> ReadSafetensors(const std::filesystem::path& path);

// Unpacks a .tar.gz into a new temporary folder and returns that. Fails the test if it cannot.
std::filesystem::path Unpack(const std::filesystem::path& archive);

// sqrt(mean (ours - reference)^2 / mean reference^2); infinity if the sizes differ or anything is not finite.
double RelativeRms(std::span<const float> ours, std::span<const float> reference);

TokenId ArgMax(std::span<const float> logits);

// Best minus second best.
double Margin(std::span<const float> logits);

// A choice is certain if the reference's margin exceeds twice the logit budget: `budget`, relative, times the RMS of
// the row.
bool IsCertain(std::span<const float> reference, double budget);

}  // namespace dovetail::test
