// The experts of a layer of Qwen3-30B-A3B's shape on a GPU (128 of 2048 x 768, 8 chosen), with weights in 4 and 8 bits
// and in 16, in one run: microseconds of both products, the first with its activation, of codes read as they are (c)
// and unpacked (u); the rate at which the codes of chosen experts are read over the measured read rate; and how much
// faster than 16 bits. Calls that follow each other choose other experts, so that the L2 holds few of those that one
// row reads.
//   expert_codes_cuda_bench [--quick]

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "bench/kernels_cuda/cuda_bench.h"
#include "kernels/cuda/experts/expert_ops.h"
#include "kernels/cuda/experts/expert_product.h"
#include "kernels/cuda/rows/row_ops.h"

namespace {

using namespace dovetail;
using namespace dovetail::kernels;
using namespace dovetail::kernels::cuda;

using bench::Must;

constexpr int kExperts = 128, kChosen = 8, kHidden = 2048, kSize = 768;
constexpr int kMostRows = 8192;
constexpr size_t kWire = 2;

class Bench {
 public:
  explicit Bench(bool quick) : quick_(quick) {
    device_ = Must(CudaDevice::Create(Must(CudaLibrary::Open()), {.index = 0}));
    stream_ = Must(device_->CreateCudaStream());
    experts_ = Must(ExpertProduct::Create(*device_, ExpertProduct::ScratchBytes(kExperts, 2 * kSize, kHidden)));
    const int64_t pairs = int64_t{kMostRows} * kChosen;
    x_ = Random(int64_t{kMostRows} * kHidden, 1);
    act_ = Random(pairs * kSize, 1);
    out_ = Random(pairs * kHidden * 2, 1);
    rate_ = bench::ReadRate(*device_, *stream_, out_->data(), pairs * kHidden * 4);
    std::printf("%s; read rate %.0f GB/s\n%6s %-10s %3s %10s %10s %10s %8s %8s\n", device_->info().name, rate_, "rows",
                "kept as", "", "first, us", "second, us", "both, us", "of rate", "faster");
  }

  void Run() {
    const std::vector<int> rows =
        quick_ ? std::vector<int>{1, 64} : std::vector<int>{1, 16, 64, 256, 512, 1024, 2048, 8192};
    std::map<int, double> wide;
    Weights in_16_bits = Wide();
    for (const int count : rows) {
      Route(count);
      wide[count] = Print(count, "bf16", in_16_bits, TileRowsOf(count), 0);
    }
    in_16_bits = {};
    for (const QuantKind kind : {QuantKind::kU4, QuantKind::kU4Offset, QuantKind::kU8, QuantKind::kU8Group16}) {
      const Weights weights = Kept(kind);
      for (const int count : rows) {
        Route(count);
        if (count <= 1024) Print(count, Name(kind), weights, kFewTileRows, wide[count]);
        if (count >= 512) Print(count, Name(kind), weights, TileRowsOf(count), wide[count]);
      }
    }
  }

 private:
  using Memory = std::unique_ptr<Buffer>;
  struct Weights {
    CudaWeights gate_up, down;
    double bytes_of_one = 0;  // expert
  };
  // Rows and the experts that they chose, once.
  struct Choice {
    Memory expert, slot, member, tiles;
    int chosen = 0;  // different experts
  };

  Memory Random(int64_t elements, float range) {
    auto memory = Must(device_->Allocate(static_cast<size_t>(elements) * kWire));
    FillMemory(memory->data(), elements, WireType::kBF16, range);
    return memory;
  }
  void FillMemory(void* to, int64_t elements, WireType type, float range) {
    Must(FillRandom(*stream_, {.out = to, .type = type, .range = range, .seed = ++seed_, .count = elements}));
    Must(stream_->SynchronizeStatus());
  }

  Weights Wide() {
    Weights out;
    out.gate_up = Must(CudaWeights::Allocate(*device_, kExperts * 2 * kSize, kHidden, WireType::kBF16));
    out.down = Must(CudaWeights::Allocate(*device_, kExperts * kHidden, kSize, WireType::kBF16));
    for (CudaWeights* weights : {&out.gate_up, &out.down}) {
      FillMemory(weights->mutable_data(), weights->rows() * weights->cols(), WireType::kBF16, 0.03f);
      out.bytes_of_one += static_cast<double>(weights->size_bytes()) / kExperts;
    }
    return out;
  }

  Weights Kept(QuantKind kind) {
    Weights out;
    out.gate_up = KeptOf({kind, kExperts * 2 * kSize, 2 * kSize}, kHidden);
    out.down = KeptOf({kind, kExperts * kHidden, 0}, kSize);
    for (const CudaWeights* weights : {&out.gate_up, &out.down})
      out.bytes_of_one += static_cast<double>(weights->size_bytes()) / kExperts;
    return out;
  }

  CudaWeights KeptOf(const CudaWeights::KeptRows& rows, int cols) {
    CudaWeights weights = Must(CudaWeights::AllocateKept(*device_, {&rows, 1}, cols, WireType::kBF16));
    const QuantMatrix& w = weights.kept()[0].matrix;
    const QuantBytes bytes = QuantBytesOf(w.kind, w.rows, w.cols);
    FillMemory(const_cast<void*>(w.codes), static_cast<int64_t>(bytes.codes / 2), WireType::kF16, 1);
    if (bytes.scales > 0)
      FillMemory(const_cast<void*>(w.scales), static_cast<int64_t>(bytes.scales / 2), WireType::kF16, 0.004f);
    const std::vector<float> ones(bytes.factors / sizeof(float), 1.0f);
    Must(stream_->Copy(const_cast<float*>(w.factor), ones.data(), bytes.factors));
    Must(stream_->SynchronizeStatus());
    return weights;
  }

