// Times one decode step of a Llama-3-8B shape on a GPU, as one CUDA graph: embeddings, 32 layers (norms, products,
// rope with KV append, paged attention, activations), the head and greedy sampling, with random bf16 weights and 1024
// tokens of KV a sequence.
//   decode_step_cuda_bench [--parts] [--cut O,DOWN] [--batch N]
// --parts: what each takes. --cut: in how many parts o and down are multiplied, for the next norm to add up; 1: they
// are added at once. If it is not said, as the engine does (CudaProduct::PartsFor).
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bench/kernels_cuda/cuda_bench.h"
#include "kernels/cuda/attention/cuda_attention.h"
#include "kernels/cuda/products/cuda_gemm.h"
#include "kernels/cuda/products/cuda_product.h"
#include "kernels/cuda/rows/row_ops.h"
#include "kernels/cuda/sampling/sample.h"

namespace dovetail::kernels::cuda {
namespace {

constexpr int kLayers = 32, kHidden = 4096, kQHeads = 32, kKvHeads = 8, kDim = 128, kFfn = 14336, kVocab = 128256;
constexpr int kContext = 1024, kMaxBatch = 256;
constexpr int kQkv = (kQHeads + 2 * kKvHeads) * kDim;

using bench::Must;

// What is enqueued of a step.
enum Part : unsigned {
  kProducts = 1,
  kAttention = 2,
  kAppend = 4,
  kNorms = 8,
  kActivation = 16,
  kHead = 32,
  kAll = 63
};

// Parts of a product: those of o, those of down.
struct Cut {
  int o = 0, down = 0;  // 0: as the engine does
};

class DecodeStep {
 public:
  explicit DecodeStep(Cut cut) : cut_(cut) {
    device_ = Must(CudaDevice::Create(Must(CudaLibrary::Open()), {.index = 0}));
    stream_ = Must(device_->CreateCudaStream());
    gemm_ = Must(CudaGemm::Create(*device_));
    const std::vector<uint16_t> noise = Noise();
    seed_ = Upload(noise);
    layer_elements_ = size_t{kHidden} * kQkv + size_t{kHidden} * kQHeads * kDim + size_t{3} * kHidden * kFfn;
    weights_ = Random(kLayers * layer_elements_ * 2);
    embedding_ = Random(size_t{kVocab} * kHidden * 2);
    head_ = Random(size_t{kVocab} * kHidden * 2);
    norm_ = Upload(std::vector<float>(kHidden, 1.0f));
    layer_kv_bytes_ = size_t{kMaxBatch} * kKvHeads * (kContext / 64) * layout_.bytes();
    kv_ = Random(kLayers * layer_kv_bytes_);
    x_ = Random(kMaxBatch * kHidden * 4);
    h_ = Random(kMaxBatch * kHidden * 2);
    delta_ = Random(size_t{8} * kMaxBatch * kHidden * 4);
    qkv_ = Random(kMaxBatch * kQkv * 2);
    o_ = Random(kMaxBatch * kQHeads * kDim * 2);
    gate_up_ = Random(size_t{kMaxBatch} * 2 * kFfn * 2);
    act_ = Random(size_t{kMaxBatch} * kFfn * 2);
    logits_ = Random(size_t{kMaxBatch} * kVocab * 4);
    cos_ = Random(kMaxBatch * kDim / 2 * 4);
    sin_ = Random(kMaxBatch * kDim / 2 * 4);
    out_ = Random(kMaxBatch * sizeof(SampleOutput));
    std::vector<float> frequencies;
    for (int i = 0; i < kDim / 2; ++i) frequencies.push_back(std::pow(500000.0f, -2.0f * i / kDim));
    frequencies_ = Upload(frequencies);
  }

  void Time(int batch) {
    Prepare(batch);
    CudaAttention attention(*device_);
    Must(attention.Plan(*stream_, shape_, items_));
    const double ms = Run(batch, attention, kAll);
    const double bytes =
        kLayers * (layer_elements_ * 2.0 + batch * kContext * kKvHeads * kDim * 4.0) + kVocab * 2.0 * kHidden;
    std::printf("batch %3d: %.3f ms a step, %.0f tokens/s, weights and KV at %.0f GB/s\n", batch, ms, batch / ms * 1e3,
                bytes / ms / 1e6);
    std::fflush(stdout);
  }

