#pragma once
#include <memory>
#include <string>
#include <vector>

#include "base/sha256.h"
#include "base/status.h"
#include "examples/spatio_temporal/block_compute.h"
#include "examples/spatio_temporal/config.h"
#include "examples/spatio_temporal/rank_link.h"
#include "examples/spatio_temporal/weights.h"
#include "kernels/device.h"
#include "proto/token_layout.h"

namespace dovetail::spatio_temporal {

inline constexpr int kSwitchesOfDspPair = 2, kSwitchesOfUlyssesPair = 8;

// One rank's part of the model. Before and after every pair it holds frames of hidden, [its T, S, C]: with one rank all
// of them, and no switch moves anything.
// Ownership: config, weights, device and link outlive it.
// Threads: thread-compatible.
class RankRun {
 public:
  // kInvalidArgument: more ranks than frames, positions or heads. kResourceExhausted: no memory.
  static absl::StatusOr<std::unique_ptr<RankRun>> Create(const Config& config, const Weights& weights, Way way,
                                                         int rank, int ranks, kernels::Device& device, RankLink* link);

  // `step` grows; its switches are numbered in it. Null link: one rank.
  absl::Status Pair(StepId step, int pair);

  const proto::AxisRange& frames() const { return frames_; }
  std::span<const std::byte> hidden() const;  // its frames, [frames().size(), S, C] in bf16

 private:
  using Buffer = std::shared_ptr<kernels::AlignedBuffer>;

  RankRun(const Config& config, const Weights& weights, Way way, int rank, kernels::Device& device, RankLink* link)
      : config_(config), weights_(weights), way_(way), rank_(rank), link_(link), compute_(config, device) {}
  absl::Status Init(int ranks);
  absl::Status InitUlysses(const proto::Layout& by_frames, int ranks);
  absl::Status Move(StepId step, const proto::Switch& plan, const Buffer& from, const Buffer& to);
  absl::Status DspPair(StepId step, int pair);
  absl::Status SpatialBlock(const BlockWeights& weights);
  absl::Status TemporalBlock(const BlockWeights& weights);
  absl::Status UlyssesBlock(StepId step, const BlockWeights& weights, bool spatial);

  const Config& config_;
  const Weights& weights_;
  const Way way_;
  const int rank_;
  RankLink* const link_;
  BlockCompute compute_;
  proto::AxisRange frames_, positions_, heads_;
  std::unique_ptr<proto::Switch> there_, back_;  // hidden: frames to positions; q, k, v: frames to heads
  Buffer by_frames_, by_positions_;              // hidden
  std::vector<BF16> q_, k_, v_;                  // of the sequences at hand
  Buffer local_[3], heads_of_[3];                // Ulysses: q (and o), k, v of its frames, and of its heads
};

}  // namespace dovetail::spatio_temporal
