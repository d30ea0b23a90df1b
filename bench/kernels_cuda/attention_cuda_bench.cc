// Times paged decode attention on a GPU against what a plain kernel reads in the same run.
//   attention_cuda_bench [--quick] [shape]
// Prints one line a shape: us of a call inside a CUDA graph (median), bytes of K and V over that time, and that over
// the read rate.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "base/check.h"
#include "bench/kernels_cuda/cuda_bench.h"
#include "kernels/cuda/attention/cuda_attention.h"

namespace dovetail::kernels::cuda {
namespace {

using bench::Must;

struct Shape {
  const char* name;
  int batch, context, q_heads, kv_heads, dim, q_rows;
  KvType type;
  int spread = 0;  // sequences have from context down to context - spread tokens

  int64_t TokensOf(int sequence) const { return context - int64_t{sequence} * spread / batch; }
  int64_t TokensOfAll() const {
    int64_t tokens = 0;
    for (int i = 0; i < batch; ++i) tokens += TokensOf(i);
    return tokens;
  }
};

constexpr Shape kShapes[] = {
    {"8b 64x8k", 64, 8192, 32, 8, 128, 1, KvType::kBF16},
    {"8b 128x4k", 128, 4096, 32, 8, 128, 1, KvType::kBF16},
    {"8b 256x1k", 256, 1024, 32, 8, 128, 1, KvType::kBF16},
    {"8b 256x960..1075", 256, 1075, 32, 8, 128, 1, KvType::kBF16, 115},
    {"8b 16x32k", 16, 32768, 32, 8, 128, 1, KvType::kBF16},
    {"8b 1x128k", 1, 131072, 32, 8, 128, 1, KvType::kBF16},
    {"8b 64x8k fp8", 64, 8192, 32, 8, 128, 1, KvType::kE4M3},
    {"8b 128x4k fp8", 128, 4096, 32, 8, 128, 1, KvType::kE4M3},
    {"8b 256x1k fp8", 256, 1024, 32, 8, 128, 1, KvType::kE4M3},
    {"8b 1x128k fp8", 1, 131072, 32, 8, 128, 1, KvType::kE4M3},
    {"8b 64x8k q4", 64, 8192, 32, 8, 128, 4, KvType::kBF16},
    {"8b 64x8k q16", 64, 8192, 32, 8, 128, 16, KvType::kBF16},
    {"70b 64x4k", 64, 4096, 64, 8, 128, 1, KvType::kBF16},
    {"llama2 32x4k", 32, 4096, 40, 40, 128, 1, KvType::kBF16},
    {"smollm2 256x2k", 256, 2048, 9, 3, 64, 1, KvType::kBF16},
    {"smollm2 256x2k q4", 256, 2048, 9, 3, 64, 4, KvType::kBF16},
    {"smollm2 256x2k fp8", 256, 2048, 9, 3, 64, 1, KvType::kE4M3},
    {"d256 64x4k", 64, 4096, 16, 4, 256, 1, KvType::kBF16},
    {"8b 16x1k", 16, 1024, 32, 8, 128, 1, KvType::kBF16},
    {"8b 1x1k", 1, 1024, 32, 8, 128, 1, KvType::kBF16},
};

class Bench {
 public:
  Bench(bool quick, std::string only) : quick_(quick), only_(std::move(only)) {
    device_ = Must(CudaDevice::Create(Must(CudaLibrary::Open()), {.index = 0}));
    stream_ = Must(device_->CreateCudaStream());
    pool_bytes_ = size_t{6} << 30;
    pool_ = Must(device_->Allocate(pool_bytes_));
    FillRandom();
  }

  void Run() {
    const double rate = bench::ReadRate(*device_, *stream_, pool_->data(), size_t{4} << 30);
    std::printf("%s, %d multiprocessors; read rate %.0f GB/s\n", device_->info().name, device_->info().multiprocessors,
                rate);
    for (const Shape& shape : kShapes) {
      if (only_.empty() || only_ == shape.name) Time(shape, rate);
    }
  }

