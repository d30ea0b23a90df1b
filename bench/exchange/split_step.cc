#include "bench/exchange/split_step.h"

#include <algorithm>
#include <cmath>

#include "kernels/cuda/products/cuda_gemm.h"
#include "kernels/cuda/rows/row_ops.h"
#include "kernels/cuda/sampling/sample.h"

namespace dovetail::bench {

using kernels::cuda::CudaAttention;
using kernels::cuda::CudaAttentionItem;
using kernels::cuda::CudaGemm;
using kernels::cuda::CudaKvLayout;
using kernels::cuda::ExchangePushLaunch;
using kernels::cuda::GemmType;
using kernels::cuda::KvAppendLaunch;
using kernels::cuda::KvType;

namespace {

constexpr size_t kSeedElements = size_t{16} << 20;
constexpr int kPushBlocks = 16;

using S = SplitShape;

const float* Floats(const std::unique_ptr<Buffer>& b) { return reinterpret_cast<const float*>(b->data()); }
const int32_t* Ints(const std::unique_ptr<Buffer>& b) { return reinterpret_cast<const int32_t*>(b->data()); }

}  // namespace

SplitSide::SplitSide(LinkedGpus& gpus, const SplitSlots& slots) : gpus_(gpus), slots_(slots) {
  main_ = Must(gpus.device().CreateCudaStream());
  for (int m = 0; m < S::kMaxMicroBatches; ++m) branches_.push_back(Must(gpus.device().CreateCudaStream()));
  std::vector<uint16_t> noise(kSeedElements);
  std::mt19937_64 random(1);
  for (uint16_t& v : noise) v = static_cast<uint16_t>(0x3c00 | (random() & 0x80ff));  // bf16, 0.008 to 0.03
  seed_ = Upload(noise);
}

std::unique_ptr<Buffer> SplitSide::Random(size_t bytes) {
  auto buffer = Room(bytes);
  for (size_t at = 0; at < bytes; at += seed_->size_bytes())
    Must(main_->Copy(buffer->data() + at, seed_->data(), std::min(seed_->size_bytes(), bytes - at)));
  return buffer;
}

kernels::cuda::CudaEvent& SplitSide::Mark() { return marks_.emplace_back(Must(gpus_.device().CreateEvent())); }

kernels::cuda::CudaGraph SplitSide::Record(const SplitCase& shape, Handing handing) {
  Prepare(shape);
  Must(main_->SynchronizeStatus());
  Enqueue(shape, Handing::kNone);  // chooses the algorithms of the products
  Must(main_->SynchronizeStatus());
  marks_.clear();
  marks_.reserve(8 * S::kLayers * S::kMaxMicroBatches);
  Must(main_->BeginCapture());
  Enqueue(shape, handing);
  for (int m = 0; m < shape.micro_batches; ++m) JoinBranch(m);
  return Must(main_->EndCapture());
}

namespace {

class DenseSide final : public SplitSide {
 public:
  DenseSide(LinkedGpus& gpus, const SplitSlots& slots) : SplitSide(gpus, slots) {
    gemm_ = Must(CudaGemm::Create(gpus.device()));
    weights_ = Random(S::kLayers * kLayerElements * 2);
    embedding_ = Random(size_t{S::kVocab} * S::kHidden * 2);
    head_ = Random(size_t{S::kVocab} * S::kHidden * 2);
    norm_ = Upload(std::vector<float>(S::kHidden, 1.0f));
    const size_t rows = slots.rows;
    for (Batch& b : batches_) {
      b.x = Random(rows * S::kHidden * 2);
      b.delta = Random(rows * S::kHidden * 2);
      b.out = Room(rows * S::kQkv * 2);
      b.cos = Room(rows * S::kDim * 2);
      b.sin = Room(rows * S::kDim * 2);
      b.drawn = Room(rows * sizeof(kernels::cuda::SampleOutput));
    }
    h_ = Random(rows * S::kHidden * 2);
    qkv_ = Random(rows * S::kQkv * 2);
    gate_up_ = Random(rows * 2 * S::kFfn * 2);
    act_ = Random(rows * S::kFfn * 2);
    logits_ = Random(rows * S::kVocab * 4);
    std::vector<float> frequencies;
    for (int i = 0; i < S::kDim / 2; ++i) frequencies.push_back(std::pow(500000.0f, -2.0f * i / S::kDim));
    frequencies_ = Upload(frequencies);
  }

