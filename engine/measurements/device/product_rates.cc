#include <algorithm>
#include <memory>
#include <random>
#include <span>
#include <vector>

#include "engine/measurements/device/best_time.h"
#include "engine/measurements/device/device_kernels.h"
#include "engine/measurements/memory_rate.h"
#include "kernels/aligned_buffer.h"
#include "kernels/gemm.h"

namespace dovetail::engine {
namespace {

using kernels::PackedWeights;
using kernels::RowFormat;

// A matrix. Its products are short, so that some run undisturbed on a machine that has other work.
constexpr int64_t kOutputs = 512, kInputs = 2048;
constexpr size_t kWeightBytes = size_t{96} << 20;  // of all matrices together: more than caches hold
constexpr int64_t kFewRows = 8;                    // up to here memory decides
constexpr size_t kMatricesInARun = 16;             // of few rows
constexpr size_t kMostCacheBytes = size_t{128} << 20;
constexpr double kMuchFaster = 1.5;  // than memory
constexpr int64_t kRows[] = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512};
constexpr int64_t kMostRows = 512;

// One for each packed format.
constexpr RowFormat kFormats[] = {RowFormat::kF32,  RowFormat::kBF16, RowFormat::kQ4_0, RowFormat::kQ4_1,
                                  RowFormat::kQ4_K, RowFormat::kQ8_0, RowFormat::kQ5_1, RowFormat::kQ5_K,
                                  RowFormat::kQ6_K, RowFormat::kMXFP4};

absl::StatusOr<PackedWeights> RandomWeights(RowFormat format, int64_t outputs, int64_t inputs,
                                            kernels::ThreadPool& pool) {
  std::vector<std::byte> row(static_cast<size_t>(kernels::RowBytes(format, inputs)));
  std::mt19937 random(1);
  // Small positive numbers in every format's scales: no infinities.
  for (std::byte& byte : row) byte = static_cast<std::byte>(random() % 0x38);
  return kernels::PackWeights(kernels::DirectFormat(format),
                              {format, outputs, inputs, [&](int64_t) { return row.data(); }}, &pool);
}

class Product {
 public:
  static absl::StatusOr<Product> Create(int64_t rows, int64_t outputs, int64_t inputs) {
    Product product;
    product.inputs_ = inputs;
    product.outputs_ = outputs;
    product.x_.assign(static_cast<size_t>(rows * inputs), 0.25f);
    product.y_.resize(static_cast<size_t>(rows * outputs));
    DT_ASSIGN_OR_RETURN(product.scratch_, kernels::AlignedBuffer::Create(kernels::GemmScratchBytes(rows, inputs)));
    return product;
  }

  absl::Status Run(const PackedWeights& weights, int64_t rows, kernels::Stream& stream) {
    const kernels::GemmOutput output{.weights = &weights,
                                     .y = y_.data(),
                                     .y_stride = outputs_,
                                     .activations = kernels::ActivationBits::k16};  // as projections have
    return kernels::Gemm(
        {.x = x_.data(), .x_stride = inputs_, .m = rows, .outputs = std::span(&output, 1), .scratch = scratch_.bytes()},
        stream);
  }

 private:
  int64_t inputs_ = 0, outputs_ = 0;
  std::vector<float> x_, y_;
  kernels::AlignedBuffer scratch_;
};

// One matrix after the other, `in_a_run` at a time.
absl::StatusOr<plan::ProductRates::Point> MeasurePoint(Product& product, std::span<const PackedWeights> matrices,
                                                       int64_t rows, size_t in_a_run, kernels::Stream& stream,
                                                       double seconds) {
  absl::Status status;
  size_t at = 0;
  const double best = BestSeconds(seconds, [&] {
    for (size_t i = 0; i < in_a_run; ++i, ++at)
      status.Update(product.Run(matrices[at % matrices.size()], rows, stream));
  });
  DT_RETURN_IF_ERROR(status);
  return plan::ProductRates::Point{rows, best / static_cast<double>(in_a_run) / (kOutputs * kInputs)};
}

absl::StatusOr<plan::ProductRates> MeasureFormat(RowFormat format, kernels::Stream& stream, double seconds,
                                                 double cache_bytes) {
  plan::ProductRates rates;
  rates.weights = kernels::Name(kernels::DirectFormat(format));
  std::vector<PackedWeights> matrices;
  DT_ASSIGN_OR_RETURN(PackedWeights first, RandomWeights(format, kOutputs, kInputs, stream.pool()));
  matrices.push_back(std::move(first));
  const auto bytes = static_cast<double>(matrices[0].size_bytes());
  rates.bytes_per_weight = bytes / (kOutputs * kInputs);
  while (matrices.size() * matrices[0].size_bytes() < kWeightBytes) {
    DT_ASSIGN_OR_RETURN(PackedWeights next, RandomWeights(format, kOutputs, kInputs, stream.pool()));
    matrices.push_back(std::move(next));
  }
  DT_ASSIGN_OR_RETURN(Product product, Product::Create(kMostRows, kOutputs, kInputs));
  const std::span<const PackedWeights> all(matrices);
  const auto cached = static_cast<size_t>(cache_bytes / 2 / bytes);  // matrices; as CachedShare has it
  for (const int64_t rows : kRows) {
    const bool few = rows <= kFewRows;
    const size_t in_a_run = few ? kMatricesInARun : 1;
    DT_ASSIGN_OR_RETURN(const auto point, MeasurePoint(product, all, rows, in_a_run, stream, seconds));
    rates.points.push_back(point);
    if (!few || cached == 0) continue;
    const auto some = all.first(std::min(cached, all.size()));
    DT_ASSIGN_OR_RETURN(const auto near, MeasurePoint(product, some, rows, in_a_run, stream, seconds));
    rates.cached_points.push_back(near);
  }
  return rates;
}

}  // namespace

absl::StatusOr<std::vector<plan::ReadRate>> MeasureReads(int threads) {
  std::vector<plan::ReadRate> reads;
  for (int count = 1; count <= threads; count = count < threads ? std::min(2 * count, threads) : count + 1) {
    kernels::ThreadPool pool({.threads = count});
    DT_ASSIGN_OR_RETURN(const double rate, MeasureReadRate(pool));
    reads.push_back({count, rate});
  }
  return reads;
}

absl::StatusOr<double> MeasureCacheBytes(kernels::ThreadPool& pool, double memory_rate) {
  for (size_t bytes = kMostCacheBytes; bytes >= size_t{1} << 20; bytes /= 2) {
    DT_ASSIGN_OR_RETURN(const double rate, MeasureReadRate(pool, bytes));
    if (rate >= kMuchFaster * memory_rate) return static_cast<double>(bytes);
  }
  return 0;
}

absl::StatusOr<std::vector<plan::ProductRates>> MeasureProducts(kernels::Stream& stream, double seconds,
                                                                double cache_bytes) {
  std::vector<plan::ProductRates> all;
  for (const RowFormat format : kFormats) {
    DT_ASSIGN_OR_RETURN(plan::ProductRates rates, MeasureFormat(format, stream, seconds, cache_bytes));
    all.push_back(std::move(rates));
  }
  return all;
}

}  // namespace dovetail::engine
