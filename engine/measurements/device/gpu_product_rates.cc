#include <memory>
#include <utility>
#include <vector>

#include "engine/measurements/device/gpu_rates.h"
#include "engine/measurements/device/gpu_timer.h"
#include "kernels/cuda/products/cuda_product.h"
#include "kernels/cuda/rows/row_ops.h"
#include "kernels/packed_weights.h"

namespace dovetail::engine {
namespace {

using kernels::cuda::CudaDevice;
using kernels::cuda::CudaProduct;
using kernels::cuda::CudaWeights;
using kernels::cuda::GemmCall;
using kernels::cuda::GemmType;
using kernels::cuda::WireType;

constexpr int kReadsInARun = 4, kProductsInARun = 8;

// Products with several matrices in turn.
class GpuProducts {
 public:
  static absl::StatusOr<GpuProducts> Create(CudaDevice& gpu, int64_t rows, int64_t outputs, int64_t inputs,
                                            int matrices) {
    DT_ASSIGN_OR_RETURN(GpuTimer timer, GpuTimer::Create(gpu));
    GpuProducts made(std::move(timer), outputs, inputs);
    DT_ASSIGN_OR_RETURN(made.product_, CudaProduct::Create(gpu, /*keeps=*/false));
    for (int i = 0; i < matrices; ++i) {
      DT_ASSIGN_OR_RETURN(CudaWeights weights, CudaWeights::Allocate(gpu, outputs, inputs, WireType::kBF16));
      DT_RETURN_IF_ERROR(made.FillWithNumbers(weights.mutable_data(), outputs * inputs));
      made.matrices_.push_back(std::move(weights));
    }
    DT_ASSIGN_OR_RETURN(made.x_, gpu.Allocate(static_cast<size_t>(rows * inputs) * kBf16Bytes));
    DT_ASSIGN_OR_RETURN(made.y_, gpu.Allocate(static_cast<size_t>(rows * outputs) * kBf16Bytes));
    DT_RETURN_IF_ERROR(made.FillWithNumbers(made.x_->data(), rows * inputs));
    return made;
  }

  // Of one product of so many of the rows.
  absl::StatusOr<double> Seconds(int64_t rows, double seconds) {
    GemmCall call{};
    call.x = x_->data();
    call.y = y_->data();
    call.m = rows;
    call.n = call.y_stride = outputs_;
    call.k = call.x_stride = call.w_stride = inputs_;
    call.type = GemmType::kBF16;
    const auto run = [&](int i) {
      return product_->Run(timer_.stream(), matrices_[static_cast<size_t>(i) % matrices_.size()], call);
    };
    return timer_.Seconds(kProductsInARun, seconds, run);
  }

 private:
  GpuProducts(GpuTimer timer, int64_t outputs, int64_t inputs)
      : timer_(std::move(timer)), outputs_(outputs), inputs_(inputs) {}
  absl::Status FillWithNumbers(void* memory, int64_t count) {
    return FillRandom(timer_.stream(), {.out = memory, .range = 0.1f, .seed = ++fills_, .count = count});
  }

  GpuTimer timer_;
  int64_t outputs_, inputs_;
  uint64_t fills_ = 0;
  std::unique_ptr<CudaProduct> product_;
  std::vector<CudaWeights> matrices_;
  std::unique_ptr<kernels::Buffer> x_, y_;
};

}  // namespace

absl::StatusOr<std::vector<plan::ReadRate>> MeasureGpuReads(CudaDevice& gpu, double seconds, const GpuSizes& sizes) {
  DT_ASSIGN_OR_RETURN(GpuTimer timer, GpuTimer::Create(gpu));
  DT_ASSIGN_OR_RETURN(const auto memory, gpu.Allocate(sizes.read_bytes));
  DT_ASSIGN_OR_RETURN(const auto result, gpu.Allocate(64));
  DT_RETURN_IF_ERROR(timer.stream().Fill(memory->data(), 0, sizes.read_bytes));
  const auto read = [&](int) -> absl::Status {
    DT_RETURN_IF_ERROR(timer.stream().UseDevice());
    return gpu.library().Check(
        gpu.library()->read_all(memory->data(), sizes.read_bytes, result->data(), timer.stream().handle()), "read");
  };
  DT_ASSIGN_OR_RETURN(const double best, timer.Seconds(kReadsInARun, seconds, read));
  return std::vector<plan::ReadRate>{{1, static_cast<double>(sizes.read_bytes) / best}};
}

absl::StatusOr<std::vector<plan::ProductRates>> MeasureGpuProducts(CudaDevice& gpu, double seconds,
                                                                   const GpuSizes& sizes) {
  DT_ASSIGN_OR_RETURN(GpuProducts products,
                      GpuProducts::Create(gpu, sizes.rows, sizes.outputs, sizes.inputs, sizes.matrices));
  plan::ProductRates rates{.weights = kernels::Name(kernels::PackedFormat::kBF16), .bytes_per_weight = kBf16Bytes};
  for (int64_t rows = 1; rows <= sizes.rows; rows *= 2) {
    DT_ASSIGN_OR_RETURN(const double best, products.Seconds(rows, seconds));
    rates.points.push_back({rows, best / static_cast<double>(sizes.outputs * sizes.inputs)});
  }
  return std::vector<plan::ProductRates>{std::move(rates)};
}

absl::StatusOr<double> MeasureGpuProduct(CudaDevice& gpu, int64_t rows, int64_t outputs, int64_t inputs,
                                         double seconds) {
  DT_ASSIGN_OR_RETURN(GpuProducts products, GpuProducts::Create(gpu, rows, outputs, inputs, /*matrices=*/1));
  return products.Seconds(rows, seconds);
}

}  // namespace dovetail::engine
