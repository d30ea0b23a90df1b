#include "kernels/cuda/step_work.h"

#include <algorithm>
#include <utility>

namespace dovetail::kernels::cuda {

void StepWork::Begin() {
  immediate_ = false;
  what_.clear();
  pieces_.clear();
  targets_.clear();
}

absl::Status StepWork::Add(CudaStream& stream, std::initializer_list<uint64_t> what, Enqueue enqueue) {
  if (immediate_) return enqueue(stream);
  what_.push_back(what.size());
  what_.insert(what_.end(), what.begin(), what.end());
  pieces_.push_back(std::move(enqueue));
  return absl::OkStatus();
}

const KvAppendTarget* StepWork::AppendTarget(int op) const {
  const auto it = targets_.find(op);
  return it == targets_.end() ? nullptr : &it->second;
}

absl::Status StepWork::EnqueueAll(CudaStream& stream) {
  for (const Enqueue& piece : pieces_) DT_RETURN_IF_ERROR(piece(stream));
  return absl::OkStatus();
}

absl::Status StepWork::BeImmediate(CudaStream& stream) {
  if (immediate_) return absl::OkStatus();
  const absl::Status status = EnqueueAll(stream);
  Begin();
  immediate_ = true;
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
  if (immediate_ || pieces_.empty()) {
    Begin();
    return absl::OkStatus();
  }
  const auto it = std::find_if(recorded_.begin(), recorded_.end(), [&](const Recorded& r) { return r.what == what_; });
  absl::Status status;
  if (it == recorded_.end()) {
    if (recorded_.size() >= kMostRecorded) {
      DT_RETURN_IF_ERROR(stream.SynchronizeStatus());  // it may still run
      recorded_.pop_back();
    }
    recorded_.push_front({what_, {}});
    status = EnqueueAll(stream);
  } else {
    recorded_.splice(recorded_.begin(), recorded_, it);
    CudaGraph& graph = recorded_.front().graph;
    if (graph.empty()) status = Record(stream, graph);
    if (status.ok()) status = stream.Launch(graph);
  }
  Begin();
  return status;
}

}  // namespace dovetail::kernels::cuda
