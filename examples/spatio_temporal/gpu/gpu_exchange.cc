#include "examples/spatio_temporal/gpu/gpu_exchange.h"

#include <utility>

#include "kernels/cuda/exchange/cuda_exchange.h"

namespace dovetail::spatio_temporal {

using kernels::cuda::CudaDevice;
using kernels::cuda::CudaEvent;
using kernels::cuda::CudaStream;

absl::StatusOr<std::unique_ptr<GpuExchange>> GpuExchange::Create(CudaDevice& device, CudaStream& compute,
                                                                 RankBoard& board, int rank, int ranks) {
  auto exchange = std::unique_ptr<GpuExchange>(new GpuExchange(device, compute, board, rank, ranks));
  for (int i = 0; i < ranks; ++i) {
    DT_ASSIGN_OR_RETURN(auto stream, device.CreateCudaStream());
    exchange->streams_.push_back(std::move(stream));
  }
  DT_ASSIGN_OR_RETURN(exchange->ready_, device.CreateEvent());
  return exchange;
}

absl::Status GpuExchange::Ready() { return compute_.Record(ready_); }

absl::Status GpuExchange::Copy(CudaStream& stream, kernels::cuda::CopyRunsLaunch copy) {
  if (IsContiguous(copy) && BytesOf(copy) >= kLongCopyBytes) return stream.Copy(copy.to, copy.from, BytesOf(copy));
  copy.blocks = kCopyBlocks;
  return kernels::cuda::CopyRuns(stream, copy);
}

absl::Status GpuExchange::Send(std::span<const Lane> lanes, int destination, int64_t stage, const Frames& frames) {
  CudaStream& stream = *streams_[destination];
  DT_RETURN_IF_ERROR(stream.Wait(ready_));
  for (const Lane& lane : lanes) {
    const proto::Transfer* transfer = destination == rank_ ? lane.plan->KeptBy(rank_) : nullptr;
    for (const proto::Transfer& sent : lane.plan->SentBy(rank_))
      if (sent.destination == destination) transfer = &sent;
    if (transfer == nullptr) continue;
    DT_ASSIGN_OR_RETURN(const proto::Transfer some, FramesOf(*transfer, frames.of, frames.begin, frames.end));
    DT_ASSIGN_OR_RETURN(const auto copies, CopiesOf(some, lane.from, lane.to[destination]));
    for (const kernels::cuda::CopyRunsLaunch& copy : copies) {
      DT_RETURN_IF_ERROR(Copy(stream, copy));
      if (destination != rank_) bytes_sent_ += BytesOf(copy);
    }
  }
  DT_ASSIGN_OR_RETURN(CudaEvent event, device_.CreateEvent());
  const auto arrived = std::make_shared<CudaEvent>(std::move(event));  // shared: the destination waits for it, too
  DT_RETURN_IF_ERROR(stream.Record(*arrived));
  board_.Tell(rank_, destination, stage, frames.end, arrived);
  return absl::OkStatus();
}

absl::Status GpuExchange::Await(int64_t stage, std::span<const Arrival> arrivals) {
  Wait wait;
  DT_ASSIGN_OR_RETURN(wait.begin, device_.CreateEvent(true));
  DT_ASSIGN_OR_RETURN(wait.end, device_.CreateEvent(true));
  DT_RETURN_IF_ERROR(compute_.Record(wait.begin));
  for (const Arrival& arrival : arrivals) {
    DT_ASSIGN_OR_RETURN(const RankBoard::Event event, board_.Await(arrival.source, rank_, stage, arrival.frames));
    DT_RETURN_IF_ERROR(compute_.Wait(*event));
  }
  DT_RETURN_IF_ERROR(compute_.Record(wait.end));
  waits_.push_back(std::move(wait));
  return absl::OkStatus();
}

absl::StatusOr<double> GpuExchange::SecondsWaited() {
  double seconds = 0;
  for (const Wait& wait : waits_) {
    DT_ASSIGN_OR_RETURN(const float milliseconds, wait.end.MillisecondsSince(wait.begin));
    seconds += milliseconds / 1e3;
  }
  return seconds;
}

}  // namespace dovetail::spatio_temporal