 protected:
  void Prepare(const SplitCase& shape) override {
    std::vector<int32_t> ids(shape.rows), positions(shape.rows, shape.context - 1);
    for (int i = 0; i < shape.rows; ++i) ids[i] = i * 7 % S::kVocab;
    ids_ = Upload(ids);
    positions_ = Upload(positions);
    params_ = Upload(std::vector<kernels::cuda::SampleParams>(shape.rows));
  }

  void Enqueue(const SplitCase& shape, Handing handing) override {
    rows_ = shape.rows;
    handing_ = handing;
    for (int m = 0; m < shape.micro_batches; ++m) {
      Begin(m);
      Query(m, 0);
    }
    for (int layer = 0; layer < S::kLayers; ++layer)
      for (int m = 0; m < shape.micro_batches; ++m) {
        JoinBranch(m);
        if (handing == Handing::kStored || handing == Handing::kCopied) Await(stream(), m, layer);
        Rest(m, layer);
        if (layer + 1 < S::kLayers) Query(m, layer + 1);
        if (layer + 1 == S::kLayers) End(m);
      }
  }

 private:
  static constexpr size_t kLayerElements =
      size_t{S::kHidden} * S::kQkv + size_t{S::kHidden} * S::kQ + size_t{3} * S::kHidden * S::kFfn;
  struct Batch {
    std::unique_ptr<Buffer> x, delta, out, cos, sin, drawn;
  };

  const uint16_t* Weights(int layer) const {
    return reinterpret_cast<const uint16_t*>(weights_->data()) + layer * kLayerElements;
  }
  void Product(const void* x, int64_t k, const void* w, int64_t n, void* y, bool f32 = false) {
    kernels::cuda::GemmCall call{};
    call.x = x;
    call.w = w;
    call.y = y;
    call.m = rows_;
    call.n = call.y_stride = n;
    call.k = call.x_stride = call.w_stride = k;
    call.type = GemmType::kBF16;
    call.y_is_f32 = f32;
    Must(gemm_->Run(stream(), call));
  }
  void Norm(Batch& b, bool residual) {
    Must(kernels::cuda::RmsNorm(stream(), {.x = b.x->data(),
                                           .residual = residual ? b.delta->data() : nullptr,
                                           .weight = Floats(norm_),
                                           .out = h_->data(),
                                           .x_step = S::kHidden,
                                           .residual_step = S::kHidden,
                                           .out_step = S::kHidden,
                                           .eps = 1e-5f,
                                           .rows = rows_,
                                           .size = S::kHidden}));
  }
  void Begin(int m) {
    Batch& b = batches_[m];
    Must(kernels::cuda::Embed(
        stream(),
        {.table = embedding_->data(), .ids = Ints(ids_), .out = b.x->data(), .rows = rows_, .size = S::kHidden}));
    Must(kernels::cuda::RopeTable(stream(), {.positions = Ints(positions_),
                                             .inv_freq = Floats(frequencies_),
                                             .cos = reinterpret_cast<float*>(b.cos->data()),
                                             .sin = reinterpret_cast<float*>(b.sin->data()),
                                             .rows = rows_,
                                             .count = S::kDim / 2}));
  }

  // Norm, q, k and v, on their way.
  void Query(int m, int op) {
    Batch& b = batches_[m];
    Norm(b, op > 0);
    Product(h_->data(), S::kHidden, Weights(op), S::kQkv, qkv_->data());
    std::byte* const to = handing_ == Handing::kStored ? Peer(m) : b.out->data();
    KvAppendLaunch out;
    out.qkv = qkv_->data();
    out.qkv_step = S::kQkv;
    out.q_out = to + slots_.q();
    out.q_out_step = S::kQ;
    out.k_out = to + slots_.k();
    out.v_out = to + slots_.v();
    out.k_out_step = out.v_out_step = S::kKv;
    out.cos = Floats(b.cos);
    out.sin = Floats(b.sin);
    out.rotary = S::kDim;
    out.rows = rows_;
    out.q_heads = S::kQHeads;
    out.kv_heads = S::kKvHeads;
    out.layout = {S::kDim, S::kDim, KvType::kBF16};
    out.exchange = gpus_.End(m);
    if (handing_ == Handing::kStored) out.signal_op = op;
    Must(kernels::cuda::KvAppend(stream(), out));
    if (handing_ == Handing::kNone || handing_ == Handing::kStored) return;
    OnBranch(m, [&](CudaStream& branch) {
      ExchangePushLaunch push;
      push.end = gpus_.End(m);
      push.op = static_cast<uint32_t>(op);
      push.blocks = rows_ < 8 ? 1 : kPushBlocks;
      const size_t row[] = {S::kQ * 2, S::kKv * 2, S::kKv * 2}, at[] = {slots_.q(), slots_.k(), slots_.v()};
      for (int i = 0; i < 3; ++i) push.parts[i] = {b.out->data() + at[i], Peer(m) + at[i], rows_ * row[i]};
      Must(kernels::cuda::ExchangePush(branch, push));
      if (handing_ == Handing::kCopiedApart) Await(branch, m, op);
    });
  }
  void Await(CudaStream& on, int m, int op) {
    Must(kernels::cuda::ExchangeAwait(on, {gpus_.End(m), static_cast<uint32_t>(op)}));
  }

