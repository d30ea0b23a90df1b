// Times causal attention of prompts over paged KV on a GPU (kernels/cuda/attention/prefill_kernel.cuh): microseconds of
// a layer inside a CUDA graph (median), and TFLOP/s of what its rows see.
//   prefill_cuda_bench [few|whole|invariant] [NAME]
// few: by the kernel for few rows. whole: no thread blocks share a tile. invariant: as with --deterministic. NAME:
// shapes whose name begins so. The peer is PyTorch's scaled_dot_product_attention with the cuDNN backend on dense
// prompts (bench/kernels_cuda/prefill_peer.py), which prints the same lines.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "bench/kernels_cuda/cuda_bench.h"
#include "kernels/cuda/attention/cuda_attention.h"
#include "kernels/cuda/rows/row_ops.h"

namespace dovetail::kernels::cuda {
namespace {

using bench::Must;

struct Prompt {
  int rows = 0;
  int64_t earlier = 0;  // tokens before them
};

struct Shape {
  std::string name;
  int q_heads, kv_heads, dim;
  KvType type;
  std::vector<Prompt> prompts;
  int window = 0;

  double Flops() const {
    double scores = 0;
    for (const Prompt& prompt : prompts) {
      for (int64_t row = 0; row < prompt.rows; ++row) {
        const int64_t sees = prompt.earlier + row + 1;
        scores += static_cast<double>(window > 0 ? std::min<int64_t>(sees, window) : sees);
      }
    }
    return 4.0 * scores * q_heads * dim;
  }
};

// 64 prompts of 50 to 2,000 tokens, evenly spread, in no order.
std::vector<Prompt> Ragged() {
  std::vector<Prompt> prompts;
  for (int i = 0; i < 64; ++i) prompts.push_back({50 + i * 37 % 64 * 1950 / 63, 0});
  return prompts;
}

std::vector<Shape> Shapes() {
  constexpr KvType k16 = KvType::kBF16, k8 = KvType::kE4M3;
  std::vector<Shape> shapes;
  for (const int tokens : {2048, 8192, 32768, 131072})
    shapes.push_back({"square " + std::to_string(tokens), 32, 8, 128, k16, {{tokens, 0}}});
  for (const int tokens : {8192, 32768, 131072})
    shapes.push_back({"2048 of " + std::to_string(tokens), 32, 8, 128, k16, {{2048, tokens - 2048}}});
  for (const int rows : {64, 128, 256, 384}) {
    for (const int tokens : {2048, 8192, 32768, 131072})
      shapes.push_back({"short " + std::to_string(rows) + " of " + std::to_string(tokens),
                        32,
                        8,
                        128,
                        k16,
                        {{rows, tokens - rows}}});
  }
  shapes.push_back({"short 64 of 32768 fp8", 32, 8, 128, k8, {{64, 32704}}});
  for (const int tokens : {32768, 131072})
    shapes.push_back({"8192 of " + std::to_string(tokens), 32, 8, 128, k16, {{8192, tokens - 8192}}});
  shapes.push_back({"ragged 64x50..2000", 32, 8, 128, k16, Ragged()});
  shapes.push_back({"1 x 1000", 32, 8, 128, k16, {{1000, 0}}});
  shapes.push_back({"1 x 512", 32, 8, 128, k16, {{512, 0}}});
  shapes.push_back({"1 x 100", 32, 8, 128, k16, {{100, 0}}});
  shapes.push_back({"256 of 8192", 32, 8, 128, k16, {{256, 7936}}});
  for (const int dim : {64, 80, 96, 256})
    shapes.push_back({"8192 d" + std::to_string(dim), dim > 128 ? 16 : 32, dim > 128 ? 4 : 8, dim, k16, {{8192, 0}}});
  shapes.push_back({"8192 mha", 16, 16, 128, k16, {{8192, 0}}});
  shapes.push_back({"8192 window 1024", 32, 8, 128, k16, {{8192, 0}}, 1024});
  for (const int tokens : {2048, 8192, 32768})
    shapes.push_back({"square " + std::to_string(tokens) + " fp8", 32, 8, 128, k8, {{tokens, 0}}});
  shapes.push_back({"2048 of 32768 fp8", 32, 8, 128, k8, {{2048, 30720}}});
  for (const auto& [count, tokens] : {std::pair{1, 1024},
                                      {1, 8192},
                                      {1, 32768},
                                      {16, 1024},
                                      {64, 512},
                                      {64, 1024},
                                      {64, 4096},
                                      {64, 16384},
                                      {256, 512}})
    shapes.push_back({"decode " + std::to_string(count) + " of " + std::to_string(tokens), 32, 8, 128, k16,
                      std::vector<Prompt>(count, {1, tokens - 1})});
  return shapes;
}

class Bench {
 public:
  explicit Bench(CudaAttention::Kernel kernel) : kernel_(kernel) {
    device_ = Must(CudaDevice::Create(Must(CudaLibrary::Open()), {.index = 0}));
    stream_ = Must(device_->CreateCudaStream());
  }

