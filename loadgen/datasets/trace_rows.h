#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "loadgen/datasets/dataset.h"

namespace dovetail::loadgen {

// One request of a recorded trace.
// Threads: thread-compatible; a value.
struct TraceRow {
  double at_s = 0;                        // from the trace's first request, --timed-trace-sec-multiplier applied
  int64_t input_len = 0, output_len = 0;  // tokens, as recorded
  std::vector<int64_t> hash_ids;          // one for each block of the prompt; equal ids: equal prefixes
  int64_t line = 0;
};

// The first --num-prompts rows of a trace, in the order of their times, which begin at 0. Two formats: JSON lines with
// a time and two lengths (Mooncake's: timestamp, input_length, output_length, hash_ids; a time of its own name
// timestamp_ms is in milliseconds), and Azure's CSV (TIMESTAMP,ContextTokens,GeneratedTokens). Either may be gzip.
// Errors name file, line and field: times and lengths that are no numbers, negative or not finite, lengths of no
// tokens, hash_ids that are no ids.
// Threads: thread-safe; blocks on files.
absl::StatusOr<std::vector<TraceRow>> ReadTraceRows(const DatasetOptions& options);

// The tokens of one block of hash_ids: --timed-trace-chunk-hash-size, or the power of two that fits every row.
// kInvalidArgument names the first row that does not fit.
// Threads: pure.
absl::StatusOr<int64_t> ChunkTokens(const DatasetOptions& options, const std::vector<TraceRow>& rows);

}  // namespace dovetail::loadgen
