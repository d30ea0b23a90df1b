#pragma once
#include <span>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "base/sha256.h"
#include "base/status.h"
#include "examples/spatio_temporal/config.h"
#include "examples/spatio_temporal/rank_link.h"
#include "examples/spatio_temporal/weights.h"
#include "kernels/device.h"

namespace dovetail::spatio_temporal {

// What to run. Travels to the processes of ranks as a line of JSON.
// Threads: plain values and pure functions.
struct RunOptions {
  Config config;
  Way way = Way::kDsp;
  int ranks = 1;
  std::string transport = "inproc";          // inproc (threads), shm or tcp (processes over UCX)
  int threads = 1;                           // of each rank
  absl::Duration stall = absl::Seconds(60);  // ExchangeOptions::stall
  int64_t chunk_bytes = int64_t{1} << 20;    // ExchangeOptions::chunk_bytes
  std::vector<std::string> devices;          // "cuda:0", one a rank, in this process; empty: CPUs. Does not travel.
  int64_t chunk_rows = 16384;                // on GPUs: of products, and what is sent at once
  std::string output;                        // file that gets hidden, [T, S, C] in bf16; empty: none

  absl::Status Validate() const;  // kInvalidArgument names the flag
};

inline constexpr int kMaxRanksHere = 16;

std::string ToJson(const RunOptions& options);
absl::StatusOr<RunOptions> OptionsFromJson(const std::string& text);

struct RankReport {
  int rank = 0;
  std::vector<double> pair_seconds;  // of the last kMaxPairsTimed
  double exchange_seconds = 0;       // waiting for slower ranks included
  double seconds = 0;                // all pairs
  int64_t bytes_sent = 0;
  std::vector<Sha256Digest> frames;  // of its frames, in order
};
inline constexpr size_t kMaxPairsTimed = 1024;

std::string ToJson(const RankReport& report);
absl::StatusOr<RankReport> ReportFromJson(const std::string& text);

// Digests of a rank's frames, [.., S, C] in bf16, into its report, and the frames into options.output.
absl::Status KeepFrames(const RunOptions& options, int64_t first_frame, std::span<const std::byte> hidden,
                        RankReport& report);

// All steps of one rank; writes its frames to options.output. Null link: one rank.
// Threads: the rank's thread only; kernels use the threads of the device's pool as well.
absl::StatusOr<RankReport> RunRank(const RunOptions& options, const Weights& weights, int rank, kernels::Device& device,
                                   RankLink* link);

// Of all ranks.
struct Summary {
  double pair_seconds = 0;    // median over pairs of the slowest rank's
  double exchange_share = 0;  // of the ranks' time
  int64_t pair_bytes = 0;     // sent by all ranks for a pair
  int64_t formula_bytes = 0;  // FormulaBytesOfPair
  std::string digest;         // of hidden at the end: equal for equal bits, whatever the number of ranks
};
// kInternal: bytes that are not the formula's.
absl::StatusOr<Summary> Summarize(const RunOptions& options, const std::vector<RankReport>& by_rank);
std::string Describe(const RunOptions& options, const Summary& summary);

}  // namespace dovetail::spatio_temporal