  // Microseconds of a layer: what a part takes alone, and what the step loses without it.
  void TimeParts(int batch) {
    Prepare(batch);
    CudaAttention attention(*device_);
    Must(attention.Plan(*stream_, shape_, items_));
    const double all = Run(batch, attention, kAll);
    const std::pair<const char*, unsigned> parts[] = {{"products", kProducts},     {"attention", kAttention},
                                                      {"append", kAppend},         {"norms", kNorms},
                                                      {"activation", kActivation}, {"head, sampling", kHead}};
    for (const auto& [name, part] : parts) {
      const double alone = Run(batch, attention, part), without = Run(batch, attention, kAll & ~part);
      std::printf("  batch %3d %-14s alone %6.2f us, the step without it %6.2f us less\n", batch, name,
                  alone * 1e3 / kLayers, (all - without) * 1e3 / kLayers);
    }
    const std::tuple<const char*, int, int, size_t> products[] = {
        {"q, k, v", kQkv, kHidden, 0},
        {"o", kHidden, kQHeads * kDim, size_t{kHidden} * kQkv},
        {"gate, up", 2 * kFfn, kHidden, size_t{kHidden} * (kQkv + kQHeads * kDim)},
        {"down", kHidden, kFfn, size_t{kHidden} * (kQkv + kQHeads * kDim + 2 * kFfn)}};
    for (const auto& [name, n, k, at] : products) {
      const auto* const w = reinterpret_cast<const uint16_t*>(weights_->data()) + at;
      const double us = bench::MedianUs(*device_, *stream_, kLayers, [&, n = n, k = k](int layer) {
        Product(act_->data(), batch, k, w + layer * layer_elements_, n, gate_up_->data());
      });
      std::printf("  batch %3d product %-9s %6.2f us, %5.0f GB/s\n", batch, name, us, n * 2.0 * k / us / 1e3);
    }
    const size_t gate_up_at = std::get<3>(products[2]);
    if (GateAndUp(batch, weights_->data() + 2 * gate_up_at)) {
      const double us = bench::MedianUs(*device_, *stream_, kLayers, [&](int layer) {
        GateAndUp(batch, weights_->data() + 2 * (gate_up_at + layer * layer_elements_));
      });
      std::printf("  batch %3d gate, up and activation at once %6.2f us\n", batch, us);
    }
    std::fflush(stdout);
  }

 private:
  double Run(int batch, CudaAttention& attention, unsigned parts) {
    return bench::MedianUs(
               *device_, *stream_, 1, [&](int) { Enqueue(batch, attention, parts); }, 19) /
           1e3;
  }

  static std::vector<uint16_t> Noise() {
    std::vector<uint16_t> values(size_t{32} << 20);
    std::mt19937_64 random(1);
    for (uint16_t& v : values) v = static_cast<uint16_t>(0x3c00 | (random() & 0x80ff));  // bf16, 0.008 to 0.03
    return values;
  }
  template <typename T>
  std::unique_ptr<Buffer> Upload(const std::vector<T>& values) {
    auto buffer = Must(device_->Allocate(values.size() * sizeof(T)));
    Must(stream_->Copy(buffer->data(), values.data(), values.size() * sizeof(T)));
    Must(stream_->SynchronizeStatus());
    return buffer;
  }
  std::unique_ptr<Buffer> Random(size_t bytes) {
    auto buffer = Must(device_->Allocate(bytes));
    for (size_t at = 0; at < bytes; at += seed_->size_bytes()) {
      Must(stream_->Copy(buffer->data() + at, seed_->data(), std::min(seed_->size_bytes(), bytes - at)));
    }
    return buffer;
  }

  void Prepare(int batch) {
    const int segments = kContext / 64;
    std::vector<const std::byte*> table;
    for (int i = 0; i < batch * kKvHeads * segments; ++i) table.push_back(kv_->data() + size_t(i) * layout_.bytes());
    std::shuffle(table.begin(), table.end(), std::mt19937_64(3));
    table_ = Upload(table);
    std::vector<int32_t> ids, positions, rows;
    items_.clear();
    for (int i = 0; i < batch; ++i) {
      ids.push_back(i * 7 % kVocab);
      positions.push_back(kContext - 1);
      rows.push_back(i);
      items_.push_back({.q_rows = 1,
                        .kv_heads = kKvHeads,
                        .first_position = kContext - 1,
                        .token_begin = 0,
                        .token_end = kContext,
                        .q_offset = int64_t{i} * kQkv,
                        .q_row_step = kQkv,
                        .o_offset = int64_t{i} * kQHeads * kDim,
                        .o_row_step = kQHeads * kDim,
                        .blocks = reinterpret_cast<const std::byte* const*>(table_->data()) + i * segments * kKvHeads,
                        .head_step = segments});
    }
    ids_ = Upload(ids);
    positions_ = Upload(positions);
    rows_ = Upload(rows);
    params_ = Upload(std::vector<SampleParams>(batch));
  }

