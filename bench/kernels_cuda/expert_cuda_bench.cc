// The two products of experts on a GPU, of Qwen3-30B-A3B's shape and of one expert of a linear model of 1B: rates in
// TFLOP/s in tiles of 64 and of 256 rows, the first half with its activation, and cuBLASLt's rate for a dense product
// of as many rows in the same run. Then few rows: all that follows routing, in tiles of 16, 32 and 64 rows and pair by
// pair, and which part of the rate of a plain read that is for the weights of the experts that were chosen.
//   expert_cuda_bench [--quick | --few]

#include <cstdio>
#include <cstring>
#include <random>
#include <set>
#include <vector>

#include "bench/kernels_cuda/cuda_bench.h"
#include "kernels/cuda/experts/expert_ops.h"
#include "kernels/cuda/products/cuda_gemm.h"
#include "kernels/cuda/rows/row_ops.h"

namespace {

using namespace dovetail;
using namespace dovetail::kernels;
using namespace dovetail::kernels::cuda;

using bench::Must;

struct Shape {
  const char* name;
  int experts, chosen, hidden, size;
};
constexpr Shape kShapes[] = {{"128 of 2048 x 768, 8 chosen", 128, 8, 2048, 768},
                             {"1 of 2048 x 5632", 1, 1, 2048, 5632}};
constexpr int kMostRows = 32768;
constexpr size_t kWire = 2;
constexpr int kFewCalls = 8;  // with experts of their own

class Bench {
 public:
  Bench() {
    device_ = Must(CudaDevice::Create(Must(CudaLibrary::Open()), {.index = 0}));
    stream_ = Must(device_->CreateCudaStream());
    gemm_ = Must(CudaGemm::Create(*device_, size_t{64} << 20));
  }

  void Run(const Shape& shape, const std::vector<int>& rows) {
    std::printf("%s\n%7s %6s %10s %10s %10s %10s %10s\n", shape.name, "rows", "tile", "first, us", "TFLOP/s",
                "second, us", "TFLOP/s", "dense");
    const size_t weights = size_t{3} * shape.experts * shape.hidden * shape.size;
    w_ = Random(weights, 0.02f);
    for (const int count : rows) Rows(shape, count);
  }

  void RunFew(const Shape& shape, const std::vector<int>& rows) {
    const size_t weights = size_t{3} * shape.experts * shape.hidden * shape.size;
    w_ = Random(weights, 0.02f);
    const double rate = bench::ReadRate(*device_, *stream_, w_->data(), weights * kWire);
    std::printf("%s, read at %.0f GB/s\n%7s %6s %10s %10s %10s %10s\n", shape.name, rate, "rows", "tile", "tiles, us",
                "pairs, us", "of rate", "of rate");
    for (const int count : rows)
      for (const int tile : {kFewTileRows, kMoreTileRows, kManyTileRows, kGroupedTileRows})
        if (tile != kGroupedTileRows || Must(GroupsProducts(*stream_))) Few(shape, count, tile, rate);
  }

 private:
  using Memory = std::unique_ptr<Buffer>;

