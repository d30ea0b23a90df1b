#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "base/dtype.h"
#include "kernels/cuda/experts/expert_launches.h"
#include "kernels/cuda/products/gated_product.h"
#include "kernels/cuda/products/gemm_lt.h"
#include "kernels/cuda/products/skinny_gemm.h"
#include "tests/emulated_gpu/stream_work.h"

// In place of gemm_lt.cc and cuBLASLt: few rows by our kernel, all others by plain loops. There are no wgmma and no
// clusters here.

namespace dovetail::kernels::cuda {
namespace {

constexpr DeviceLimits kLimits{.multiprocessors = 4, .shared_bytes = 227 << 10, .major = 9, .minor = 0};

float Load(GemmType type, const void* base, int64_t at) {
  const uint16_t bits = static_cast<const uint16_t*>(base)[at];
  return type == GemmType::kBF16 ? ToFloat(BF16{bits}) : ToFloat(F16{bits});
}
float LoadResult(const GemmCall& call, const void* base, int64_t at) {
  return call.y_is_f32 != 0 ? static_cast<const float*>(base)[at] : Load(call.type, base, at);
}
void StoreResult(const GemmCall& call, int64_t at, float x) {
  if (call.y_is_f32 != 0) {
    static_cast<float*>(call.y)[at] = x;
  } else {
    static_cast<uint16_t*>(call.y)[at] = call.type == GemmType::kBF16 ? ToBF16(x).bits : ToF16(x).bits;
  }
}

std::vector<float> LoadRows(GemmType type, const void* base, int64_t rows, int64_t stride, int64_t k) {
  std::vector<float> values(rows * k);
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t c = 0; c < k; ++c) values[row * k + c] = Load(type, base, row * stride + c);
  return values;
}

// Several sums at a time, which a compiler keeps in vectors; always in the same order.
double Dot(const float* x, const float* w, int64_t k) {
  constexpr int kSums = 8;
  double sums[kSums] = {};
  int64_t c = 0;
  for (; c + kSums <= k; c += kSums)
    for (int i = 0; i < kSums; ++i) sums[i] += double{x[c + i]} * w[c + i];
  for (; c < k; ++c) sums[0] += double{x[c]} * w[c];
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

void Multiply(const GemmCall& call) {
  const std::vector<float> x = LoadRows(call.type, call.x, call.m, call.x_stride, call.k),
                           w = LoadRows(call.type, call.w, call.n, call.w_stride, call.k);
  for (int64_t i = 0; i < call.m; ++i) {
    for (int64_t j = 0; j < call.n; ++j) {
      double sum = Dot(x.data() + i * call.k, w.data() + j * call.k, call.k);
      if (call.bias != nullptr) sum += LoadResult(call, call.bias, j);
      const int64_t at = i * call.y_stride + j;
      StoreResult(call, at, static_cast<float>(call.accumulate != 0 ? sum + LoadResult(call, call.y, at) : sum));
    }
  }
}

void MultiplyParts(const GemmCall& call) {
  for (int part = 0; part < call.parts; ++part) {
    GemmCall one = call;
    one.k = call.k / call.parts;
    one.x = static_cast<const uint16_t*>(call.x) + part * one.k;
    one.w = static_cast<const uint16_t*>(call.w) + part * one.k;
    one.y = static_cast<float*>(call.y) + part * call.part_step;
    Multiply(one);
  }
}

float ActivationOf(ExpertActivation kind, float gate, float up) {
  if (kind == ExpertActivation::kSilu) return gate / (1 + std::exp(-gate)) * up;
  return 0.5f * gate * (1 + std::tanh(0.7978845608f * (gate + 0.044715f * gate * gate * gate))) * up;
}

// Of a slot's row, all n products.
void MultiplySlot(const ExpertGemmLaunch& p, int expert, int slot, std::vector<float>& sums) {
  const GemmType type = p.type == WireType::kBF16 ? GemmType::kBF16 : GemmType::kF16;
  const int64_t row = p.member != nullptr ? p.member[slot] : slot;
  sums.assign(p.n, 0);
  for (int i = 0; i < p.n; ++i) {
    double sum = p.bias != nullptr ? p.bias[int64_t{expert} * p.n + i] : 0;
    for (int j = 0; j < p.k; ++j)
      sum += double{Load(type, p.x, row * p.k + j)} *
             Load(type, p.w, (int64_t{expert - p.first_expert} * p.n + i) * p.k + j);
    sums[i] = static_cast<float>(sum);
  }
}

void MultiplyGroups(const ExpertGemmLaunch& p) {
  const GemmCall out{
      .y = p.y, .type = p.type == WireType::kBF16 ? GemmType::kBF16 : GemmType::kF16, .y_is_f32 = p.y_is_f32};
  std::vector<float> sums;
  for (int t = 0; t < p.most_tiles; ++t) {
    const ExpertTile& tile = p.tiles[t];
    if (!p.Takes(tile)) continue;
    for (int slot = tile.first; slot < tile.first + tile.rows; ++slot) {
      MultiplySlot(p, tile.expert, slot, sums);
      const bool gated = p.activation != ExpertActivation::kNone;
      const int width = gated ? p.n / 2 : p.n;
      for (int i = 0; i < width; ++i)
        StoreResult(out, int64_t{slot} * width + i,
                    gated ? ActivationOf(p.activation, sums[i], sums[i + width]) : sums[i]);
    }
  }
}

}  // namespace

int GemmOpen(int, size_t, void** gemm, char*, size_t) {
  static int open;
  return *gemm = &open, 0;
}
int GemmClose(void*) { return 0; }
int GemmRun(void*, const GemmCall* call, void* stream) {
  if (call->m == 0 || call->n == 0 || call->only_choose != 0) return 0;
  if (call->parts > 1) {
    emu::Do(static_cast<cudaStream_t>(stream), [call = *call] { MultiplyParts(call); });
    return 0;
  }
  if (call->w_is_new == 0 && call->in_order == 0 && IsSkinnyGemm(*call, kLimits))
    return LaunchSkinnyGemm(*call, kLimits, stream);
  emu::Do(static_cast<cudaStream_t>(stream), [call = *call] { Multiply(call); });
  return 0;
}

int LaunchGatedProduct(const GatedProductCall*, const DeviceLimits*, void*) { return kProductRefused; }
int LaunchRouteByCluster(const RouteLaunch*, void*) { return kProductRefused; }
// Its sums here are not those of tensor cores, as the other tiles' are: without DOVETAIL_EMULATED_TILES.
bool GroupedProductRuns(const DeviceLimits*) {
  static const bool tiles = std::getenv("DOVETAIL_EMULATED_TILES") != nullptr;
  return !tiles;
}
int LaunchGroupedProduct(const ExpertGemmLaunch* p, void* stream) {
  emu::Do(static_cast<cudaStream_t>(stream), [p = *p] { MultiplyGroups(p); });
  return 0;
}

}  // namespace dovetail::kernels::cuda