 private:
  // Random bf16 in (-1, 1), and as E4M3 no NaN either.
  void FillRandom() {
    const size_t piece = size_t{64} << 20;
    std::vector<uint16_t> values(piece / 2);
    std::mt19937_64 random(1);
    for (uint16_t& v : values) {
      const uint64_t r = random();
      v = static_cast<uint16_t>((r & 0x8000) | 0x3c00 | (r & 0x037f & ~0x80ull) | ((r >> 20) & 0x7f));
      if ((v & 0x7f) == 0x7f) v ^= 1;
    }
    for (size_t at = 0; at < pool_bytes_; at += piece) {
      Must(stream_->Copy(pool_->data() + at, values.data(), std::min(piece, pool_bytes_ - at)));
    }
    Must(stream_->SynchronizeStatus());
  }

  void Time(const Shape& s, double rate) {
    const CudaKvLayout layout{s.dim, s.dim, s.type};
    const int64_t segments = (s.context + 63) / 64, blocks = segments * s.kv_heads * s.batch;
    const size_t block_bytes = blocks * layout.bytes();
    const double bytes = static_cast<double>(s.TokensOfAll()) / 64 * s.kv_heads * layout.bytes();
    // Calls that follow each other take other blocks where the pool has them, so that the L2 holds none of them.
    const int copies = std::max<int64_t>(1, std::min<int64_t>(8, static_cast<int64_t>(pool_bytes_ / block_bytes)));
    std::vector<int64_t> order(blocks);
    std::iota(order.begin(), order.end(), int64_t{0});
    std::shuffle(order.begin(), order.end(), std::mt19937_64(2));
    std::vector<const std::byte*> table;
    for (const int64_t b : order) table.push_back(pool_->data() + b * layout.bytes());
    const auto device_table = Must(device_->Allocate(table.size() * 8));
    Must(stream_->Copy(device_table->data(), table.data(), table.size() * 8));
    std::vector<CudaAttentionItem> items;
    const int64_t row = int64_t{s.q_heads} * s.dim;
    for (int i = 0; i < s.batch; ++i) {
      items.push_back(
          {.q_rows = s.q_rows,
           .kv_heads = s.kv_heads,
           .first_position = s.TokensOf(i) - s.q_rows,
           .token_begin = 0,
           .token_end = s.TokensOf(i),
           .q_offset = i * s.q_rows * row,
           .q_row_step = row,
           .o_offset = i * s.q_rows * row,
           .o_row_step = row,
           .blocks = reinterpret_cast<const std::byte* const*>(device_table->data()) + i * segments * s.kv_heads,
           .head_step = segments});
    }
    const size_t activation_bytes = s.batch * s.q_rows * row * 2;
    const auto q = Must(device_->Allocate(activation_bytes)), o = Must(device_->Allocate(activation_bytes));
    Must(stream_->Copy(q->data(), pool_->data(), activation_bytes));
    CudaAttentionShape shape{
        .group = s.q_heads / s.kv_heads, .layout = layout, .scale = 1 / std::sqrt(static_cast<float>(s.dim))};
    CudaAttention attention(*device_);
    Must(attention.Plan(*stream_, shape, items));
    Must(stream_->SynchronizeStatus());
    const int calls = std::max(4, copies);
    const auto run = [&](int i) {
      Must(attention.Run(*stream_, shape,
                         {.q = q->data(), .o = o->data(), .kv_offset_bytes = (i % copies) * block_bytes}));
    };
    const double us = bench::MedianUs(*device_, *stream_, calls, run, quick_ ? 3 : 12);
    const double gbps = bytes / us / 1e3;
    std::printf("%-20s %9.1f us %7.0f GB/s  %.3f of the read rate\n", s.name, us, gbps, gbps / rate);
    std::fflush(stdout);
  }

  const bool quick_;
  const std::string only_;
  std::unique_ptr<CudaDevice> device_;
  std::unique_ptr<CudaStream> stream_;
  std::unique_ptr<Buffer> pool_;
  size_t pool_bytes_ = 0;
};

}  // namespace
}  // namespace dovetail::kernels::cuda

int main(int argc, char** argv) {
  const bool quick = argc > 1 && std::string(argv[1]) == "--quick";
  dovetail::kernels::cuda::Bench(quick, argc > 1 + quick ? argv[1 + quick] : "").Run();
  return 0;
}
