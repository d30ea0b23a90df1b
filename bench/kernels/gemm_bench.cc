// gemm_bench [--threads N] [--isa avx2|avx512|amx] [--rows 1,8,...] [--formats Q4_1,Q8_0,...]
// [--activations 8|16]: the
// matrix products of one SmolLM2-135M step for several numbers of rows, against what this machine's
// memory and registers can do in the same run.
//
// A step is 30 layers of q, k and v; o; gate and up; down, each with weights of its own, and
// optionally the head: as in the model, no weight is in a cache because the step before used it
// unless the whole model fits.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "bench/kernels/peaks.h"
#include "kernels/cpu/isa.h"
#include "kernels/gemm.h"
#include "kernels/thread_pool.h"

namespace dovetail::bench {
namespace {

using namespace dovetail::kernels;
using Clock = std::chrono::steady_clock;

constexpr int kLayers = 30, kHidden = 576, kKv = 192, kFfn = 1536, kVocab = 49152;
constexpr int64_t kMaxRows = 512;
constexpr double kSecondsEach = 0.4;

struct Options {
  int threads = 0;
  Isa isa = kStrongestIsa;
  ActivationBits activations = ActivationBits::k16;  // as every projection has
  std::vector<int64_t> rows = {1, 2, 4, 8, 16, 64, 512};
  std::vector<std::string> formats = {"Q4_1", "Q4_0", "Q8_0", "Q6_K", "BF16", "F32"};
};

// One product: y [m, rows] = x W^T for each of `rows`, all from the same x.
struct Op {
  const char* name;
  int64_t cols;
  std::vector<int64_t> rows;
};

const std::vector<Op>& LayerOps() {
  static const std::vector<Op> ops = {{"qkv", kHidden, {kHidden, kKv, kKv}},
                                      {"o", kHidden, {kHidden}},
                                      {"gate+up", kHidden, {kFfn, kFfn}},
                                      {"down", kFfn, {kHidden}}};
  return ops;
}

PackedWeights RandomWeights(RowFormat format, int64_t rows, int64_t cols, ThreadPool& pool) {
  const int64_t row_bytes = RowBytes(format, cols);
  std::vector<std::byte> bytes(row_bytes);
  std::mt19937 random(1);
  for (std::byte& b : bytes) b = static_cast<std::byte>(random() & 0x3b);  // no NaN as a scale or a number
  if (!IsQuantized(DirectFormat(format))) {
    // Nor denormals, which take some processors 150 cycles each.
    const int width = Info(format).block_bytes;
    for (size_t i = static_cast<size_t>(width) - 1; i < bytes.size(); i += static_cast<size_t>(width))
      bytes[i] = std::byte{0x3b};
  }
  return PackWeights(DirectFormat(format), {format, rows, cols, [&](int64_t) { return bytes.data(); }}, &pool).value();
}

struct Cost {
  double macs = 0, bytes = 0;
};

// An op with weights, ready to run.
class Product {
 public:
  Product(const Op& op, RowFormat format, ActivationBits activations, Stream& stream)
      : stream_(stream), activations_(activations), cols_(RoundCols(format, op.cols)) {
    for (const int64_t rows : op.rows) weights_.push_back(RandomWeights(format, rows, cols_, stream.pool()));
    for (const PackedWeights& w : weights_)
      cost_.macs += static_cast<double>(w.rows()) * static_cast<double>(w.cols()),
          cost_.bytes += static_cast<double>(w.size_bytes());
  }
  // K-quants want whole blocks of 256: the next width stands in for 576.
  static int64_t RoundCols(RowFormat format, int64_t cols) {
    const int block = Info(format).block_elements;
    return (cols + block - 1) / block * block;
  }
  Cost cost() const { return cost_; }

  void Run(const float* x, float* y, int64_t m, std::span<std::byte> scratch) {
    GemmOutput outputs[3];
    for (size_t i = 0; i < weights_.size(); ++i) {
      outputs[i] = {.weights = &weights_[i], .y = y, .y_stride = weights_[i].rows(), .activations = activations_};
      y += m * weights_[i].rows();
    }
    const absl::Status status =
        Gemm({.x = x, .x_stride = cols_, .m = m, .outputs = {outputs, weights_.size()}, .scratch = scratch}, stream_);
    if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  }

 private:
  Stream& stream_;
  ActivationBits activations_;
  int64_t cols_;
  std::vector<PackedWeights> weights_;
  Cost cost_;
};

template <typename Step>
double BestSeconds(Step step) {
  double best = 1e9;
  const auto begin = Clock::now();
  int runs = 0;
  while (runs < 3 || std::chrono::duration<double>(Clock::now() - begin).count() < kSecondsEach) {
    const auto start = Clock::now();
    step();
    best = std::min(best, std::chrono::duration<double>(Clock::now() - start).count());
    ++runs;
  }
  return best;
}

class Bench {
 public:
  explicit Bench(const Options& options)
      : options_(options),
        device_(CreateCpuDevice({.threads = options.threads, .max_isa = options.isa}).value()),
        stream_(device_->CreateStream()) {
    peaks_ = MeasurePeaks(stream_->pool());
    std::printf(
        "%d threads, %s; peaks of this run: vpdpbusd %.0f GOP/s, vdpbf16ps %.0f GFLOP/s, memory "
        "read %.1f GB/s\n\n",
        stream_->pool().threads(), Name(std::min(options.isa, *DetectIsa())), peaks_.int8_gops, peaks_.bf16_gflops,
        peaks_.read_gb_per_s);
  }

