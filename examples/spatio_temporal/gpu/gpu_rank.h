#pragma once
#include <map>
#include <memory>
#include <vector>

#include "base/status.h"
#include "examples/spatio_temporal/config.h"
#include "examples/spatio_temporal/gpu/gpu_block.h"
#include "examples/spatio_temporal/gpu/gpu_exchange.h"
#include "examples/spatio_temporal/gpu/gpu_sequences.h"
#include "examples/spatio_temporal/gpu/gpu_weights.h"

namespace dovetail::spatio_temporal {

// One rank's part of the model on a GPU: RankRun's layouts and switches, with exchange and arithmetic at one time.
//
// Work goes in chunks of whole frames, and what a chunk has made leaves while the next is computed:
//   dsp      spatial: a chunk of frames goes through the block, then to all ranks, which have its positions.
//            temporal: q, k and v of the rank's own frames first, then of the others' as they come. After attention a
//            chunk of frames is finished and goes back to its rank; the rank's own are last.
//   ulysses  q, k and v of a chunk go to the ranks of their heads.
//            spatial: attention chunk by chunk as they come, and o of each goes back.
//            temporal: attention when all have come, then o of all.
//            A chunk is finished when its o has come; q, k and v of the next block are made of it at once and leave.
// No rank overwrites what another still needs: it sends rows of a frame only when it has everything of that frame that
// the stage before has sent to it, and that was sent after the rows which are overwritten now were read.
//
// Ownership: config, weights, device and board outlive it; it outlives what other ranks send to it.
// Threads: one thread, between Connect and the end of all ranks.
class GpuRank {
 public:
  struct Place {
    const Config& config;
    Way way = Way::kDsp;
    int rank = 0;
    int ranks = 1;
    int64_t chunk_rows = 0;  // of products
  };
  // Takes memory and fills hidden. kInvalidArgument: more ranks than frames, positions or heads; heads whose numbers
  // are no multiple of eight. kResourceExhausted: no memory.
  static absl::StatusOr<std::unique_ptr<GpuRank>> Create(const Place& place, const GpuWeights& weights,
                                                         kernels::cuda::CudaDevice& device, RankBoard& board);
  // All ranks in order, this one among them: where they want what is sent to them.
  absl::Status Connect(const std::vector<GpuRank*>& all);

  // Enqueues. `next_pair`: which comes after it, -1 if none does.
  absl::Status Pair(int pair, int next_pair);
  // Enqueues the wait for what the last pair sends to this rank: then hidden is whole.
  absl::Status End();
  // What was enqueued so far ends here, for timing.
  absl::StatusOr<kernels::cuda::CudaEvent> Mark();
  absl::Status Synchronize() { return stream_->SynchronizeStatus(); }

  const proto::AxisRange& frames() const { return frames_[place_.rank]; }
  absl::StatusOr<std::vector<std::byte>> Hidden();  // its frames, [frames().size(), S, C] in bf16; blocks
  GpuExchange& exchange() { return *exchange_; }

 private:
  using Buffer = std::unique_ptr<kernels::Buffer>;
  struct Range {
    int64_t begin = 0, end = 0;
    int64_t size() const { return end - begin; }
  };

  GpuRank(const Place& place, const GpuWeights& weights, kernels::cuda::CudaDevice& device)
      : place_(place), config_(place.config), weights_(weights), device_(device) {}
  absl::Status Init(RankBoard& board);
  absl::Status InitLayouts();
  absl::Status AllocateDsp();
  absl::Status AllocateUlysses();
  absl::Status FillHidden();
  PaddedRows HiddenRows(const Buffer& buffer) const;
  PaddedRows HeadRows(const Buffer& buffer, int heads, int tensors, int tensor, bool padded) const;

  absl::Status SpatialBlock(const GpuBlockWeights& weights);
  absl::Status TemporalBlock(const GpuBlockWeights& weights);
  absl::Status UlyssesBlock(const GpuBlockWeights& weights, const GpuBlockWeights* next_weights, bool spatial);
  absl::Status ProjectAndSend(const GpuBlockWeights& weights, const Range& chunk);
  absl::Status UlyssesSpatialAttention();
  absl::Status UlyssesTemporalAttention();
  // Attention over `frames` whole frames that lie one behind the other.
  absl::Status AttendFrames(int64_t frames, int heads, const BF16* query_key_value, BF16* o);
  absl::Status AttendPositions(int64_t positions, int heads, const BF16* query_key_value, BF16* o);

  // Frames of a rank in chunks of about chunk_rows rows, where a frame has so many.
  std::vector<Range> Chunks(int rank, int64_t rows_a_frame) const;
  bool alone() const { return place_.ranks == 1; }
  int next(int after) const { return (place_.rank + after) % place_.ranks; }
  // As GpuExchange's, where there is more than one rank.
  absl::Status Ready() { return alone() ? absl::OkStatus() : exchange_->Ready(); }
  absl::Status Send(const std::vector<Lane>& lanes, int destination, int frames_of, const Range& frames);
  absl::Status AwaitAll(int64_t frames);
  absl::Status AwaitFrom(int source, int64_t frames);

  const Place place_;
  const Config& config_;
  const GpuWeights& weights_;
  kernels::cuda::CudaDevice& device_;
  std::unique_ptr<kernels::cuda::CudaStream> stream_;
  std::unique_ptr<GpuBlock> block_;
  std::unique_ptr<GpuExchange> exchange_;
  std::vector<proto::AxisRange> frames_, positions_, heads_;                                   // by rank
  std::map<std::pair<int64_t, int>, std::unique_ptr<GpuSequences>> of_frames_, of_positions_;  // by (count, heads)
  int64_t head_row_ = 0;             // numbers of [heads][padded]
  int64_t stage_ = 0;                // of the switch that was begun last; 0: none
  Buffer by_frames_, by_positions_;  // hidden; one rank has it once
  Buffer qkv_, o_;                   // [rows][3][heads][padded], [rows][heads][padded]: of the rows at hand
  // Ulysses, several ranks: of all rows, of the rank's heads; q, k and v are not padded.
  Buffer heads_qkv_, heads_o_;
  std::vector<Lane> there_, back_;
  std::shared_ptr<const proto::Switch> there_plan_, back_plan_;
};

}  // namespace dovetail::spatio_temporal
