#include "kernels/cuda/runtime/step_work.h"

#include <algorithm>
#include <utility>

namespace dovetail::kernels::cuda {

void StepWork::Clear() {
  immediate_ = false;
  what_.clear();
  pieces_.clear();
}

void StepWork::ReleaseUploads() {
  if (held_ != nullptr) std::exchange(held_, nullptr)->ReleaseUploads();
}

absl::Status StepWork::Begin(CudaStream& stream) {
  Clear();
  ReleaseUploads();
  if (done_.handle() == nullptr) {
    DT_ASSIGN_OR_RETURN(done_, stream.device().CreateEvent());
  }
  if (!std::exchange(launched_, false)) DT_RETURN_IF_ERROR(stream.Record(done_));  // it may have failed half way
  return stream.BeginUploads(done_);
}

absl::Status StepWork::Add(CudaStream& stream, std::span<const uint64_t> what, Enqueue enqueue) {
  if (immediate_) return enqueue(stream);
  what_.push_back(what.size());
  what_.insert(what_.end(), what.begin(), what.end());
  pieces_.push_back(std::move(enqueue));
  return absl::OkStatus();
}

absl::Status StepWork::EnqueueAll(CudaStream& stream) {
  for (const Enqueue& piece : pieces_) DT_RETURN_IF_ERROR(piece(stream));
  return absl::OkStatus();
}

absl::Status StepWork::BeImmediate(CudaStream& stream) {
  if (immediate_) return absl::OkStatus();
  DT_RETURN_IF_ERROR(stream.EndUploads());
  const absl::Status status = EnqueueAll(stream);
  Clear();
  immediate_ = true;
  held_ = &stream;
  stream.HoldUploads();
  return status;
}

absl::Status StepWork::Record(CudaStream& stream, CudaGraph& graph) {
  DT_RETURN_IF_ERROR(stream.BeginCapture());
  const absl::Status status = EnqueueAll(stream);
  auto ended = stream.EndCapture();
  DT_RETURN_IF_ERROR(status);
  DT_RETURN_IF_ERROR(ended.status());
  graph = *std::move(ended);
  return absl::OkStatus();
}

absl::Status StepWork::Launch(CudaStream& stream) {
  DT_RETURN_IF_ERROR(stream.EndUploads());
  if (!immediate_ && !pieces_.empty()) DT_RETURN_IF_ERROR(LaunchPieces(stream));
  Clear();
  ReleaseUploads();
  DT_RETURN_IF_ERROR(stream.Record(done_));
  launched_ = true;
  return absl::OkStatus();
}

absl::Status StepWork::LaunchPieces(CudaStream& stream) {
  const auto it = std::find_if(recorded_.begin(), recorded_.end(), [&](const Recorded& r) { return r.what == what_; });
  if (it == recorded_.end()) {
    if (recorded_.size() >= kMostRecorded) {
      DT_RETURN_IF_ERROR(stream.SynchronizeStatus());  // it may still run
      recorded_.pop_back();
    }
    recorded_.push_front({what_, {}});
    return EnqueueAll(stream);
  }
  recorded_.splice(recorded_.begin(), recorded_, it);
  CudaGraph& graph = recorded_.front().graph;
  if (graph.empty()) DT_RETURN_IF_ERROR(Record(stream, graph));
  return stream.Launch(graph);
}

}  // namespace dovetail::kernels::cuda
