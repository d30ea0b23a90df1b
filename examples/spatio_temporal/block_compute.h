#pragma once
#include <memory>
#include <vector>

#include "base/dtype.h"
#include "base/status.h"
#include "examples/spatio_temporal/config.h"
#include "examples/spatio_temporal/weights.h"
#include "kernels/aligned_buffer.h"
#include "kernels/device.h"
#include "kernels/paged_attention.h"

namespace dovetail::spatio_temporal {

// The arithmetic of a block on one rank's rows, with the CPU's kernels. Every sum over a row's numbers, and over what
// it attends to, has an order that does not depend on which other rows and heads there are (docs/ARCHITECTURE.md,
// Determinism), so a row has the same bits on any number of ranks. Does nothing if config.exchange_only.
// Threads: thread-compatible; allocates buffers as they are needed and keeps them.
class BlockCompute {
 public:
  // `device` outlives it.
  BlockCompute(const Config& config, kernels::Device& device);

  // Rows of hidden, [C] each: `groups` runs of `rows` rows, `step` elements from run to run.
  struct Rows {
    BF16* first = nullptr;
    int64_t groups = 1;
    int64_t rows = 0;
    int64_t step = 0;
    int64_t count() const { return groups * rows; }
  };
  // Every row of a sequence attends to all of it. [heads][dim] of row r of sequence i is at i * sequence_step +
  // r * row_step in q, k, v and o; steps in elements. o may be q.
  struct Sequences {
    const BF16 *q = nullptr, *k = nullptr, *v = nullptr;
    BF16* o = nullptr;
    int64_t count = 0;
    int64_t length = 0;
    int heads = 0;
    int64_t row_step = 0;
    int64_t sequence_step = 0;
  };

  // q, k, v [rows.count()][C], dense: of the normalised rows.
  absl::Status Project(const BlockWeights& weights, const Rows& rows, BF16* q, BF16* k, BF16* v);
  absl::Status Attend(const Sequences& sequences);
  // rows += o W; rows += MLP(norm(rows)); rounded to bf16 once. o [rows.count()][C], dense.
  absl::Status Finish(const BlockWeights& weights, const BF16* o, const Rows& rows);

 private:
  template <typename T>
  absl::StatusOr<T*> Room(kernels::AlignedBuffer& buffer, int64_t count);
  absl::Status AttendBatch(const Sequences& sequences, int64_t first, int64_t count);

  const Config& config_;
  std::unique_ptr<kernels::Stream> stream_;
  kernels::AlignedBuffer x_, normed_, wide_, gemm_scratch_, blocks_, attention_scratch_;
  std::vector<std::byte*> table_;
};

}  // namespace dovetail::spatio_temporal
