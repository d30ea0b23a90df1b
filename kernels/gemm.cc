#include "kernels/gemm.h"

#include <algorithm>

#include "kernels/kernel_table.h"
#include "kernels/thread_pool.h"

namespace dovetail::kernels {
namespace {

constexpr int64_t kSerialConversion = 8192;  // elements of x that one thread converts faster than several are started
constexpr int64_t kConversionTask = 8192;    // elements of x a task converts
constexpr int64_t kMacsPerTask = 400'000;    // some microseconds

int64_t RoundUp(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }
int64_t CeilDiv(int64_t n, int64_t d) { return (n + d - 1) / d; }

// Hands out 64-byte aligned pieces of the scratch. With a null base it only measures.
class Arena {
 public:
  explicit Arena(std::byte* base) : base_(base) {}
  template <typename T>
  T* Take(int64_t count) {
    T* piece = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += RoundUp(count * static_cast<int64_t>(sizeof(T)), 64);
    return piece;
  }
  size_t used() const { return used_; }

 private:
  std::byte* base_;
  size_t used_ = 0;
};

int64_t Panels(int64_t m) { return CeilDiv(m, kPanelRows); }

// Groups of 32 are counted up so that f32 matrices of any width may be measured too.
void TakeQuantized(Arena& arena, int64_t m, int64_t cols, GemmRows& rows) {
  rows.groups = CeilDiv(cols, kActivationGroup);
  rows.quantized = arena.Take<ActivationGroup<1>>(Panels(m) * rows.groups);
}

void TakePrecise(Arena& arena, int64_t m, int64_t cols, GemmRows& rows) {
  rows.groups = CeilDiv(cols, kActivationGroup);
  rows.precise = arena.Take<ActivationGroup<2>>(Panels(m) * rows.groups);
}

void TakeJoined(Arena& arena, int64_t m, int64_t cols, GemmRows& rows) {
  rows.groups = CeilDiv(cols, kActivationGroup);
  rows.joined = arena.Take<ActivationGroup<2>>(Panels(m) * rows.groups);
}

void TakeBF16(Arena& arena, int64_t m, int64_t cols, GemmRows& rows) {
  rows.pairs = CeilDiv(cols, 2);
  rows.bf16 = arena.Take<uint16_t>(Panels(m) * rows.pairs * kPanelRows * 2);
}

void TakeSplit(Arena& arena, int64_t m, int64_t cols, GemmRows& rows) {
  rows.split_blocks = CeilDiv(cols, kSplitColumns);
  rows.split = arena.Take<uint16_t>(RoundUp(m, kSplitRows) * rows.split_blocks * kSplitColumns * kSplitPieces);
}

struct Needs {
  bool bf16 = false;
  bool split = false;
  bool quantized = false;
  bool precise = false;
  bool joined = false;
};

// Products of 4-bit codes with bytes do not reach the 16 bits that their sums have; others are widened.
bool HasWideCodes(PackedFormat format) {
  const PackedTraits& traits = kPackedTraits[static_cast<int>(format)];
  return traits.code_bits == 8 || traits.table;
}

Needs NeedsOf(std::span<const GemmOutput> outputs, const GemmKernels& kernels) {
  Needs needs;
  for (const GemmOutput& output : outputs) {
    const PackedFormat format = output.weights->format();
    const bool precise = output.activations == ActivationBits::k16;
    const bool joined = precise && kernels.join_rows != nullptr && HasWideCodes(format);
    if (IsQuantized(format)) (joined ? needs.joined : precise ? needs.precise : needs.quantized) = true;
    if (format == PackedFormat::kBF16 && !precise) needs.bf16 = true;
    if (format == PackedFormat::kBF16 && precise && kernels.split_rows != nullptr) needs.split = true;
  }
  return needs;
}

absl::Status CheckOutput(const GemmOutput& output, size_t i, int64_t m, int64_t cols) {
  if (output.weights == nullptr) return InvalidArgument("gemm: output ", i, " has no weights");
  if (output.weights->cols() != cols) {
    return InvalidArgument("gemm: output ", i, " has weights of ", output.weights->cols(), " columns, the first has ",
                           cols);
  }
  if (output.y == nullptr && m > 0 && output.weights->rows() > 0)
    return InvalidArgument("gemm: output ", i, " has no y");
  if (output.y_stride < output.weights->rows()) {
    return InvalidArgument("gemm: output ", i, " has a y_stride of ", output.y_stride, " for ", output.weights->rows(),
                           " columns");
  }
  return absl::OkStatus();
}

absl::Status Check(const GemmArgs& args) {
  if (args.m < 0 || args.m > kMaxGemmRows)
    return InvalidArgument("gemm: m = ", args.m, " is outside 0..", kMaxGemmRows);
  if (args.outputs.size() > kMaxGemmOutputs) {
    return InvalidArgument("gemm: ", args.outputs.size(), " outputs are more than ", kMaxGemmOutputs);
  }
  if (args.outputs.empty()) return absl::OkStatus();
  const PackedWeights* first = args.outputs[0].weights;
  const int64_t cols = first == nullptr ? 0 : first->cols();
  for (size_t i = 0; i < args.outputs.size(); ++i) DT_RETURN_IF_ERROR(CheckOutput(args.outputs[i], i, args.m, cols));
  if (args.x == nullptr && args.m > 0 && cols > 0) return InvalidArgument("gemm: x is null");
  if (args.x_stride < cols) return InvalidArgument("gemm: x_stride of ", args.x_stride, " for ", cols, " columns");
  const size_t need = GemmScratchBytes(args.m, cols);
  if (args.scratch.size() < need || reinterpret_cast<uintptr_t>(args.scratch.data()) % 64 != 0) {
    return InvalidArgument("gemm: needs ", need, " bytes of scratch aligned to 64, got ", args.scratch.size());
  }
  return absl::OkStatus();
}

void Convert(PrepareRowsFn prepare, const GemmRows& rows, int64_t m, int64_t cols, ThreadPool& pool) {
  if (m * cols <= kSerialConversion) return prepare(rows, cols, 0, m);
  const int64_t rows_per_task = RoundUp(std::max<int64_t>(1, kConversionTask / cols), kPanelRows);
  pool.Run(static_cast<int>(CeilDiv(m, rows_per_task)), [&](int task) {
    const int64_t begin = task * rows_per_task;
    prepare(rows, cols, begin, std::min(m, begin + rows_per_task));
  });
}

// The outputs' tiles in one line, cut into tasks of `tiles_per_task`, for each block of rows.
class Plan {
 public:
  Plan(const GemmArgs& args, int64_t cols, int threads) : args_(args) {
    for (const GemmOutput& output : args.outputs) tiles_ += output.weights->tiles();
    row_block_ = std::min(args.m, kRowBlock);
    row_blocks_ = CeilDiv(args.m, row_block_);
    // Large enough to be worth an atomic add, small enough that the threads finish together; whole
    // pairs, which the micro-kernels like.
    const int64_t by_work = kMacsPerTask / std::max<int64_t>(1, row_block_ * cols * kTileRows);
    const int64_t by_balance = tiles_ * row_blocks_ / (threads * int64_t{4});
    tiles_per_task_ = RoundUp(std::max<int64_t>(1, std::min(std::max(by_work, by_balance / 4), by_balance)), 4);
    tasks_per_block_ = CeilDiv(tiles_, tiles_per_task_);
  }