  void Rest(int m, int layer) {
    Batch& b = batches_[m];
    const uint16_t* const w_o = Weights(layer) + size_t{S::kHidden} * S::kQkv;
    const uint16_t* const w_gate_up = w_o + size_t{S::kHidden} * S::kQ;
    const uint16_t* const w_down = w_gate_up + size_t{2} * S::kHidden * S::kFfn;
    Product(Own(m), S::kQ, w_o, S::kHidden, b.delta->data());
    Norm(b, true);
    Product(h_->data(), S::kHidden, w_gate_up, 2 * S::kFfn, gate_up_->data());
    Must(kernels::cuda::GatedActivation(stream(), {.gate = gate_up_->data(),
                                                   .up = gate_up_->data() + S::kFfn * 2,
                                                   .out = act_->data(),
                                                   .gate_step = 2 * S::kFfn,
                                                   .up_step = 2 * S::kFfn,
                                                   .out_step = S::kFfn,
                                                   .rows = rows_,
                                                   .size = S::kFfn}));
    Product(act_->data(), S::kFfn, w_down, S::kHidden, b.delta->data());
  }

  void End(int m) {
    Norm(batches_[m], true);
    Product(h_->data(), S::kHidden, head_->data(), S::kVocab, logits_->data(), true);
    auto* const logits = reinterpret_cast<float*>(logits_->data());
    Must(kernels::cuda::Sample(stream(),
                               {.logits = logits,
                                .work = logits,
                                .step = S::kVocab,
                                .work_step = S::kVocab,
                                .rows = rows_,
                                .vocab = S::kVocab,
                                .params = reinterpret_cast<const kernels::cuda::SampleParams*>(params_->data()),
                                .out = reinterpret_cast<kernels::cuda::SampleOutput*>(batches_[m].drawn->data())}));
  }

  std::unique_ptr<CudaGemm> gemm_;
  std::unique_ptr<Buffer> weights_, embedding_, head_, norm_, h_, qkv_, gate_up_, act_, logits_, frequencies_, ids_,
      positions_, params_;
  Batch batches_[S::kMaxMicroBatches];
  int rows_ = 0;
  Handing handing_ = Handing::kNone;
};

class AttentionSide final : public SplitSide {
 public:
  AttentionSide(LinkedGpus& gpus, const SplitSlots& slots, int most_tokens)
      : SplitSide(gpus, slots),
        layer_kv_bytes_(size_t(most_tokens) / 64 * S::kKvHeads * layout_.bytes()),
        kv_(Random(S::kLayers * layer_kv_bytes_)) {
    for (Batch& b : batches_) b.o = Room(slots.bytes());
  }

 protected:
  void Prepare(const SplitCase& shape) override {
    const int segments = shape.context / 64;
    int block = 0;
    for (int m = 0; m < shape.micro_batches; ++m) {
      Batch& b = batches_[m];
      std::vector<const std::byte*> table;
      for (int i = 0; i < shape.rows * S::kKvHeads * segments; ++i)
        table.push_back(kv_->data() + layout_.bytes() * block++);
      std::shuffle(table.begin(), table.end(), std::mt19937_64(3 + m));
      b.table = Upload(table);
      std::vector<int32_t> positions(shape.rows, shape.context - 1), rows(shape.rows);
      std::vector<CudaAttentionItem> items;
      for (int i = 0; i < shape.rows; ++i) {
        rows[i] = i;
        const auto* const blocks = reinterpret_cast<const std::byte* const*>(b.table->data());
        items.push_back({.q_rows = 1,
                         .kv_heads = S::kKvHeads,
                         .first_position = shape.context - 1,
                         .token_begin = 0,
                         .token_end = shape.context,
                         .q_offset = int64_t{i} * S::kQ,
                         .q_row_step = S::kQ,
                         .o_offset = int64_t{i} * S::kQ,
                         .o_row_step = S::kQ,
                         .blocks = blocks + i * segments * S::kKvHeads,
                         .head_step = segments});
      }
      b.positions = Upload(positions);
      b.row_items = Upload(rows);
      b.attention = std::make_unique<CudaAttention>(gpus_.device());
      Must(b.attention->Plan(stream(), shape_, items));
    }
  }