  void Time(const Shape& s) {
    const CudaKvLayout layout{s.dim, s.dim, s.type};
    int64_t blocks = 0, rows = 0;
    for (const Prompt& prompt : s.prompts) {
      blocks += (prompt.earlier + prompt.rows + 63) / 64 * s.kv_heads;
      rows += prompt.rows;
    }
    std::vector<int64_t> order(blocks);
    std::iota(order.begin(), order.end(), int64_t{0});
    std::shuffle(order.begin(), order.end(), std::mt19937_64(2));
    const auto arena = Random(CudaKvLayout::kArenaLead + blocks * layout.bytes());
    std::vector<const std::byte*> table;
    for (const int64_t b : order) table.push_back(arena->data() + CudaKvLayout::kArenaLead + b * layout.bytes());
    const auto device_table = Must(device_->Allocate(table.size() * 8));
    Must(stream_->Copy(device_table->data(), table.data(), table.size() * 8));
    const int64_t row = int64_t{s.q_heads} * s.dim;
    const auto q = Random(rows * row * 2), o = Must(device_->Allocate(rows * row * 2));
    std::vector<CudaAttentionItem> items;
    int64_t first_block = 0, first_row = 0;
    for (const Prompt& prompt : s.prompts) {
      const int64_t segments = (prompt.earlier + prompt.rows + 63) / 64;
      items.push_back({.q_rows = prompt.rows,
                       .kv_heads = s.kv_heads,
                       .first_position = prompt.earlier,
                       .token_end = prompt.earlier + prompt.rows,
                       .q_offset = first_row * row,
                       .q_row_step = row,
                       .o_offset = first_row * row,
                       .o_row_step = row,
                       .blocks = reinterpret_cast<const std::byte* const*>(device_table->data()) + first_block,
                       .head_step = segments});
      first_block += segments * s.kv_heads;
      first_row += prompt.rows;
    }
    const CudaAttentionShape shape{.group = s.q_heads / s.kv_heads,
                                   .window = s.window,
                                   .layout = layout,
                                   .scale = 1 / std::sqrt(static_cast<float>(s.dim)),
                                   .arena = arena->data(),
                                   .arena_bytes = arena->size_bytes()};
    CudaAttention attention(*device_, kernel_);
    Must(attention.Plan(*stream_, shape, items));
    Must(stream_->SynchronizeStatus());
    const double flops = s.Flops();
    const int calls = flops < 1e12 ? 4 : 1;
    const double us = bench::MedianUs(*device_, *stream_, calls, [&](int) {
      Must(attention.Run(*stream_, shape, {.q = q->data(), .o = o->data()}));
    });
    const PrefillPlan& plan = attention.prefill_plan();
    std::printf("%-22s %10.1f us %7.1f TFLOP/s%s", s.name.c_str(), us, flops / us * 1e-6,
                attention.plan().spans.empty() ? "" : " (few rows)");
    if (plan.pieces > 0) std::printf(" (%d pieces of %zu tiles)", plan.pieces, plan.joins.size());
    std::printf("\n");
    std::fflush(stdout);
  }

 private:
  // bf16 in (-1, 1); as E4M3, no NaN either.
  std::unique_ptr<Buffer> Random(int64_t bytes) {
    auto memory = Must(device_->Allocate(bytes));
    std::vector<uint16_t> values(size_t{1} << 22);
    std::mt19937_64 random(++seed_);
    for (uint16_t& v : values) {
      const uint64_t r = random();
      v = static_cast<uint16_t>((r & 0x8000) | 0x3c00 | (r & 0x0300) | ((r >> 20) & 0x7f));
      if ((v & 0x7f) == 0x7f) v ^= 1;
    }
    const auto piece = static_cast<int64_t>(values.size() * 2);
    for (int64_t at = 0; at < bytes; at += piece)
      Must(stream_->Copy(memory->data() + at, values.data(), std::min(piece, bytes - at)));
    Must(stream_->SynchronizeStatus());
    return memory;
  }

  const CudaAttention::Kernel kernel_;
  std::unique_ptr<CudaDevice> device_;
  std::unique_ptr<CudaStream> stream_;
  uint64_t seed_ = 0;
};

}  // namespace
}  // namespace dovetail::kernels::cuda

int main(int argc, char** argv) {
  using namespace dovetail::kernels::cuda;
  const std::string first = argc > 1 ? argv[1] : "";
  const bool few = first == "few", whole = first == "whole", invariant = first == "invariant";
  const std::string only = few || whole || invariant ? argc > 2 ? argv[2] : "" : first;
  using Kernel = CudaAttention::Kernel;
  Bench bench(few         ? Kernel::kForFewRows
              : whole     ? Kernel::kForManyRowsWhole
              : invariant ? Kernel::kBatchInvariant
                          : Kernel::kFaster);
  for (const Shape& shape : Shapes())
    if (shape.name.starts_with(only)) bench.Time(shape);
  return 0;
}
