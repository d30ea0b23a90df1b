#pragma once
#include <array>
#include <memory>
#include <span>
#include <vector>

#include "kernels/cuda/sampling/sample.h"
#include "kernels/sampling.h"

namespace dovetail::kernels::cuda {

// Draws one token a row of logits on the GPU; only tokens come back. Parameters travel in one copy.
// Ownership: must not outlive its device.
// Threads: thread-compatible.
class CudaSampler {
 public:
  struct Row {
    const SamplingParams* params = nullptr;  // read by Enqueue only
    int64_t position = 0;
  };

  // Memory for max_rows rows of `vocab` logits, which samplers that draw in one stream may share. kResourceExhausted:
  // it is not there.
  static absl::StatusOr<std::shared_ptr<Buffer>> CreateWork(CudaDevice& device, int32_t max_rows, int32_t vocab);

  // `work`: what CreateWork() gave for as many rows and logits; null: it has its own. kResourceExhausted: there is no
  // memory.
  static absl::StatusOr<std::unique_ptr<CudaSampler>> Create(CudaDevice& device, int32_t max_rows, int32_t vocab,
                                                             std::shared_ptr<Buffer> work = nullptr);

  // logits: device memory, f32, row i at logits + i * step; they stay as they are. One call at a time: Results of the
  // one before must have been taken. kInvalidArgument, naming the row and the field, for ids outside the vocabulary,
  // more rows than max_rows and parameters outside sampling.h's; kUnimplemented for logprobs > 0 (the most likely
  // tokens' list), which the host's SampleRow gives.
  absl::Status Enqueue(CudaStream& stream, const float* logits, int64_t step, std::span<const Row> rows);

  // Enqueue in two parts. The first checks, and enqueues the upload of the parameters. The second enqueues the rest; it
  // may be recorded, and is valid for every later upload with equal Launches().
  absl::Status Upload(CudaStream& stream, std::span<const Row> rows);
  absl::Status Draw(CudaStream& stream, const float* logits, int64_t step);
  // What a recorded Draw depends on in the last upload, other than the contents of memory: the rows and the addresses.
  std::array<uint64_t, 4> Launches() const;
  // On the device, by row: what was drawn, until the next Draw.
  const SampleOutput* drawn() const { return reinterpret_cast<const SampleOutput*>(out_->data()); }

  // After the stream was synchronised. As SampleRow: kInternal for a row that held NaN or +inf, kInvalidArgument
  // where nothing was left to choose. `top` is empty.
  absl::StatusOr<SampleResult> Result(size_t row) const;

 private:
  CudaSampler(CudaDevice& device, int32_t max_rows, int32_t vocab)
      : device_(device), max_rows_(max_rows), vocab_(vocab) {}
  absl::Status AddRow(size_t index, const Row& row);
  absl::Status Send(CudaStream& stream);

  CudaDevice& device_;
  const int32_t max_rows_;
  const int32_t vocab_;
  std::shared_ptr<Buffer> work_;
  std::unique_ptr<Buffer> out_, host_out_, host_lists_, lists_;
  std::vector<SampleParams> params_;
  std::vector<SampleSeen> seen_;
  std::vector<SampleBias> biases_;
  std::vector<int32_t> allowed_;
  SampleLaunch launch_;  // of the last upload
};

}  // namespace dovetail::kernels::cuda
