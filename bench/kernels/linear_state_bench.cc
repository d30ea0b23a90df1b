// Linear states on the CPU. Decode: bytes of states and open blocks per second, and those of a copy of the same memory.
// Prefill: tokens per second of the blocked form, of the same op fed token by token, and of the double reference.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "benchmark/benchmark.h"
#include "kernels/aligned_buffer.h"
#include "kernels/cpu/isa.h"
#include "kernels/linear_state.h"
#include "kernels/reference/linear_state.h"
#include "kernels/thread_pool.h"

namespace dovetail::kernels {
namespace {

constexpr int kDim = 128;

LinearStateShape ShapeOf(int family) {
  if (family == 0) return {kDim, kDim, DecayForm::kScalar, StateUpdate::kAdd};    // lightning, Mamba-2
  if (family == 1) return {kDim, kDim, DecayForm::kScalar, StateUpdate::kDelta};  // gated DeltaNet
  return {kDim, kDim, DecayForm::kVector, StateUpdate::kDelta};                   // KDA
}
const char* const kFamilies[] = {"scalar", "delta", "vector_delta"};

// Heads of 128 x 128 with their last two blocks.
class Heads {
 public:
  Heads(int family, int heads, int rows, int64_t position, int threads)
      : shape_(ShapeOf(family)),
        layout_(shape_),
        pool_({.threads = threads}),
        context_{&pool_, &SelectOps(DetectIsa().value())} {
    arena_ = AlignedBuffer::Create(2 * heads * layout_.bytes()).value();
    auto* floats = reinterpret_cast<float*>(arena_.data());
    for (size_t i = 0; i < arena_.size_bytes() / 4; ++i) floats[i] = 1e-3f * static_cast<float>(i % 97);
    std::mt19937 random(1);
    std::normal_distribution<float> normal(0, 0.1f);
    for (std::vector<float>* input : {&q_, &k_, &v_, &decay_, &o_}) {
      input->resize(size_t{1} * heads * rows * kDim);
      for (float& x : *input) x = normal(random);
    }
    for (float& g : decay_) g = -std::abs(g);
    beta_.assign(heads * rows, 0.5f);
    for (int i = 0; i < 2 * heads; ++i) pieces_.push_back(arena_.data() + i * layout_.bytes());
    for (int head = 0; head < heads; ++head) {
      LinearStateItem item;
      const size_t at = size_t{1} * head * rows * kDim;
      item.q = q_.data() + at;
      item.k = k_.data() + at;
      item.v = v_.data() + at;
      item.o = o_.data() + at;
      item.log_decay = decay_.data() + at;
      item.beta = beta_.data() + head * rows;
      item.q_step = item.k_step = item.v_step = item.o_step = item.decay_step = kDim;
      item.beta_step = 1;
      item.rows = rows;
      item.first_position = position;
      item.pieces = pieces_.data() + 2 * head;
      item.piece_bytes = layout_.bytes();
      item.first_block = std::max<int64_t>(0, (position + rows - 1) / 64 - 1);
      item.blocks = 2;
      items_.push_back(item);
    }
    scratch_ = AlignedBuffer::Create(LinearStateScratchBytes(shape_, items_) + 64).value();
  }

  void Run() {
    if (!LinearState(context_, shape_, items_, scratch_.bytes()).ok()) std::abort();
  }
  void RunAt(int64_t position) {  // of items made for one row, in the same block
    for (LinearStateItem& item : items_) item.first_position = position;
    Run();
  }
  std::byte* piece(int head, int block) const { return pieces_[2 * head + block]; }
  void RunToken(int row) {  // of items made for one row
    for (LinearStateItem& item : items_) {
      item.first_position = row;
      item.first_block = std::max<int64_t>(0, row / 64 - 1);
      if (row >= 128 && row % 64 == 0) SwapBlocks(item);
    }
    Run();
  }
  // The full block becomes the one before.
  void SwapBlocks(const LinearStateItem& item) {
    const size_t at = item.pieces - pieces_.data();
    std::swap(pieces_[at], pieces_[at + 1]);
  }
  // What one decode step reads and writes, with `open` tokens in the block.
  double StepBytes(int open) const {
    const bool vector = shape_.decay == DecayForm::kVector;  // decays as long as keys
    const double state = kDim * kDim * 4.0, token = (vector ? 3.0 : 2.0) * kDim * 4;
    const double write = open == 63 ? state : 0;
    return items_.size() * (state + write + (open + 1) * token);
  }
  std::vector<float>& q() { return q_; }
  std::vector<float>& k() { return k_; }
  std::vector<float>& v() { return v_; }
  std::vector<float>& decay() { return decay_; }
  std::vector<float>& beta() { return beta_; }
  const LinearStateShape& shape() const { return shape_; }

