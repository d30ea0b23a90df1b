#include "examples/spatio_temporal/rank_run.h"

#include <algorithm>

namespace dovetail::spatio_temporal {
namespace {

constexpr int64_t kTemporalRowsAtOnce = 4096;

using Buffer = std::shared_ptr<kernels::AlignedBuffer>;

BF16* Elements(const Buffer& buffer) { return reinterpret_cast<BF16*>(buffer->data()); }

absl::StatusOr<Buffer> Allocate(int64_t bytes) {
  DT_ASSIGN_OR_RETURN(kernels::AlignedBuffer buffer, kernels::AlignedBuffer::Create(bytes));
  return std::make_shared<kernels::AlignedBuffer>(std::move(buffer));
}

// Of a cut that may be one part.
proto::AxisRange RangeOf(const proto::Layout& layout, int rank, int64_t size) {
  return layout.axis() < 0 ? proto::AxisRange{0, size} : layout.range(rank);
}

absl::StatusOr<std::unique_ptr<proto::Switch>> SwitchBetween(const proto::Layout& from, const proto::Layout& to) {
  DT_ASSIGN_OR_RETURN(proto::Switch plan, proto::Switch::Between(from, to));
  return std::make_unique<proto::Switch>(std::move(plan));
}

}  // namespace

absl::StatusOr<std::unique_ptr<RankRun>> RankRun::Create(const Config& config, const Weights& weights, Way way,
                                                         int rank, int ranks, kernels::Device& device, RankLink* link) {
  DT_RETURN_IF_ERROR(config.Validate());
  if ((link == nullptr) != (ranks == 1)) return InvalidArgument(ranks, " ranks need links to each other; one has none");
  auto run = std::unique_ptr<RankRun>(new RankRun(config, weights, way, rank, device, link));
  DT_RETURN_IF_ERROR(run->Init(ranks));
  return run;
}

absl::Status RankRun::Init(int ranks) {
  const proto::TensorShape shape = config_.HiddenShape();
  DT_ASSIGN_OR_RETURN(const proto::Layout by_frames, proto::Layout::Even(shape, "T", ranks));
  frames_ = RangeOf(by_frames, rank_, config_.frames);
  DT_ASSIGN_OR_RETURN(by_frames_, Allocate(by_frames.PartBytes(rank_)));
  BF16* row = Elements(by_frames_);
  for (int64_t t = frames_.begin; t < frames_.end; ++t)
    for (int64_t s = 0; s < config_.positions; ++s, row += config_.channels) RandomRow(config_, t, s, row);
  if (way_ == Way::kUlysses) return InitUlysses(by_frames, ranks);
  DT_ASSIGN_OR_RETURN(const proto::Layout by_positions, proto::Layout::Even(shape, "S", ranks));
  positions_ = RangeOf(by_positions, rank_, config_.positions);
  DT_ASSIGN_OR_RETURN(there_, SwitchBetween(by_frames, by_positions));
  DT_ASSIGN_OR_RETURN(back_, SwitchBetween(by_positions, by_frames));
  by_positions_ = by_frames_;
  if (!there_->identity()) {
    DT_ASSIGN_OR_RETURN(by_positions_, Allocate(by_positions.PartBytes(rank_)));
  }
  const int64_t rows =
      std::max(config_.positions, config_.frames * std::max<int64_t>(1, kTemporalRowsAtOnce / config_.frames));
  for (std::vector<BF16>* part : {&q_, &k_, &v_}) part->resize(rows * config_.channels);
  return absl::OkStatus();
}

absl::Status RankRun::InitUlysses(const proto::Layout& by_frames, int ranks) {
  const proto::TensorShape shape = config_.HeadsShape();
  DT_ASSIGN_OR_RETURN(const proto::Layout local, proto::Layout::Even(shape, "T", ranks));
  DT_ASSIGN_OR_RETURN(const proto::Layout by_heads, proto::Layout::Even(shape, "heads", ranks));
  heads_ = RangeOf(by_heads, rank_, config_.heads);
  DT_ASSIGN_OR_RETURN(there_, SwitchBetween(local, by_heads));
  DT_ASSIGN_OR_RETURN(back_, SwitchBetween(by_heads, local));
  for (int i = 0; i < 3; ++i) {
    DT_ASSIGN_OR_RETURN(local_[i], Allocate(by_frames.PartBytes(rank_)));
    heads_of_[i] = local_[i];
    if (there_->identity()) continue;
    DT_ASSIGN_OR_RETURN(heads_of_[i], Allocate(by_heads.PartBytes(rank_)));
  }
  return absl::OkStatus();
}

std::span<const std::byte> RankRun::hidden() const { return by_frames_->bytes(); }

absl::Status RankRun::Pair(StepId step, int pair) {
  if (way_ == Way::kDsp) return DspPair(step, pair);
  DT_RETURN_IF_ERROR(UlyssesBlock(step, weights_.spatial[pair], true));
  return UlyssesBlock(step, weights_.temporal[pair], false);
}

// Where the layouts are one, both ends are the same buffer.
absl::Status RankRun::Move(StepId step, const proto::Switch& plan, const Buffer& from, const Buffer& to) {
  if (plan.identity()) return absl::OkStatus();
  return link_->Run(step, plan, transport::Lend(from, from->size_bytes()), to->bytes());
}

absl::Status RankRun::DspPair(StepId step, int pair) {
  DT_RETURN_IF_ERROR(SpatialBlock(weights_.spatial[pair]));
  DT_RETURN_IF_ERROR(Move(step, *there_, by_frames_, by_positions_));
  DT_RETURN_IF_ERROR(TemporalBlock(weights_.temporal[pair]));
  return Move(step, *back_, by_positions_, by_frames_);
}

// Frame by frame: [S, C] lies in one piece.
absl::Status RankRun::SpatialBlock(const BlockWeights& weights) {
  const int64_t c = config_.channels, s = config_.positions;
  for (int64_t t = 0; t < frames_.size(); ++t) {
    const BlockCompute::Rows rows{Elements(by_frames_) + t * s * c, 1, s, 0};
    DT_RETURN_IF_ERROR(compute_.Project(weights, rows, q_.data(), k_.data(), v_.data()));
    DT_RETURN_IF_ERROR(compute_.Attend({.q = q_.data(),
                                        .k = k_.data(),
                                        .v = v_.data(),
                                        .o = q_.data(),
                                        .count = 1,
                                        .length = s,
                                        .heads = config_.heads,
                                        .row_step = c}));
    DT_RETURN_IF_ERROR(compute_.Finish(weights, q_.data(), rows));
  }
  return absl::OkStatus();
}

// Some positions at a time: all frames of them, which lie a row of hidden apart.
absl::Status RankRun::TemporalBlock(const BlockWeights& weights) {
  const int64_t c = config_.channels, t = config_.frames;
  const int64_t at_once = std::max<int64_t>(1, kTemporalRowsAtOnce / t);
  for (int64_t s = 0; s < positions_.size(); s += at_once) {
    const int64_t count = std::min(at_once, positions_.size() - s);
    const BlockCompute::Rows rows{Elements(by_positions_) + s * c, t, count, positions_.size() * c};
    DT_RETURN_IF_ERROR(compute_.Project(weights, rows, q_.data(), k_.data(), v_.data()));
    DT_RETURN_IF_ERROR(compute_.Attend({.q = q_.data(),
                                        .k = k_.data(),
                                        .v = v_.data(),
                                        .o = q_.data(),
                                        .count = count,
                                        .length = t,
                                        .heads = config_.heads,
                                        .row_step = count * c,
                                        .sequence_step = c}));
    DT_RETURN_IF_ERROR(compute_.Finish(weights, q_.data(), rows));
  }
  return absl::OkStatus();
}

// Dense operators over the rank's frames, attention over all tokens of its heads: [T, S, heads, dim].
absl::Status RankRun::UlyssesBlock(StepId step, const BlockWeights& weights, bool spatial) {
  const int64_t s = config_.positions, row = heads_.size() * config_.head_dim();
  const BlockCompute::Rows rows{Elements(by_frames_), 1, frames_.size() * s, 0};
  DT_RETURN_IF_ERROR(compute_.Project(weights, rows, Elements(local_[0]), Elements(local_[1]), Elements(local_[2])));
  for (int i = 0; i < 3; ++i) DT_RETURN_IF_ERROR(Move(step, *there_, local_[i], heads_of_[i]));
  DT_RETURN_IF_ERROR(compute_.Attend({.q = Elements(heads_of_[0]),
                                      .k = Elements(heads_of_[1]),
                                      .v = Elements(heads_of_[2]),
                                      .o = Elements(heads_of_[0]),
                                      .count = spatial ? config_.frames : s,
                                      .length = spatial ? s : config_.frames,
                                      .heads = static_cast<int>(heads_.size()),
                                      .row_step = spatial ? row : s * row,
                                      .sequence_step = spatial ? s * row : row}));
  DT_RETURN_IF_ERROR(Move(step, *back_, heads_of_[0], local_[0]));
  return compute_.Finish(weights, Elements(local_[0]), rows);
}

}  // namespace dovetail::spatio_temporal
