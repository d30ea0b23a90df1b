#include "examples/spatio_temporal/gpu/gpu_rank.h"

#include <algorithm>
#include <utility>

#include "examples/spatio_temporal/weights.h"

namespace dovetail::spatio_temporal {
namespace {

using kernels::cuda::CudaDevice;
using kernels::cuda::CudaEvent;

BF16* Elements(const std::unique_ptr<kernels::Buffer>& buffer) { return reinterpret_cast<BF16*>(buffer->data()); }

absl::StatusOr<std::shared_ptr<const proto::Switch>> SwitchBetween(const proto::Layout& from, const proto::Layout& to) {
  DT_ASSIGN_OR_RETURN(proto::Switch plan, proto::Switch::Between(from, to));
  return std::make_shared<const proto::Switch>(std::move(plan));
}

// Each rank's range of a cut that may be one part.
std::vector<proto::AxisRange> RangesOf(const proto::Layout& layout, int64_t size) {
  std::vector<proto::AxisRange> ranges;
  for (int rank = 0; rank < layout.ranks(); ++rank)
    ranges.push_back(layout.axis() < 0 ? proto::AxisRange{0, size} : layout.range(rank));
  return ranges;
}

}  // namespace

absl::StatusOr<std::unique_ptr<GpuRank>> GpuRank::Create(const Place& place, const GpuWeights& weights,
                                                         CudaDevice& device, RankBoard& board) {
  DT_RETURN_IF_ERROR(place.config.Validate());
  if (place.config.head_dim() % 8 != 0)
    return InvalidArgument("channels ", place.config.channels, " and heads ", place.config.heads,
                           ": on GPUs channels / heads is a multiple of 8");
  DT_RETURN_IF_ERROR(FormulaBytesOfPair(place.config, place.way, place.ranks).status());
  auto rank = std::unique_ptr<GpuRank>(new GpuRank(place, weights, device));
  DT_RETURN_IF_ERROR(rank->Init(board));
  return rank;
}

absl::Status GpuRank::Init(RankBoard& board) {
  head_row_ = int64_t{config_.heads} * PaddedHeadDim(config_.head_dim());
  DT_ASSIGN_OR_RETURN(stream_, device_.CreateCudaStream());
  DT_ASSIGN_OR_RETURN(block_, GpuBlock::Create(config_, device_, place_.chunk_rows));
  DT_ASSIGN_OR_RETURN(exchange_, GpuExchange::Create(device_, *stream_, board, place_.rank, place_.ranks));
  DT_RETURN_IF_ERROR(InitLayouts());
  DT_RETURN_IF_ERROR(place_.way == Way::kDsp ? AllocateDsp() : AllocateUlysses());
  return FillHidden();
}

absl::Status GpuRank::InitLayouts() {
  const int ranks = place_.ranks;
  if (place_.way == Way::kDsp) {
    const proto::TensorShape shape = config_.HiddenShape();
    DT_ASSIGN_OR_RETURN(const proto::Layout by_frames, proto::Layout::Even(shape, "T", ranks));
    DT_ASSIGN_OR_RETURN(const proto::Layout by_positions, proto::Layout::Even(shape, "S", ranks));
    frames_ = RangesOf(by_frames, config_.frames);
    positions_ = RangesOf(by_positions, config_.positions);
    heads_.assign(ranks, {0, config_.heads});
    DT_ASSIGN_OR_RETURN(there_plan_, SwitchBetween(by_frames, by_positions));
    DT_ASSIGN_OR_RETURN(back_plan_, SwitchBetween(by_positions, by_frames));
    return absl::OkStatus();
  }
  const proto::TensorShape shape = config_.HeadsShape();
  DT_ASSIGN_OR_RETURN(const proto::Layout local, proto::Layout::Even(shape, "T", ranks));
  DT_ASSIGN_OR_RETURN(const proto::Layout by_heads, proto::Layout::Even(shape, "heads", ranks));
  frames_ = RangesOf(local, config_.frames);
  positions_.assign(ranks, {0, config_.positions});
  heads_ = RangesOf(by_heads, config_.heads);
  DT_ASSIGN_OR_RETURN(there_plan_, SwitchBetween(local, by_heads));
  DT_ASSIGN_OR_RETURN(back_plan_, SwitchBetween(by_heads, local));
  return absl::OkStatus();
}

absl::Status GpuRank::AllocateDsp() {
  const int64_t c = config_.channels, s = config_.positions, mine = frames().size() * s;
  const int64_t positions = positions_[place_.rank].size(), by_positions = config_.frames * positions;
  DT_ASSIGN_OR_RETURN(by_frames_, device_.Allocate(mine * c * sizeof(BF16)));
  if (!alone()) {
    DT_ASSIGN_OR_RETURN(by_positions_, device_.Allocate(by_positions * c * sizeof(BF16)));
  }
  if (config_.exchange_only) return absl::OkStatus();
  int64_t rows = by_positions;  // of the temporal block, all at once; of the spatial one a chunk
  for (const Range& chunk : Chunks(place_.rank, s)) rows = std::max(rows, chunk.size() * s);
  DT_ASSIGN_OR_RETURN(qkv_, device_.Allocate(rows * 3 * head_row_ * sizeof(BF16)));
  DT_ASSIGN_OR_RETURN(o_, device_.Allocate(rows * head_row_ * sizeof(BF16)));
  return absl::OkStatus();
}

// What arrives of q, k and v has no padding, so that it arrives in long runs. o's is never sent: zeros from the
// beginning.
absl::Status GpuRank::AllocateUlysses() {
  const int64_t mine = frames().size() * config_.positions, all = config_.frames * config_.positions;
  const int64_t heads = heads_[place_.rank].size(), padded = PaddedHeadDim(config_.head_dim());
  DT_ASSIGN_OR_RETURN(by_frames_, device_.Allocate(mine * config_.channels * sizeof(BF16)));
  DT_ASSIGN_OR_RETURN(qkv_, device_.Allocate(mine * 3 * head_row_ * sizeof(BF16)));
  DT_ASSIGN_OR_RETURN(o_, device_.Allocate(mine * head_row_ * sizeof(BF16)));
  DT_RETURN_IF_ERROR(stream_->Fill(o_->data(), 0, o_->size_bytes()));
  if (alone()) return stream_->SynchronizeStatus();
  DT_ASSIGN_OR_RETURN(heads_qkv_, device_.Allocate(all * 3 * heads * config_.head_dim() * sizeof(BF16)));
  DT_ASSIGN_OR_RETURN(heads_o_, device_.Allocate(all * heads * padded * sizeof(BF16)));
  return stream_->SynchronizeStatus();
}

absl::Status GpuRank::FillHidden() {
  const int64_t c = config_.channels, s = config_.positions;
  std::vector<BF16> frame(s * c);
  for (int64_t t = frames().begin; t < frames().end; ++t) {
    for (int64_t i = 0; i < s; ++i) RandomRow(config_, t, i, frame.data() + i * c);
    DT_RETURN_IF_ERROR(
        stream_->Copy(Elements(by_frames_) + (t - frames().begin) * s * c, frame.data(), frame.size() * sizeof(BF16)));
    DT_RETURN_IF_ERROR(stream_->SynchronizeStatus());
  }
  return absl::OkStatus();
}

PaddedRows GpuRank::HiddenRows(const Buffer& buffer) const {
  const int64_t row = config_.channels * static_cast<int64_t>(sizeof(BF16));
  return {buffer->data(), row, row, row, row};
}

// Tensor `tensor` of rows that have `tensors` of them, of so many heads.
PaddedRows GpuRank::HeadRows(const Buffer& buffer, int heads, int tensors, int tensor, bool padded) const {
  const int64_t run = config_.head_dim() * static_cast<int64_t>(sizeof(BF16));
  const int64_t step = padded ? PaddedHeadDim(config_.head_dim()) * static_cast<int64_t>(sizeof(BF16)) : run;
  return {buffer->data() + tensor * heads * step, heads * run, tensors * heads * step, run, step};
}

absl::Status GpuRank::Connect(const std::vector<GpuRank*>& all) {
  if (alone()) return absl::OkStatus();
  if (place_.way == Way::kDsp) {
    there_ = {{there_plan_, HiddenRows(by_frames_), {}}};
    back_ = {{back_plan_, HiddenRows(by_positions_), {}}};
    for (const GpuRank* rank : all) {
      there_[0].to.push_back(rank->HiddenRows(rank->by_positions_));
      back_[0].to.push_back(rank->HiddenRows(rank->by_frames_));
    }
    return absl::OkStatus();
  }
  const auto heads_of = [&](int rank) { return static_cast<int>(heads_[rank].size()); };
  for (int tensor = 0; tensor < 3; ++tensor) {
    Lane lane{there_plan_, HeadRows(qkv_, config_.heads, 3, tensor, true), {}};
    for (int rank = 0; rank < place_.ranks; ++rank)
      lane.to.push_back(HeadRows(all[rank]->heads_qkv_, heads_of(rank), 3, tensor, false));
    there_.push_back(std::move(lane));
  }
  back_ = {{back_plan_, HeadRows(heads_o_, heads_of(place_.rank), 1, 0, true), {}}};
  for (const GpuRank* rank : all) back_[0].to.push_back(HeadRows(rank->o_, config_.heads, 1, 0, true));
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::byte>> GpuRank::Hidden() {
  std::vector<std::byte> hidden(by_frames_->size_bytes());
  DT_RETURN_IF_ERROR(stream_->Copy(hidden.data(), by_frames_->data(), hidden.size()));
  DT_RETURN_IF_ERROR(stream_->SynchronizeStatus());
  return hidden;
}

absl::StatusOr<CudaEvent> GpuRank::Mark() {
  DT_ASSIGN_OR_RETURN(CudaEvent event, device_.CreateEvent(true));
  DT_RETURN_IF_ERROR(stream_->Record(event));
  return event;
}

std::vector<GpuRank::Range> GpuRank::Chunks(int rank, int64_t rows_a_frame) const {
  const int64_t frames = frames_[rank].size();
  const int64_t each = std::clamp<int64_t>((place_.chunk_rows + rows_a_frame / 2) / rows_a_frame, 1, frames);
  std::vector<Range> chunks;
  for (int64_t first = 0; first < frames; first += each) chunks.push_back({first, std::min(first + each, frames)});
  return chunks;
}

absl::Status GpuRank::Send(const std::vector<Lane>& lanes, int destination, int frames_of, const Range& frames) {
  if (alone()) return absl::OkStatus();
  return exchange_->Send(lanes, destination, stage_, {frames_[frames_of].size(), frames.begin, frames.end});
}

absl::Status GpuRank::AwaitAll(int64_t frames) {
  if (alone() || stage_ == 0) return absl::OkStatus();
  std::vector<GpuExchange::Arrival> arrivals;
  for (int source = 0; source < place_.ranks; ++source) arrivals.push_back({source, frames});
  return exchange_->Await(stage_, arrivals);
}

absl::Status GpuRank::AwaitFrom(int source, int64_t frames) {
  if (alone()) return absl::OkStatus();
  const GpuExchange::Arrival arrival{source, frames};
  return exchange_->Await(stage_, {&arrival, 1});
}

absl::Status GpuRank::End() { return place_.way == Way::kDsp ? AwaitAll(frames().size()) : absl::OkStatus(); }

absl::Status GpuRank::Pair(int pair, int next_pair) {
  if (place_.way == Way::kDsp) {
    DT_RETURN_IF_ERROR(SpatialBlock(weights_.spatial[pair]));
    return TemporalBlock(weights_.temporal[pair]);
  }
  DT_RETURN_IF_ERROR(UlyssesBlock(weights_.spatial[pair], &weights_.temporal[pair], true));
  return UlyssesBlock(weights_.temporal[pair], next_pair < 0 ? nullptr : &weights_.spatial[next_pair], false);
}

absl::Status GpuRank::AttendFrames(int64_t frames, int heads, const BF16* query_key_value, BF16* o) {
  if (config_.exchange_only) return absl::OkStatus();
  auto& sequences = of_frames_[{frames, heads}];
  if (sequences == nullptr) {
    SequenceShape shape;
    shape.count = frames;
    shape.length = config_.positions;
    shape.padded = heads_qkv_ == nullptr;
    shape.heads = heads;
    shape.head_dim = static_cast<int>(config_.head_dim());
    DT_ASSIGN_OR_RETURN(sequences, GpuSequences::Create(device_, shape));
  }
  return sequences->Attend(*stream_, query_key_value, o);
}

absl::Status GpuRank::AttendPositions(int64_t positions, int heads, const BF16* query_key_value, BF16* o) {
  if (config_.exchange_only) return absl::OkStatus();
  auto& sequences = of_positions_[{positions, heads}];
  if (sequences == nullptr) {
    SequenceShape shape;
    shape.count = positions;
    shape.length = config_.frames;
    shape.by_token = true;
    shape.padded = heads_qkv_ == nullptr;
    shape.heads = heads;
    shape.head_dim = static_cast<int>(config_.head_dim());
    DT_ASSIGN_OR_RETURN(sequences, GpuSequences::Create(device_, shape));
  }
  return sequences->Attend(*stream_, query_key_value, o);
}

absl::Status GpuRank::SpatialBlock(const GpuBlockWeights& weights) {
  const int64_t s = config_.positions;
  const int64_t before = stage_;
  for (const Range& chunk : Chunks(place_.rank, s)) {
    stage_ = before;
    DT_RETURN_IF_ERROR(AwaitAll(chunk.end));
    stage_ = before + 1;
    BF16* const x = Elements(by_frames_) + chunk.begin * s * config_.channels;
    if (!config_.exchange_only) {
      DT_RETURN_IF_ERROR(block_->Project(*stream_, weights, x, chunk.size() * s, Elements(qkv_)));
      DT_RETURN_IF_ERROR(AttendFrames(chunk.size(), config_.heads, Elements(qkv_), Elements(o_)));
      DT_RETURN_IF_ERROR(block_->Finish(*stream_, weights, Elements(o_), chunk.size() * s, x));
    }
    DT_RETURN_IF_ERROR(Ready());
    for (int after = 1; after <= place_.ranks; ++after)
      DT_RETURN_IF_ERROR(Send(there_, next(after), place_.rank, chunk));
  }
  return absl::OkStatus();
}

absl::Status GpuRank::TemporalBlock(const GpuBlockWeights& weights) {
  const int64_t c = config_.channels, positions = positions_[place_.rank].size();
  BF16* const x = Elements(alone() ? by_frames_ : by_positions_);
  const auto row_of = [&](int rank, const Range& chunk) { return (frames_[rank].begin + chunk.begin) * positions; };
  for (int after = 0; after < place_.ranks; ++after) {
    const int source = next(after);
    for (const Range& chunk : Chunks(source, positions)) {
      DT_RETURN_IF_ERROR(AwaitFrom(source, chunk.end));
      const int64_t row = row_of(source, chunk);
      if (config_.exchange_only) continue;
      DT_RETURN_IF_ERROR(block_->Project(*stream_, weights, x + row * c, chunk.size() * positions,
                                         Elements(qkv_) + row * 3 * head_row_));
    }
  }
  if (!config_.exchange_only)
    DT_RETURN_IF_ERROR(AttendPositions(positions, config_.heads, Elements(qkv_), Elements(o_)));
  ++stage_;
  for (int after = 1; after <= place_.ranks; ++after) {
    const int destination = next(after);
    for (const Range& chunk : Chunks(destination, positions)) {
      const int64_t row = row_of(destination, chunk);
      if (!config_.exchange_only)
        DT_RETURN_IF_ERROR(
            block_->Finish(*stream_, weights, Elements(o_) + row * head_row_, chunk.size() * positions, x + row * c));
      DT_RETURN_IF_ERROR(Ready());
      DT_RETURN_IF_ERROR(Send(back_, destination, destination, chunk));
    }
  }
  return absl::OkStatus();
}

absl::Status GpuRank::ProjectAndSend(const GpuBlockWeights& weights, const Range& chunk) {
  const int64_t row = chunk.begin * config_.positions;
  DT_RETURN_IF_ERROR(block_->Project(*stream_, weights, Elements(by_frames_) + row * config_.channels,
                                     chunk.size() * config_.positions, Elements(qkv_) + row * 3 * head_row_));
  DT_RETURN_IF_ERROR(Ready());
  for (int after = 1; after <= place_.ranks; ++after) DT_RETURN_IF_ERROR(Send(there_, next(after), place_.rank, chunk));
  return absl::OkStatus();
}

// What this block finishes of a chunk the next one begins with, so that q, k and v have long to travel.
absl::Status GpuRank::UlyssesBlock(const GpuBlockWeights& weights, const GpuBlockWeights* next_weights, bool spatial) {
  const int64_t s = config_.positions;
  const std::vector<Range> chunks = Chunks(place_.rank, s);
  if (stage_ == 0) {
    stage_ = 1;
    for (const Range& chunk : chunks) DT_RETURN_IF_ERROR(ProjectAndSend(weights, chunk));
  }
  DT_RETURN_IF_ERROR(spatial ? UlyssesSpatialAttention() : UlyssesTemporalAttention());
  const int64_t back = stage_;
  for (const Range& chunk : chunks) {
    const int64_t row = chunk.begin * s;
    stage_ = back;
    DT_RETURN_IF_ERROR(AwaitAll(chunk.end));
    DT_RETURN_IF_ERROR(block_->Finish(*stream_, weights, Elements(o_) + row * head_row_, chunk.size() * s,
                                      Elements(by_frames_) + row * config_.channels));
    stage_ = back + 1;
    if (next_weights != nullptr) DT_RETURN_IF_ERROR(ProjectAndSend(*next_weights, chunk));
  }
  return absl::OkStatus();
}

// The first chunk of every rank, the own one first, then the second of every rank: in the order in which they come.
absl::Status GpuRank::UlyssesSpatialAttention() {
  const int64_t s = config_.positions, there = stage_;
  const int heads = static_cast<int>(heads_[place_.rank].size());
  const int64_t o_row = int64_t{heads} * PaddedHeadDim(config_.head_dim());
  const int64_t qkv_row = 3 * (alone() ? o_row : heads * config_.head_dim());
  BF16* const qkv = Elements(alone() ? qkv_ : heads_qkv_);
  BF16* const o = Elements(alone() ? o_ : heads_o_);
  for (size_t number = 0, most = 1; number < most; ++number) {
    for (int after = 0; after < place_.ranks; ++after) {
      const int source = next(after);
      const std::vector<Range> chunks = Chunks(source, s);
      most = std::max(most, chunks.size());
      if (number >= chunks.size()) continue;
      const Range chunk = chunks[number];
      const int64_t row = (frames_[source].begin + chunk.begin) * s;
      stage_ = there;
      DT_RETURN_IF_ERROR(AwaitFrom(source, chunk.end));
      DT_RETURN_IF_ERROR(AttendFrames(chunk.size(), heads, qkv + row * qkv_row, o + row * o_row));
      stage_ = there + 1;
      DT_RETURN_IF_ERROR(Ready());
      DT_RETURN_IF_ERROR(Send(back_, source, source, chunk));
    }
  }
  return absl::OkStatus();
}

absl::Status GpuRank::UlyssesTemporalAttention() {
  for (int after = 0; after < place_.ranks; ++after)
    DT_RETURN_IF_ERROR(AwaitFrom(next(after), frames_[next(after)].size()));
  const int heads = static_cast<int>(heads_[place_.rank].size());
  DT_RETURN_IF_ERROR(AttendPositions(config_.positions, heads, Elements(alone() ? qkv_ : heads_qkv_),
                                     Elements(alone() ? o_ : heads_o_)));
  ++stage_;
  DT_RETURN_IF_ERROR(Ready());
  // The first chunk goes to every rank before the second does: all begin to finish frames early.
  for (size_t number = 0, most = 1; number < most; ++number) {
    for (int after = 1; after <= place_.ranks; ++after) {
      const int destination = next(after);
      const std::vector<Range> chunks = Chunks(destination, config_.positions);
      most = std::max(most, chunks.size());
      if (number < chunks.size()) DT_RETURN_IF_ERROR(Send(back_, destination, destination, chunks[number]));
    }
  }
  return absl::OkStatus();
}

}  // namespace dovetail::spatio_temporal