  static int TileRowsOf(int rows) {
    const int each = rows * kChosen / kExperts;
    return each >= 32 ? kGroupedTileRows : each >= 14 ? kMoreTileRows : kFewTileRows;
  }

  // One row's choices take all experts in turn, so that none is chosen twice in a graph.
  void Route(int rows) {
    choices_.clear();
    std::mt19937 random(5);
    for (int i = 0; i < (rows == 1 ? kExperts / kChosen : 4); ++i) {
      std::vector<int32_t> expert;
      for (int row = 0; row < rows; ++row) {
        std::set<int32_t> of_row;
        while (of_row.size() < kChosen)
          of_row.insert(rows == 1 ? i * kChosen + static_cast<int>(of_row.size())
                                  : static_cast<int>(random() % kExperts));
        expert.insert(expert.end(), of_row.begin(), of_row.end());
      }
      Choice choice;
      choice.chosen = static_cast<int>(std::set<int32_t>(expert.begin(), expert.end()).size());
      const size_t bytes = expert.size() * sizeof(int32_t);
      choice.expert = Must(device_->Allocate(bytes));
      Must(stream_->Copy(choice.expert->data(), expert.data(), bytes));
      Must(stream_->SynchronizeStatus());
      choice.slot = Must(device_->Allocate(bytes));
      choice.member = Must(device_->Allocate(bytes));
      choices_.push_back(std::move(choice));
    }
  }

  void Place(int rows, int tile_rows) {
    most_tiles_ = MostExpertTiles(rows * kChosen, kExperts, tile_rows);
    for (Choice& choice : choices_) {
      choice.tiles = Must(device_->Allocate(static_cast<size_t>(most_tiles_) * sizeof(ExpertTile)));
      Must(PlaceExperts(*stream_, {.expert = reinterpret_cast<const int32_t*>(choice.expert->data()),
                                   .slot = reinterpret_cast<int32_t*>(choice.slot->data()),
                                   .member = reinterpret_cast<int32_t*>(choice.member->data()),
                                   .tiles = reinterpret_cast<ExpertTile*>(choice.tiles->data()),
                                   .pairs = rows * kChosen,
                                   .chosen = kChosen,
                                   .experts = kExperts,
                                   .tile_rows = tile_rows,
                                   .most_tiles = most_tiles_}));
    }
  }

  ExpertGemmLaunch Launch(const Choice& choice, int tile_rows) const {
    return {.type = WireType::kBF16,
            .tiles = reinterpret_cast<const ExpertTile*>(choice.tiles->data()),
            .most_tiles = most_tiles_,
            .tile_rows = tile_rows,
            .experts = kExperts};
  }

  void First(const Weights& weights, const Choice& choice, int rows, int tile_rows) {
    ExpertGemmLaunch launch = Launch(choice, tile_rows);
    launch.x = x_->data();
    launch.member = reinterpret_cast<const int32_t*>(choice.member->data());
    launch.y = act_->data();
    launch.n = 2 * kSize;
    launch.k = kHidden;
    launch.activation = ExpertActivation::kSilu;
    Must(experts_->Run(*stream_, weights.gate_up, launch, rows));
  }

  void Second(const Weights& weights, const Choice& choice, int rows, int tile_rows, bool follows) {
    ExpertGemmLaunch launch = Launch(choice, tile_rows);
    launch.x = act_->data();
    launch.y = out_->data();
    launch.y_is_f32 = 1;
    launch.follows_product = follows ? 1 : 0;
    launch.n = kHidden;
    launch.k = kSize;
    Must(experts_->Run(*stream_, weights.down, launch, rows));
  }

  // Microseconds of both.
  double Print(int rows, const char* name, const Weights& weights, int tile_rows, double wide) {
    Place(rows, tile_rows);
    const int calls = static_cast<int>(choices_.size());
    const auto time = [&](auto&& enqueue) {
      return bench::MedianUs(*device_, *stream_, calls, [&](int i) { enqueue(choices_[static_cast<size_t>(i)]); });
    };
    const double first = time([&](const Choice& choice) { First(weights, choice, rows, tile_rows); });
    const double second = time([&](const Choice& choice) { Second(weights, choice, rows, tile_rows, false); });
    const double both = time([&](const Choice& choice) {
      First(weights, choice, rows, tile_rows);
      Second(weights, choice, rows, tile_rows, true);
    });
    double chosen = 0;
    for (const Choice& choice : choices_) chosen += static_cast<double>(choice.chosen) / calls;
    const char* const how = !weights.gate_up.is_kept() ? "" : tile_rows == kFewTileRows ? "c" : "u";
    std::printf("%6d %-10s %3s %10.1f %10.1f %10.1f %8.2f %8.2f\n", rows, name, how, first, second, both,
                chosen * weights.bytes_of_one / both / 1e3 / rate_, wide > 0 ? wide / both : 1.0);
    return both;
  }

  const bool quick_;
  std::unique_ptr<CudaDevice> device_;
  std::unique_ptr<CudaStream> stream_;
  std::unique_ptr<ExpertProduct> experts_;
  Memory x_, act_, out_;
  std::vector<Choice> choices_;
  int32_t most_tiles_ = 0;
  double rate_ = 0;
  uint64_t seed_ = 0;
};

}  // namespace

int main(int argc, char** argv) { Bench(argc > 1 && std::strcmp(argv[1], "--quick") == 0).Run(); }