  void RunFormat(RowFormat format) {
    std::printf("%-6s %-8s %5s %10s %9s %7s %8s %7s\n", Info(format).name, "op", "m", "us/layer", "GOP/s", "of peak",
                "GB/s", "of read");
    std::vector<std::vector<Product>> layers(kLayers);
    for (auto& layer : layers) {
      for (const Op& op : LayerOps()) layer.emplace_back(op, format, options_.activations, *stream_);
    }
    std::vector<float> x(kMaxRows * 2048), y(kMaxRows * 2 * kFfn + 1);
    std::mt19937 random(2);
    for (float& v : x) v = std::normal_distribution<float>()(random);
    AlignedBuffer scratch = AlignedBuffer::Create(GemmScratchBytes(kMaxRows, 2048)).value();
    for (const int64_t m : options_.rows) {
      Cost total;
      for (size_t op = 0; op < LayerOps().size(); ++op) {
        const double seconds = BestSeconds([&] {
                                 for (auto& layer : layers) layer[op].Run(x.data(), y.data(), m, scratch.bytes());
                               }) /
                               kLayers;
        Print(format, LayerOps()[op].name, m, seconds, layers[0][op].cost());
        total.macs += layers[0][op].cost().macs;
        total.bytes += layers[0][op].cost().bytes;
      }
      const double seconds = BestSeconds([&] {
                               for (auto& layer : layers) {
                                 for (Product& product : layer) product.Run(x.data(), y.data(), m, scratch.bytes());
                               }
                             }) /
                             kLayers;
      Print(format, "layer", m, seconds, total);
      std::printf("%24s 30 layers: %.2f ms, %.0f tok/s\n", "", seconds * kLayers * 1e3,
                  static_cast<double>(m) / (seconds * kLayers));
    }
  }

  void RunHead(RowFormat format) {
    constexpr int64_t kMaxHeadM = 64;
    Product head({"head", kHidden, {kVocab}}, format, options_.activations, *stream_);
    std::vector<float> x(kMaxHeadM * 1024, 0.5f), y(kMaxHeadM * kVocab);
    AlignedBuffer scratch = AlignedBuffer::Create(GemmScratchBytes(kMaxHeadM, 1024)).value();
    for (const int64_t m : options_.rows) {
      if (m > kMaxHeadM) continue;
      Print(format, "head", m, BestSeconds([&] { head.Run(x.data(), y.data(), m, scratch.bytes()); }), head.cost());
    }
  }

 private:
  void Print(RowFormat format, const char* op, int64_t m, double seconds, const Cost& cost) const {
    const double gops = 2e-9 * cost.macs * static_cast<double>(m) / seconds, gb = cost.bytes * 1e-9 / seconds;
    const double peak = IsQuantized(DirectFormat(format)) ? peaks_.int8_gops : peaks_.bf16_gflops;
    std::printf("%-6s %-8s %5d %10.1f %9.1f %6.0f%% %8.1f %6.0f%%\n", Info(format).name, op, static_cast<int>(m),
                seconds * 1e6, gops, peak > 0 ? 100 * gops / peak : 0, gb, 100 * gb / peaks_.read_gb_per_s);
  }

  const Options options_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Stream> stream_;
  Peaks peaks_;
};

bool ParseOptions(int argc, char** argv, Options& options) {
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string flag = argv[i], value = argv[i + 1];
    if (flag == "--threads" && absl::SimpleAtoi(value, &options.threads)) continue;
    if (flag == "--isa") {
      const std::optional<Isa> isa = IsaCalled(value);
      if (!isa) return false;
      options.isa = *isa;
      continue;
    }
    if (flag == "--activations" && (value == "8" || value == "16")) {
      options.activations = value == "8" ? ActivationBits::k8 : ActivationBits::k16;
      continue;
    }
    if (flag == "--rows") {
      options.rows.clear();
      for (const auto piece : absl::StrSplit(value, ',')) {
        if (!absl::SimpleAtoi(piece, &options.rows.emplace_back()) || options.rows.back() < 1 ||
            options.rows.back() > kMaxRows)
          return false;
      }
      continue;
    }
    if (flag == "--formats") {
      options.formats = absl::StrSplit(value, ',');
      continue;
    }
    return false;
  }
  return argc % 2 == 1;
}

int Main(int argc, char** argv) {
  Options options;
  if (!ParseOptions(argc, argv, options)) {
    std::fprintf(stderr,
                 "usage: gemm_bench [--threads N] [--isa avx2|avx512|amx] [--rows 1,8,...] [--formats "
                 "Q4_1,Q8_0,BF16,...] [--activations 8|16]\n");
    return 2;
  }
  Bench bench(options);
  for (const std::string& name : options.formats) {
    for (int f = 0; f < kRowFormats; ++f) {
      const auto format = static_cast<RowFormat>(f);
      if (name != Info(format).name) continue;
      bench.RunFormat(format);
      bench.RunHead(format);
      std::printf("\n");
    }
  }
  return 0;
}

}  // namespace
}  // namespace dovetail::bench

int main(int argc, char** argv) { return dovetail::bench::Main(argc, argv); }