  void Few(const Shape& shape, int rows, int tile, double rate) {
    const int pairs = rows * shape.chosen;
    std::vector<int32_t> expert;
    std::mt19937 random(5);
    double distinct = 0;  // experts of a call, on average
    for (int call = 0; call < kFewCalls; ++call) {
      std::set<int32_t> seen;
      for (int row = 0; row < rows; ++row) {
        std::set<int32_t> own;
        while (static_cast<int>(own.size()) < shape.chosen)
          own.insert(static_cast<int32_t>(random() % static_cast<uint32_t>(shape.experts)));
        expert.insert(expert.end(), own.begin(), own.end());
        seen.insert(own.begin(), own.end());
      }
      distinct += static_cast<double>(seen.size()) / kFewCalls;
    }
    expert_ = Must(device_->Allocate(expert.size() * sizeof(int32_t)));
    Must(stream_->Copy(expert_->data(), expert.data(), expert.size() * sizeof(int32_t)));
    slot_ = Must(device_->Allocate(static_cast<size_t>(pairs) * sizeof(int32_t)));
    member_ = Must(device_->Allocate(static_cast<size_t>(pairs) * sizeof(int32_t)));
    weight_ = Must(device_->Allocate(static_cast<size_t>(pairs) * sizeof(float)));
    x_ = Random(static_cast<size_t>(rows) * shape.hidden, 1);
    gate_up_ = Random(static_cast<size_t>(pairs) * 2 * shape.size, 1);
    act_ = Random(static_cast<size_t>(pairs) * shape.size, 1);
    out_ = Random(static_cast<size_t>(pairs) * shape.hidden * 2, 1);
    sum_ = Random(static_cast<size_t>(rows) * shape.hidden * 2, 1);
    MakeTiles(shape, pairs, tile);
    const int32_t* const all = reinterpret_cast<const int32_t*>(expert_->data());
    const double tiles = bench::MedianUs(*device_, *stream_, kFewCalls, [&](int call) {
      Place(shape, all + call * pairs, pairs, tile);
      First(shape, tile);
      Second(shape, tile, /*follows=*/true);
      Must(SumExperts(*stream_, {.y = reinterpret_cast<const float*>(out_->data()),
                                 .slot = reinterpret_cast<const int32_t*>(slot_->data()),
                                 .weight = reinterpret_cast<const float*>(weight_->data()),
                                 .out = reinterpret_cast<float*>(sum_->data()),
                                 .rows = rows,
                                 .chosen = shape.chosen,
                                 .size = shape.hidden}));
    });
    const double by_pair =
        bench::MedianUs(*device_, *stream_, kFewCalls, [&](int call) { Pairs(shape, all + call * pairs, rows); });
    const double bytes = distinct * 3 * shape.hidden * shape.size * kWire;
    std::printf("%7d %6d %10.1f %10.1f %10.2f %10.2f\n", rows, tile, tiles, by_pair, bytes / tiles / 1e3 / rate,
                bytes / by_pair / 1e3 / rate);
  }

  void Pairs(const Shape& shape, const int32_t* expert, int rows) {
    Must(GatePairs(*stream_, {.x = x_->data(),
                              .expert = expert,
                              .w = w_->data(),
                              .y = act_->data(),
                              .pairs = rows * shape.chosen,
                              .chosen = shape.chosen,
                              .size = shape.size,
                              .k = shape.hidden}));
    Must(SumPairs(*stream_, {.x = act_->data(),
                             .expert = expert,
                             .weight = reinterpret_cast<const float*>(weight_->data()),
                             .w = w_->data() + size_t{2} * shape.experts * shape.hidden * shape.size * kWire,
                             .out = reinterpret_cast<float*>(sum_->data()),
                             .rows = rows,
                             .chosen = shape.chosen,
                             .n = shape.hidden,
                             .k = shape.size}));
  }

  Memory Random(size_t elements, float range) {
    auto memory = Must(device_->Allocate(elements * kWire));
    Must(FillRandom(*stream_, {.out = memory->data(),
                               .type = WireType::kBF16,
                               .range = range,
                               .seed = ++seed_,
                               .count = static_cast<int64_t>(elements)}));
    return memory;
  }

  void Rows(const Shape& shape, int rows) {
    const int pairs = rows * shape.chosen;
    std::vector<int32_t> expert(static_cast<size_t>(pairs));
    std::mt19937 random(5);
    for (int32_t& of : expert) of = static_cast<int32_t>(random() % static_cast<uint32_t>(shape.experts));
    expert_ = Must(device_->Allocate(expert.size() * sizeof(int32_t)));
    Must(stream_->Copy(expert_->data(), expert.data(), expert.size() * sizeof(int32_t)));
    slot_ = Must(device_->Allocate(expert.size() * sizeof(int32_t)));
    member_ = Must(device_->Allocate(expert.size() * sizeof(int32_t)));
    x_ = Random(static_cast<size_t>(rows) * shape.hidden, 1);
    gate_up_ = Random(static_cast<size_t>(pairs) * 2 * shape.size, 1);
    act_ = Random(static_cast<size_t>(pairs) * shape.size, 1);
    out_ = Random(static_cast<size_t>(pairs) * shape.hidden * 2, 1);
    const double flops = 2.0 * pairs * shape.hidden * shape.size;
    const double dense = bench::MedianUs(*device_, *stream_, 1, [&](int) {
      Must(gemm_->Run(*stream_, {.x = x_->data(),
                                 .w = w_->data(),
                                 .y = gate_up_->data(),
                                 .m = rows,
                                 .n = 2 * shape.size * (shape.experts > 1 ? shape.chosen : 1),
                                 .k = shape.hidden,
                                 .x_stride = shape.hidden,
                                 .w_stride = shape.hidden,
                                 .y_stride = 2 * shape.size * (shape.experts > 1 ? shape.chosen : 1)}));
    });
    for (const int tile : {kManyTileRows, kGroupedTileRows}) {
      if (tile == kGroupedTileRows && !Must(GroupsProducts(*stream_))) continue;
      MakeTiles(shape, pairs, tile);
      Place(shape, reinterpret_cast<const int32_t*>(expert_->data()), pairs, tile);
      const double first = bench::MedianUs(*device_, *stream_, 1, [&](int) { First(shape, tile); });
      const double second = bench::MedianUs(*device_, *stream_, 1, [&](int) { Second(shape, tile); });
      std::printf("%7d %6d %10.1f %10.0f %10.1f %10.0f %10.0f\n", rows, tile, first, 2 * flops / first / 1e6, second,
                  flops / second / 1e6, 2 * flops / dense / 1e6);
    }
  }