  int tasks() const { return static_cast<int>(row_blocks_ * tasks_per_block_); }

  void Run(int task, const GemmRows& rows, const GemmKernels& kernels) const {
    const int64_t row_begin = task / tasks_per_block_ * row_block_;
    const int64_t row_end = std::min(args_.m, row_begin + row_block_);
    const int64_t begin = task % tasks_per_block_ * tiles_per_task_;
    const int64_t end = std::min(tiles_, begin + tiles_per_task_);
    int64_t first = 0;  // of this output, in the line
    for (const GemmOutput& output : args_.outputs) {
      const int64_t tiles = output.weights->tiles();
      const int64_t tile_begin = std::max<int64_t>(begin - first, 0), tile_end = std::min(end - first, tiles);
      if (tile_begin < tile_end) {
        const PackedView& view = output.weights->view();
        const GemmTarget target{output.y, output.y_stride, output.bias, output.accumulate};
        kernels.block[static_cast<int>(output.activations)][static_cast<int>(view.format)](
            rows, view, target, row_begin, row_end, tile_begin, tile_end);
      }
      first += tiles;
    }
  }

 private:
  const GemmArgs& args_;
  int64_t tiles_ = 0, row_block_ = 1, row_blocks_ = 1, tiles_per_task_ = 1, tasks_per_block_ = 1;
};

}  // namespace

size_t GemmScratchBytes(int64_t m, int64_t cols) {
  Arena arena(nullptr);
  GemmRows rows;
  TakeBF16(arena, m, cols, rows);
  TakeQuantized(arena, m, cols, rows);
  TakePrecise(arena, m, cols, rows);
  TakeJoined(arena, m, cols, rows);
  TakeSplit(arena, m, cols, rows);
  return arena.used();
}

absl::Status Gemm(const GemmArgs& args, Stream& stream) {
  DT_RETURN_IF_ERROR(Check(args));
  if (args.m == 0 || args.outputs.empty()) return absl::OkStatus();
  const int64_t cols = args.outputs[0].weights->cols();
  const GemmKernels& kernels = stream.kernels().gemm;
  ThreadPool& pool = stream.pool();
  GemmRows rows;
  rows.f32 = args.x;
  rows.f32_stride = args.x_stride;
  Arena arena(args.scratch.data());
  const Needs needs = NeedsOf(args.outputs, kernels);
  if (needs.bf16) {
    TakeBF16(arena, args.m, cols, rows);
    Convert(kernels.round_rows_to_bf16, rows, args.m, cols, pool);
  }
  if (needs.split) {
    TakeSplit(arena, args.m, cols, rows);
    Convert(kernels.split_rows, rows, args.m, cols, pool);
  }
  if (needs.quantized) {
    TakeQuantized(arena, args.m, cols, rows);
    Convert(kernels.quantize_rows[static_cast<int>(ActivationBits::k8)], rows, args.m, cols, pool);
  }
  if (needs.precise) {
    TakePrecise(arena, args.m, cols, rows);
    Convert(kernels.quantize_rows[static_cast<int>(ActivationBits::k16)], rows, args.m, cols, pool);
  }
  if (needs.joined) {
    TakeJoined(arena, args.m, cols, rows);
    Convert(kernels.join_rows, rows, args.m, cols, pool);
  }
  const Plan plan(args, cols, pool.threads());
  pool.Run(plan.tasks(), [&](int task) { plan.Run(task, rows, kernels); });
  return absl::OkStatus();
}

}  // namespace dovetail::kernels