  static GemmCall CallOf(const void* x, int64_t m, int64_t k, const void* w, int64_t n, void* y) {
    GemmCall call{};
    call.x = x;
    call.w = w;
    call.y = y;
    call.m = m;
    call.n = call.y_stride = n;
    call.k = call.x_stride = call.w_stride = k;
    call.type = GemmType::kBF16;
    return call;
  }
  void Product(const void* x, int64_t m, int64_t k, const void* w, int64_t n, void* y, bool f32 = false) {
    GemmCall call = CallOf(x, m, k, w, n, y);
    call.y_is_f32 = f32;
    Must(gemm_->Run(*stream_, call));
  }
  // x += the product, by the next norm if it comes in parts; few rows never do.
  void Add(const void* in, int batch, int64_t k, const void* w, int parts) {
    parts = PartsOf(batch, parts);
    GemmCall call = CallOf(in, batch, k, w, kHidden, parts > 1 ? delta_->data() : x_->data());
    call.y_is_f32 = 1;
    call.accumulate = parts > 1 ? 0 : 1;
    call.parts = parts;
    call.part_step = int64_t{batch} * kHidden;
    Must(gemm_->Run(*stream_, call));
  }
  static int PartsOf(int batch, int parts) { return batch > 8 && parts > 0 ? parts : CudaProduct::PartsFor(batch); }
  // Both products and the activation as one kernel, if there is one for so many rows.
  bool GateAndUp(int batch, const void* w) {
    return Must(GatedProduct(*stream_, {.x = h_->data(),
                                        .w = w,
                                        .y = act_->data(),
                                        .m = batch,
                                        .n = kFfn,
                                        .k = kHidden,
                                        .x_stride = kHidden,
                                        .w_stride = kHidden,
                                        .y_stride = kFfn,
                                        .type = GemmType::kBF16,
                                        .gelu = 0}));
  }
  // parts: of what is added to x first.
  void Norm(int batch, int parts) {
    parts = PartsOf(batch, parts);
    RmsNormLaunch norm;
    norm.x = x_->data();
    norm.weight = reinterpret_cast<const float*>(norm_->data());
    norm.out = h_->data();
    norm.x_step = norm.residual_step = norm.out_step = kHidden;
    norm.x_type = WireType::kF32;
    norm.eps = 1e-5f;
    norm.rows = batch;
    norm.size = kHidden;
    if (parts > 1) {
      norm.residual = delta_->data();
      norm.parts = parts;
      norm.part_step = int64_t{batch} * kHidden;
    }
    Must(RmsNorm(*stream_, norm));
  }

  void Layer(int layer, int batch, CudaAttention& attention, unsigned parts) {
    const auto* w = reinterpret_cast<const uint16_t*>(weights_->data()) + layer * layer_elements_;
    const auto* w_o = w + size_t{kHidden} * kQkv;
    const auto* w_gate_up = w_o + size_t{kHidden} * kQHeads * kDim;
    const auto* w_down = w_gate_up + size_t{2} * kHidden * kFfn;
    if (parts & kNorms) Norm(batch, layer > 0 ? cut_.down : 1);
    if (parts & kProducts) Product(h_->data(), batch, kHidden, w, kQkv, qkv_->data());
    if (parts & kAppend)
      Must(KvAppend(*stream_, {.qkv = qkv_->data(),
                               .qkv_step = kQkv,
                               .q_out = qkv_->data(),
                               .q_out_step = kQkv,
                               .cos = reinterpret_cast<const float*>(cos_->data()),
                               .sin = reinterpret_cast<const float*>(sin_->data()),
                               .rotary = kDim,
                               .rows = batch,
                               .q_heads = kQHeads,
                               .kv_heads = kKvHeads,
                               .positions = reinterpret_cast<const int32_t*>(positions_->data()),
                               .row_items = reinterpret_cast<const int32_t*>(rows_->data()),
                               .items = attention.device_items(),
                               .kv_offset = static_cast<int64_t>(layer * layer_kv_bytes_),
                               .layout = layout_}));
    if (parts & kAttention)
      Must(attention.Run(*stream_, shape_,
                         {.q = qkv_->data(), .o = o_->data(), .kv_offset_bytes = layer * layer_kv_bytes_}));
    if (parts & kProducts) Add(o_->data(), batch, kQHeads * kDim, w_o, cut_.o);
    if (parts & kNorms) Norm(batch, cut_.o);
    const bool at_once = (parts & kProducts) && (parts & kActivation) && GateAndUp(batch, w_gate_up);
    if ((parts & kProducts) && !at_once) Product(h_->data(), batch, kHidden, w_gate_up, 2 * kFfn, gate_up_->data());
    if ((parts & kActivation) && !at_once)
      Must(GatedActivation(*stream_, {.gate = gate_up_->data(),
                                      .up = reinterpret_cast<uint16_t*>(gate_up_->data()) + kFfn,
                                      .out = act_->data(),
                                      .gate_step = 2 * kFfn,
                                      .up_step = 2 * kFfn,
                                      .out_step = kFfn,
                                      .rows = batch,
                                      .size = kFfn}));
    if (parts & kProducts) Add(act_->data(), batch, kFfn, w_down, cut_.down);
  }

