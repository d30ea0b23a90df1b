// Products with weights in 4 and 8 bits on a GPU, of the shapes of Llama-3-8B's layers: microseconds, the rate at which
// codes and scales are read over the measured read rate, and the time of the bf16 product in the same run. Calls that
// follow each other take other weights, so that the L2 holds none of them. Beyond CudaProduct::kMostKeptRows rows, both
// ways: codes read for every 16 rows, and unpacked for cuBLASLt.
//   quant_cuda_bench [--quick]

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "bench/kernels_cuda/cuda_bench.h"
#include "kernels/cuda/products/cuda_gemm.h"
#include "kernels/cuda/products/cuda_product.h"
#include "kernels/cuda/products/quant_ops.h"

namespace {

using namespace dovetail;
using namespace dovetail::kernels;
using namespace dovetail::kernels::cuda;

using bench::Must;

struct Shape {
  const char* name;
  int64_t n, k;
  bool added;  // to the residual stream, in f32
};
constexpr Shape kShapes[] = {{"q, k, v", 6144, 4096, false},
                             {"o", 4096, 4096, true},
                             {"gate, up", 28672, 4096, false},
                             {"down", 4096, 14336, true}};
constexpr size_t kPoolBytes = size_t{1} << 30;
constexpr int64_t kMostRows = 2048;

class Bench {
 public:
  explicit Bench(bool quick) : quick_(quick) {
    device_ = Must(CudaDevice::Create(Must(CudaLibrary::Open()), {.index = 0}));
    stream_ = Must(device_->CreateCudaStream());
    product_ = Must(CudaProduct::Create(*device_, /*keeps=*/true));
    weights_ = Random(kPoolBytes, 0.02f);
    scales_ = Random(kPoolBytes / 2, 0.01f);
    x_ = Random(kMostRows * 14336 * 2, 1);
    y_ = Random(kMostRows * 28672 * 4, 1);
  }

  void Run() {
    rate_ = bench::ReadRate(*device_, *stream_, weights_->data(), kPoolBytes);
    std::printf("%s, %d multiprocessors; read rate %.0f GB/s\n", device_->info().name, device_->info().multiprocessors,
                rate_);
    std::printf("%-9s %-10s %5s %9s %7s %9s %7s\n", "shape", "kept as", "rows", "us", "of rate", "bf16, us", "faster");
    for (const Shape& shape : kShapes) {
      for (const int m : quick_ ? std::vector<int>{1, 16} : std::vector<int>{1, 4, 8, 16, 32, 64}) {
        const double bf16 = TimeBF16(shape, m);
        for (const QuantKind kind : {QuantKind::kU4, QuantKind::kU4Offset, QuantKind::kFp4, QuantKind::kU8,
                                     QuantKind::kU8Group16, QuantKind::kE4M3}) {
          if (m > 16 && kind != QuantKind::kU4Offset && kind != QuantKind::kU8) continue;
          Print(shape, Name(kind), m, TimeKept(shape, kind, m), bf16, QuantBytesOf(kind, shape.n, shape.k).total());
        }
        if (m >= 16) {
          for (const QuantKind kind : {QuantKind::kU4Offset, QuantKind::kU8})
            Print(shape, (std::string(Name(kind)) + "*").c_str(), m, TimeUnpacked(shape, kind, m), bf16, 0);
        }
      }
      for (const int m : {128, 512, 2048}) {
        const double bf16 = TimeBF16(shape, m);
        Print(shape, "u4-offset*", m, TimeUnpacked(shape, QuantKind::kU4Offset, m), bf16, 0);
      }
    }
    std::printf("* unpacked for cuBLASLt\n");
  }

 private:
  std::unique_ptr<Buffer> Random(size_t bytes, float range) {
    auto memory = Must(device_->Allocate(bytes));
    RandomLaunch random;
    random.out = memory->data();
    random.type = WireType::kF16;
    random.range = range;
    random.seed = ++seed_;
    random.count = static_cast<int64_t>(bytes / 2);
    Must(FillRandom(*stream_, random));
    Must(stream_->SynchronizeStatus());
    return memory;
  }