 private:
  const LinearStateShape shape_;
  const LinearStateLayout layout_;
  ThreadPool pool_;
  const OpContext context_;
  AlignedBuffer arena_, scratch_;
  std::vector<float> q_, k_, v_, decay_, beta_, o_;
  std::vector<std::byte*> pieces_;
  std::vector<LinearStateItem> items_;
};

// 32 sequences of a layer of 32 heads, 64 MiB of states.
constexpr int kHeads = 1024;

void Decode(benchmark::State& state) {
  const int family = static_cast<int>(state.range(0)), open = static_cast<int>(state.range(1));
  Heads heads(family, kHeads, 1, 640, static_cast<int>(state.range(2)));
  for (int token = 0; token <= open; ++token) heads.RunAt(640 + token);  // the block holds what such inputs leave there
  for (auto _ : state) heads.Run();
  state.SetBytesProcessed(static_cast<int64_t>(static_cast<double>(state.iterations()) * heads.StepBytes(open)));
  state.SetLabel(kFamilies[family]);
}
BENCHMARK(Decode)->ArgsProduct({{0, 1, 2}, {0, 31, 63}, {1, 2}})->UseRealTime()->Unit(benchmark::kMillisecond);

// A whole block of each head: 64 tokens one after the other, S written with the last. What a sequence costs on average.
void DecodeBlock(benchmark::State& state) {
  const int family = static_cast<int>(state.range(0));
  Heads heads(family, kHeads, 1, 640, static_cast<int>(state.range(1)));
  double bytes = 0;
  for (int open = 0; open < 64; ++open) bytes += heads.StepBytes(open);
  for (auto _ : state)
    for (int open = 0; open < 64; ++open) heads.RunAt(640 + open);
  state.SetBytesProcessed(static_cast<int64_t>(static_cast<double>(state.iterations()) * bytes));
  state.SetLabel(kFamilies[family]);
}
BENCHMARK(DecodeBlock)->ArgsProduct({{0, 1, 2}, {1, 2}})->UseRealTime()->Unit(benchmark::kMillisecond);

// Sums of what lies there, fetched into L2 8 KiB ahead, and towards the end the beginning of `next`.
uint64_t ReadAll(const std::byte* from, size_t bytes, const std::byte* next) {
  constexpr size_t kAhead = 8192, kStep = 256;
  uint64_t sums[kStep / 8] = {};
  for (size_t at = 0; at < bytes; at += kStep) {
    const std::byte* const ahead = at + kAhead < bytes ? from + at + kAhead : next + (at + kAhead - bytes);
    for (size_t line = 0; line < kStep; line += 64) __builtin_prefetch(ahead + line, 0, 2);
    const auto* words = reinterpret_cast<const uint64_t*>(from + at);
    for (size_t j = 0; j < kStep / 8; ++j) sums[j] += words[j];
  }
  uint64_t sum = 0;
  for (const uint64_t part : sums) sum += part;
  return sum;
}

// The limit of DecodeBlock: the same reads and writes of the same memory, without arithmetic. What a copy of as many
// bytes reaches is no limit: it writes as much as it reads, which decode does not.
void DecodeBlockTraffic(benchmark::State& state) {
  const int family = static_cast<int>(state.range(0));
  const Heads heads(family, kHeads, 1, 640, 1);
  const size_t state_bytes = kDim * kDim * 4, row_bytes = kDim * 4, sections = family == 2 ? 3 : 2;
  ThreadPool pool({.threads = static_cast<int>(state.range(1))});
  constexpr int kTasks = kHeads / 16;
  double bytes = 0;
  for (int open = 0; open < 64; ++open) bytes += heads.StepBytes(open);
  for (auto _ : state)
    for (int open = 0; open < 64; ++open)
      pool.Run(kTasks, [&](int task) {
        uint64_t sum = 0;
        for (int head = 16 * task; head < 16 * task + 16; ++head) {
          std::byte* const block = heads.piece(head, 1);
          std::byte* const rows = block + state_bytes;
          const std::byte* const next = heads.piece(std::min(head + 1, kHeads - 1), 0);
          const size_t section_bytes = 64 * row_bytes, open_bytes = open * row_bytes;
          sum += ReadAll(heads.piece(head, 0), state_bytes, open > 0 ? rows : next);
          for (size_t section = 0; section < sections; ++section) {
            std::byte* const own = rows + section * section_bytes;
            sum += ReadAll(own, open_bytes, section + 1 < sections ? own + section_bytes : next);
            std::memset(own + open_bytes, open, row_bytes);
          }
          if (open == 63) std::memset(block, 1, state_bytes);
        }
        benchmark::DoNotOptimize(sum);
      });
  state.SetBytesProcessed(static_cast<int64_t>(static_cast<double>(state.iterations()) * bytes));
  state.SetLabel(kFamilies[family]);
}
BENCHMARK(DecodeBlockTraffic)->ArgsProduct({{0, 1, 2}, {1, 2}})->UseRealTime()->Unit(benchmark::kMillisecond);

void CopyLimit(benchmark::State& state) {
  const size_t bytes = size_t{64} << 20;
  const int threads = static_cast<int>(state.range(0));
  AlignedBuffer from = AlignedBuffer::Create(bytes).value(), to = AlignedBuffer::Create(bytes).value();
  std::memset(from.data(), 1, bytes);
  std::memset(to.data(), 1, bytes);
  ThreadPool pool({.threads = threads});
  constexpr int kTasks = 64;
  for (auto _ : state)
    pool.Run(kTasks, [&](int i) {
      std::memcpy(to.data() + bytes / kTasks * i, from.data() + bytes / kTasks * i, bytes / kTasks);
    });
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations()) * 2 * bytes);
}
BENCHMARK(CopyLimit)->Arg(1)->Arg(2)->UseRealTime()->Unit(benchmark::kMillisecond);