  void Enqueue(const SplitCase& shape, Handing handing) override {
    rows_ = shape.rows;
    handing_ = handing;
    if (handing == Handing::kCopiedApart)
      for (int m = 0; m < shape.micro_batches; ++m) AwaitOnBranch(m, 0);
    for (int op = 0; op < S::kLayers; ++op)
      for (int m = 0; m < shape.micro_batches; ++m) {
        JoinBranch(m);
        Attend(m, op);
      }
  }

 private:
  struct Batch {
    std::unique_ptr<Buffer> o, table, positions, row_items;
    std::unique_ptr<CudaAttention> attention;
  };

  void AwaitOnBranch(int m, int op) {
    OnBranch(m, [&](CudaStream& branch) {
      Must(kernels::cuda::ExchangeAwait(branch, {gpus_.End(m), static_cast<uint32_t>(op)}));
    });
  }

  void Attend(int m, int op) {
    Batch& b = batches_[m];
    KvAppendLaunch append;
    append.qkv = Own(m) + slots_.k();
    append.qkv_step = append.v_step = S::kKv;
    append.v = Own(m) + slots_.v();
    append.rows = rows_;
    append.kv_heads = S::kKvHeads;
    append.positions = Ints(b.positions);
    append.row_items = Ints(b.row_items);
    append.items = b.attention->device_items();
    append.kv_offset = static_cast<int64_t>(op * layer_kv_bytes_);
    append.layout = layout_;
    append.exchange = gpus_.End(m);
    if (handing_ == Handing::kStored || handing_ == Handing::kCopied) append.await_op = op;
    Must(kernels::cuda::KvAppend(stream(), append));
    std::byte* const o = handing_ == Handing::kStored ? Peer(m) : b.o->data();
    Must(b.attention->Run(stream(), shape_, {.q = Own(m), .o = o, .kv_offset_bytes = op * layer_kv_bytes_}));
    if (handing_ == Handing::kNone) return;
    if (handing_ == Handing::kStored) {
      Must(kernels::cuda::ExchangeSignal(stream(), {gpus_.End(m), static_cast<uint32_t>(op)}));
      return;
    }
    OnBranch(m, [&](CudaStream& branch) {
      ExchangePushLaunch push;
      push.end = gpus_.End(m);
      push.op = static_cast<uint32_t>(op);
      push.blocks = rows_ < 8 ? 1 : kPushBlocks;
      push.parts[0] = {b.o->data(), Peer(m), size_t(rows_) * S::kQ * 2};
      Must(kernels::cuda::ExchangePush(branch, push));
    });
    if (handing_ == Handing::kCopiedApart && op + 1 < S::kLayers) AwaitOnBranch(m, op + 1);
  }

  const CudaKvLayout layout_{S::kDim, S::kDim, KvType::kBF16};
  const kernels::cuda::CudaAttentionShape shape_{
      .group = S::kQHeads / S::kKvHeads, .layout = {S::kDim, S::kDim, KvType::kBF16}, .scale = 0.08838834764831845f};
  const size_t layer_kv_bytes_;
  std::unique_ptr<Buffer> kv_;
  Batch batches_[S::kMaxMicroBatches];
  int rows_ = 0;
  Handing handing_ = Handing::kNone;
};

}  // namespace

std::unique_ptr<SplitSide> MakeDenseSide(LinkedGpus& gpus, const SplitSlots& slots) {
  return std::make_unique<DenseSide>(gpus, slots);
}
std::unique_ptr<SplitSide> MakeAttentionSide(LinkedGpus& gpus, const SplitSlots& slots, int most_tokens) {
  return std::make_unique<AttentionSide>(gpus, slots, most_tokens);
}

}  // namespace dovetail::bench