  template <typename Enqueue>
  double MedianUs(int calls, Enqueue&& enqueue) {
    return bench::MedianUs(*device_, *stream_, calls, enqueue, quick_ ? 3 : 7);
  }

  GemmCall CallOf(const Shape& s, int m) {
    GemmCall call{};
    call.x = x_->data();
    call.y = y_->data();
    call.m = m, call.n = s.n, call.k = s.k;
    call.x_stride = call.w_stride = s.k;
    call.y_stride = s.n;
    call.type = GemmType::kF16;
    call.y_is_f32 = call.accumulate = s.added ? 1 : 0;
    return call;
  }

  double TimeBF16(const Shape& s, int m) {
    const size_t bytes = s.n * s.k * 2;
    const int copies = static_cast<int>(std::min<size_t>(16, kPoolBytes / bytes));
    return MedianUs(copies, [&](int i) {
      GemmCall call = CallOf(s, m);
      call.type = GemmType::kBF16;
      call.w = weights_->data() + i * bytes;
      Must(gemm().Run(*stream_, call));
    });
  }

  CudaGemm& gemm() {
    if (gemm_ == nullptr) gemm_ = Must(CudaGemm::Create(*device_));
    return *gemm_;
  }

  QuantMatrix MatrixOf(const Shape& s, QuantKind kind, int i) {
    const QuantBytes bytes = QuantBytesOf(kind, s.n, s.k);
    QuantMatrix w;
    w.codes = weights_->data() + i * bytes.codes;
    w.scales = bytes.scales > 0 ? scales_->data() + i * bytes.scales : nullptr;
    w.factor = reinterpret_cast<const float*>(x_->data());
    w.rows = static_cast<int32_t>(s.n), w.cols = static_cast<int32_t>(s.k), w.kind = kind;
    return w;
  }
  static int Copies(const Shape& s, QuantKind kind) {
    return static_cast<int>(std::min<size_t>(24, kPoolBytes / QuantBytesOf(kind, s.n, s.k).codes));
  }

  double TimeKept(const Shape& s, QuantKind kind, int m) {
    return MedianUs(Copies(s, kind), [&](int i) {
      const GemmCall call = CallOf(s, m);
      QuantGemmLaunch launch;
      launch.w = MatrixOf(s, kind, i);
      launch.x = call.x;
      launch.y = call.y;
      launch.x_stride = call.x_stride, launch.y_stride = call.y_stride;
      launch.m = m;
      launch.y_is_f32 = call.y_is_f32, launch.accumulate = call.accumulate;
      Must(MultiplyQuant(*stream_, launch));
    });
  }

  double TimeUnpacked(const Shape& s, QuantKind kind, int m) {
    return MedianUs(std::min(8, Copies(s, kind)), [&](int i) {
      GemmCall call = CallOf(s, m);
      call.type = GemmType::kBF16;
      Must(product_->RunUnpacked(*stream_, MatrixOf(s, kind, i), WireType::kBF16, call));
    });
  }

  void Print(const Shape& s, const char* kept, int m, double us, double bf16, size_t bytes) {
    const double share = static_cast<double>(bytes) / us / 1e3 / rate_;
    std::printf("%-9s %-10s %5d %9.2f %7.3f %9.2f %7.2f\n", s.name, kept, m, us, share, bf16, bf16 / us);
  }

  const bool quick_;
  std::unique_ptr<CudaDevice> device_;
  std::unique_ptr<CudaStream> stream_;
  std::unique_ptr<CudaProduct> product_;
  std::unique_ptr<CudaGemm> gemm_;
  std::unique_ptr<Buffer> weights_, scales_, x_, y_;
  uint64_t seed_ = 0;
  double rate_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  Bench bench(argc > 1 && std::string(argv[1]) == "--quick");
  bench.Run();
  return 0;
}
