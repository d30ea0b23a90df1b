#pragma once
#include "kernels/cpu/ops_table.h"
#include "kernels/thread_pool.h"

namespace dovetail::kernels {

// What a CPU op runs with: the pool it spreads its rows over, and the inner loops of one ISA. A
// small value; both must outlive the call. No op's result depends on the pool.
// Threads: thread-compatible; a value.
struct OpContext {
  ThreadPool* pool = nullptr;
  const OpsTable* table = nullptr;
};

// Of a CPU stream (device.h).
OpContext ContextOf(Stream& stream);

// Rows are handed to threads in runs of at least this many elements (about 2 us of work).
inline constexpr int64_t kElementsPerTask = 16384;

// Calls rows(begin, end) over disjoint runs that cover 0..count - 1, on the pool when there is
// enough work.
// Threads: `rows` runs on the caller and the pool; returns when all runs are done.
template <typename Rows>
void ForRows(const OpContext& context, int64_t count, int64_t elements_per_row, Rows&& rows) {
  const int64_t per_task =
      elements_per_row >= kElementsPerTask ? 1 : kElementsPerTask / (elements_per_row > 0 ? elements_per_row : 1);
  const int64_t tasks = (count + per_task - 1) / per_task;
  if (tasks <= 1) {
    if (count > 0) rows(int64_t{0}, count);
    return;
  }
  context.pool->Run(static_cast<int>(tasks), [&](int task) {
    const int64_t begin = task * per_task;
    rows(begin, begin + per_task < count ? begin + per_task : count);
  });
}

}  // namespace dovetail::kernels