// What reading alone can do: decode writes little.
void ReadLimit(benchmark::State& state) {
  const size_t bytes = size_t{64} << 20;
  const int threads = static_cast<int>(state.range(0));
  AlignedBuffer from = AlignedBuffer::Create(bytes).value();
  std::memset(from.data(), 1, bytes);
  ThreadPool pool({.threads = threads});
  constexpr int kTasks = 64, kAhead = 4096;
  for (auto _ : state)
    pool.Run(kTasks, [&](int task) {
      const auto* words = reinterpret_cast<const uint64_t*>(from.data() + bytes / kTasks * task);
      uint64_t sums[32] = {};
      for (size_t i = 0; i < bytes / kTasks / 8; i += 32) {
        for (int line = 0; line < 4; ++line) __builtin_prefetch(words + i + kAhead / 8 + 8 * line);
        for (int j = 0; j < 32; ++j) sums[j] += words[i + j];
      }
      for (uint64_t& sum : sums) benchmark::DoNotOptimize(sum);
    });
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations()) * bytes);
}
BENCHMARK(ReadLimit)->Arg(1)->Arg(2)->UseRealTime()->Unit(benchmark::kMillisecond);

// 32 heads, 1,024 tokens.
void Prefill(benchmark::State& state) {
  const int family = static_cast<int>(state.range(0));
  Heads heads(family, 32, 1024, 0, static_cast<int>(state.range(1)));
  for (auto _ : state) heads.Run();
  state.SetItemsProcessed(state.iterations() * 1024);
  state.SetLabel(kFamilies[family]);
}
BENCHMARK(Prefill)->ArgsProduct({{0, 1, 2}, {1, 2}})->UseRealTime()->Unit(benchmark::kMillisecond);

void PrefillTokenByToken(benchmark::State& state) {
  const int family = static_cast<int>(state.range(0));
  Heads heads(family, 32, 1, 0, 1);
  for (auto _ : state)
    for (int row = 0; row < 1024; ++row) heads.RunToken(row);
  state.SetItemsProcessed(state.iterations() * 1024);
  state.SetLabel(kFamilies[family]);
}
BENCHMARK(PrefillTokenByToken)->Arg(0)->Arg(1)->Arg(2)->UseRealTime()->Unit(benchmark::kMillisecond);

void PrefillReference(benchmark::State& state) {
  const int family = static_cast<int>(state.range(0));
  Heads heads(family, 1, 256, 0, 1);
  reference::LinearStateTokens tokens{
      256,     heads.q().data(), heads.k().data(), heads.v().data(), heads.decay().data(), heads.beta().data(),
      nullptr, nullptr};
  std::vector<double> s(kDim * kDim, 0.0);
  for (auto _ : state) benchmark::DoNotOptimize(reference::LinearState(heads.shape(), tokens, s));
  state.SetItemsProcessed(state.iterations() * 256 / 32);  // of 32 heads
  state.SetLabel(kFamilies[family]);
}
BENCHMARK(PrefillReference)->Arg(0)->Arg(1)->Arg(2)->UseRealTime()->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace dovetail::kernels

BENCHMARK_MAIN();
