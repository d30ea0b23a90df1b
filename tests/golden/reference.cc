#include "tests/golden/reference.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "model/formats/safetensors.h"
#include "tests/support/test_data.h"

namespace dovetail::test {
namespace {

double MeanSquare(std::span<const float> values) {
  double sum = 0;
  for (const float v : values) sum += static_cast<double>(v) * v;
  return sum / static_cast<double>(values.size());
}

}  // namespace

absl::StatusOr<Matrix> ReadNpy(const std::filesystem::path& path) {
  const std::string bytes = ReadFile(path);
  constexpr size_t kPreamble = 10;
  if (bytes.size() < kPreamble || bytes.compare(0, 8, std::string("\x93NUMPY\x01\x00", 8)) != 0)
    return InvalidArgument(path.string(), ": is no NumPy file of format 1.0");
  const size_t header_bytes = static_cast<unsigned char>(bytes[8]) + 256u * static_cast<unsigned char>(bytes[9]);
  const std::string header = bytes.substr(kPreamble, header_bytes);
  Matrix matrix;
  const size_t shape = header.find("'shape': (");
  if (header.find("'<f4'") == std::string::npos || header.find("'fortran_order': False") == std::string::npos ||
      shape == std::string::npos ||
      std::sscanf(header.c_str() + shape, "'shape': (%ld, %ld)", &matrix.rows, &matrix.cols) != 2)
    return InvalidArgument(path.string(), ": is not a row-major f32 matrix: ", header);
  const size_t data = kPreamble + header_bytes;
  matrix.values.resize(matrix.rows * matrix.cols);
  if (bytes.size() != data + matrix.values.size() * sizeof(float))
    return InvalidArgument(path.string(), ": has ", bytes.size(), " bytes, which is not what its shape says");
  std::memcpy(matrix.values.data(), bytes.data() + data, matrix.values.size() * sizeof(float));
  return matrix;
}

absl::StatusOr<std::map<std::string, Matrix>> ReadSafetensors(const std::filesystem::path& path) {
  DT_ASSIGN_OR_RETURN(const auto file, model::SafetensorsFile::Open(path));
  std::map<std::string, Matrix> matrices;
  for (const model::SafetensorsTensor& tensor : file->tensors()) {
    if (tensor.dtype != "F32" || tensor.shape.size() != 2) continue;
    Matrix& matrix = matrices[tensor.name];
    matrix.rows = tensor.shape[0];
    matrix.cols = tensor.shape[1];
    matrix.values.resize(tensor.elements);
    std::memcpy(matrix.values.data(), tensor.bytes.data(), tensor.bytes.size());
  }
  return matrices;
}

std::filesystem::path Unpack(const std::filesystem::path& archive) {
  const std::filesystem::path folder = TempFolder();
  const std::string command = "tar xzf '" + archive.string() + "' -C '" + folder.string() + "'";
  EXPECT_EQ(std::system(command.c_str()), 0) << command;
  return folder;
}

double RelativeRms(std::span<const float> ours, std::span<const float> reference) {
  if (ours.size() != reference.size() || reference.empty()) return std::numeric_limits<double>::infinity();
  double sum = 0;
  for (size_t i = 0; i < ours.size(); ++i) {
    const double difference = static_cast<double>(ours[i]) - reference[i];
    sum += difference * difference;
  }
  const double relative = std::sqrt(sum / static_cast<double>(ours.size()) / MeanSquare(reference));
  return std::isfinite(relative) ? relative : std::numeric_limits<double>::infinity();
}

TokenId ArgMax(std::span<const float> logits) {
  return static_cast<TokenId>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

double Margin(std::span<const float> logits) {
  float best = -std::numeric_limits<float>::infinity(), second = best;
  for (const float v : logits) {
    if (v > best)
      second = std::exchange(best, v);
    else
      second = std::max(second, v);
  }
  return static_cast<double>(best) - second;
}

bool IsCertain(std::span<const float> reference, double budget) {
  return Margin(reference) > 2 * budget * std::sqrt(MeanSquare(reference));
}

}  // namespace dovetail::test
