#pragma once
#include <string>

#include "base/status.h"
#include "examples/spatio_temporal/report.h"

namespace dovetail::spatio_temporal {

// Times of the parts of a pair on options.devices[0], each alone, and what a link to options.devices[1] carries; a time
// of a pair is predicted from these before any is run.
// Threads: plain values; MeasureRates is thread-safe.
struct GpuRates {
  double project_seconds = 0;   // of chunk_rows rows; of both blocks' products and norms
  double finish_seconds = 0;    // likewise
  double spatial_seconds = 0;   // attention of frames, a row
  double temporal_seconds = 0;  // attention of positions, a row
  double product_flops = 0;     // a second, padding counted: of the products of project and finish
  double spatial_flops = 0;     // likewise
  double copy_bytes = 0;        // a second, one direction, one piece of 256 MiB; 0: one device
  double runs_bytes = 0;        // likewise, in runs as Ulysses' switch to heads has them, by the kernel
  double chunk_rows = 0;

  double ComputeSeconds(const Config& config, int ranks) const;  // of a pair, a rank
  // Of a pair, a rank: the formula's bytes at the rate of the copies that the way makes.
  absl::StatusOr<double> ExchangeSeconds(const Config& config, Way way, int ranks) const;
};

// Blocks. Errors: RunGpus'; kInvalidArgument with exchange_only, which computes nothing.
absl::StatusOr<GpuRates> MeasureRates(const RunOptions& options);
std::string DescribeRates(const RunOptions& options, const GpuRates& rates);

}  // namespace dovetail::spatio_temporal