  void MakeTiles(const Shape& shape, int pairs, int tile) {
    most_tiles_ = MostExpertTiles(pairs, shape.experts, tile);
    tiles_ = Must(device_->Allocate(static_cast<size_t>(most_tiles_) * sizeof(ExpertTile)));
  }

  void Place(const Shape& shape, const int32_t* expert, int pairs, int tile) {
    Must(PlaceExperts(*stream_, {.expert = expert,
                                 .slot = reinterpret_cast<int32_t*>(slot_->data()),
                                 .member = reinterpret_cast<int32_t*>(member_->data()),
                                 .tiles = reinterpret_cast<ExpertTile*>(tiles_->data()),
                                 .pairs = pairs,
                                 .chosen = shape.chosen,
                                 .experts = shape.experts,
                                 .tile_rows = tile,
                                 .most_tiles = most_tiles_}));
  }

  ExpertGemmLaunch Launch(const Shape& shape, int tile) const {
    return {.type = WireType::kBF16,
            .tiles = reinterpret_cast<const ExpertTile*>(tiles_->data()),
            .most_tiles = most_tiles_,
            .tile_rows = tile,
            .experts = shape.experts};
  }

  void First(const Shape& shape, int tile) {
    ExpertGemmLaunch launch = Launch(shape, tile);
    launch.x = x_->data();
    launch.member = reinterpret_cast<const int32_t*>(member_->data());
    launch.w = w_->data();
    launch.y = act_->data();
    launch.n = 2 * shape.size;
    launch.k = shape.hidden;
    launch.activation = ExpertActivation::kSilu;
    Must(MultiplyExperts(*stream_, launch));
  }

  // `follows`: First is the launch before.
  void Second(const Shape& shape, int tile, bool follows = false) {
    ExpertGemmLaunch launch = Launch(shape, tile);
    launch.follows_product = follows ? 1 : 0;
    launch.x = act_->data();
    launch.w = w_->data() + size_t{2} * shape.experts * shape.hidden * shape.size * kWire;
    launch.y = out_->data();
    launch.y_is_f32 = 1;
    launch.n = shape.hidden;
    launch.k = shape.size;
    Must(MultiplyExperts(*stream_, launch));
  }

  std::unique_ptr<CudaDevice> device_;
  std::unique_ptr<CudaStream> stream_;
  std::unique_ptr<CudaGemm> gemm_;
  Memory w_, x_, expert_, slot_, member_, weight_, tiles_, gate_up_, act_, out_, sum_;
  int32_t most_tiles_ = 0;
  uint64_t seed_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  const bool quick = argc > 1 && std::strcmp(argv[1], "--quick") == 0;
  const bool few = argc > 1 && std::strcmp(argv[1], "--few") == 0;
  Bench bench;
  for (const Shape& shape : kShapes) {
    if (few) break;
    bench.Run(shape, quick ? std::vector<int>{512, 8192}
                           : std::vector<int>{256, 512, 1024, 2048, 4096, 8192, 16384, kMostRows});
  }
  bench.RunFew(kShapes[0], {1, 2, 4, 6, 8, 12, 16, 32, 64, 128, 192, 256, 384, 512});
}