  void Enqueue(int batch, CudaAttention& attention, unsigned parts) {
    const auto* ids = reinterpret_cast<const int32_t*>(ids_->data());
    Must(Embed(*stream_, {.table = embedding_->data(),
                          .ids = ids,
                          .out = x_->data(),
                          .out_type = WireType::kF32,
                          .rows = batch,
                          .size = kHidden}));
    Must(RopeTable(*stream_, {.positions = reinterpret_cast<const int32_t*>(positions_->data()),
                              .inv_freq = reinterpret_cast<const float*>(frequencies_->data()),
                              .cos = reinterpret_cast<float*>(cos_->data()),
                              .sin = reinterpret_cast<float*>(sin_->data()),
                              .rows = batch,
                              .count = kDim / 2}));
    for (int layer = 0; layer < kLayers; ++layer) Layer(layer, batch, attention, parts);
    if ((parts & kHead) == 0) return;
    Norm(batch, cut_.down);
    Product(h_->data(), batch, kHidden, head_->data(), kVocab, logits_->data(), true);
    Must(Sample(*stream_, {.logits = reinterpret_cast<const float*>(logits_->data()),
                           .work = reinterpret_cast<float*>(logits_->data()),
                           .step = kVocab,
                           .work_step = kVocab,
                           .rows = batch,
                           .vocab = kVocab,
                           .params = reinterpret_cast<const SampleParams*>(params_->data()),
                           .out = reinterpret_cast<SampleOutput*>(out_->data())}));
  }

  const Cut cut_;
  const CudaKvLayout layout_{kDim, kDim, KvType::kBF16};
  const CudaAttentionShape shape_{
      .group = kQHeads / kKvHeads, .layout = {kDim, kDim, KvType::kBF16}, .scale = 0.08838834764831845f};
  std::unique_ptr<CudaDevice> device_;
  std::unique_ptr<CudaStream> stream_;
  std::unique_ptr<CudaGemm> gemm_;
  size_t layer_elements_ = 0, layer_kv_bytes_ = 0;
  std::unique_ptr<Buffer> seed_, weights_, embedding_, head_, norm_, kv_, x_, h_, delta_, qkv_, o_, gate_up_, act_,
      logits_, cos_, sin_, out_, frequencies_, table_, ids_, positions_, rows_, params_;
  std::vector<CudaAttentionItem> items_;
};

}  // namespace
}  // namespace dovetail::kernels::cuda

int main(int argc, char** argv) {
  bool parts = false;
  dovetail::kernels::cuda::Cut cut;
  std::vector<int> batches = {1, 16, 64, 128, 256};
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--parts") {
      parts = true;
    } else if (flag == "--cut" && i + 1 < argc && std::sscanf(argv[++i], "%d,%d", &cut.o, &cut.down) == 2 &&
               std::min(cut.o, cut.down) >= 1 && std::max(cut.o, cut.down) <= 8) {
      continue;
    } else if (flag == "--batch" && i + 1 < argc && std::atoi(argv[i + 1]) >= 1 && std::atoi(argv[i + 1]) <= 256) {
      batches = {std::atoi(argv[++i])};
    } else {
      std::fprintf(stderr, "usage: %s [--parts] [--cut O,DOWN (1 to 8)] [--batch N (1 to 256)]\n", argv[0]);
      return 2;
    }
  }
  dovetail::kernels::cuda::DecodeStep step(cut);
  for (const int batch : batches) step.Time(batch);
  for (const int batch : batches)
    if (parts) step.TimeParts(batch);
  return 0;
}
