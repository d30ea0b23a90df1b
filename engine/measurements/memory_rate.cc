#include "engine/measurements/memory_rate.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>

#include "base/check.h"
#include "kernels/aligned_buffer.h"

namespace dovetail::engine {
namespace {

constexpr size_t kPieceBytes =
    size_t{1} << 20;  // a task: long against claiming it, short against a thread that is delayed
constexpr int kPasses = 5;

// Eight independent sums, so that the loop waits for memory and not for its own additions.
uint64_t SumPiece(const std::byte* begin) {
  const auto* words = reinterpret_cast<const uint64_t*>(begin);
  uint64_t sums[32] = {};
  for (size_t i = 0; i < kPieceBytes / sizeof(uint64_t); i += 32)
    for (size_t lane = 0; lane < 32; ++lane) sums[lane] += words[i + lane];
  uint64_t total = 0;
  for (const uint64_t sum : sums) total += sum;
  return total;
}

}  // namespace

absl::StatusOr<double> MeasureReadRate(kernels::ThreadPool& pool, size_t bytes) {
  DT_CHECK(bytes > 0 && bytes % kPieceBytes == 0, "whole pieces");
  DT_ASSIGN_OR_RETURN(kernels::AlignedBuffer memory, kernels::AlignedBuffer::Create(bytes));
  const int pieces = static_cast<int>(bytes / kPieceBytes);
  // Written by the threads that read it, so that it lies where they are.
  pool.Run(pieces,
           [&](int piece) { std::memset(memory.data() + static_cast<size_t>(piece) * kPieceBytes, 1, kPieceBytes); });
  std::atomic<uint64_t> sink{0};  // keeps the sums from being optimised away
  double best_seconds = 1e9;
  for (int pass = 0; pass < kPasses; ++pass) {
    const auto start = std::chrono::steady_clock::now();
    pool.Run(pieces, [&](int piece) {
      sink.fetch_add(SumPiece(memory.data() + static_cast<size_t>(piece) * kPieceBytes), std::memory_order_relaxed);
    });
    best_seconds =
        std::min(best_seconds, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  if (sink.load() == 0) return Internal("memory read rate: the sums are wrong");
  return static_cast<double>(bytes) / best_seconds;
}

absl::StatusOr<double> MeasureGpuReadRate(kernels::cuda::CudaDevice& gpu, size_t bytes) {
  constexpr int kRuns = 8;
  DT_ASSIGN_OR_RETURN(const auto memory, gpu.Allocate(bytes));
  DT_ASSIGN_OR_RETURN(const auto result, gpu.Allocate(sizeof(uint32_t)));
  DT_ASSIGN_OR_RETURN(const auto stream, gpu.CreateCudaStream());
  DT_ASSIGN_OR_RETURN(kernels::cuda::CudaEvent begin, gpu.CreateEvent(/*timed=*/true));
  DT_ASSIGN_OR_RETURN(kernels::cuda::CudaEvent end, gpu.CreateEvent(/*timed=*/true));
  DT_RETURN_IF_ERROR(stream->Fill(memory->data(), 1, bytes));
  float best_ms = 0;
  for (int run = 0; run < kRuns; ++run) {
    DT_RETURN_IF_ERROR(stream->Record(begin));
    DT_RETURN_IF_ERROR(stream->UseDevice());
    DT_RETURN_IF_ERROR(gpu.library().Check(
        gpu.library()->read_all(memory->data(), bytes, result->data(), stream->handle()), "reading GPU memory"));
    DT_RETURN_IF_ERROR(stream->Record(end));
    DT_RETURN_IF_ERROR(stream->SynchronizeStatus());
    DT_ASSIGN_OR_RETURN(const float ms, end.MillisecondsSince(begin));
    best_ms = run == 0 ? ms : std::min(best_ms, ms);
  }
  return static_cast<double>(bytes) / (best_ms * 1e-3);
}

}  // namespace dovetail::engine
