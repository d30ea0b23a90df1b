#include "attention_worker/cuda/outgoing_rows.h"

#include <algorithm>
#include <utility>

#include "base/ids.h"
#include "base/thread_name.h"

namespace dovetail::attention {

absl::Status CopyOut(const OutgoingPart& part, kernels::cuda::CudaStream& stream, std::byte* staging) {
  // All of them are on their way before the first is waited for.
  std::byte* to = staging;
  for (const std::byte* const block : part.blocks) {
    DT_RETURN_IF_ERROR(stream.Copy(to, block, part.block_bytes));
    to += part.block_bytes;
  }
  DT_RETURN_IF_ERROR(stream.SynchronizeStatus());
  const std::byte* from = staging;
  GpuHeadRows out = part.rows;
  const size_t key_bytes = static_cast<size_t>(out.layout.key_dim) * kWireElement;
  const size_t value_bytes = static_cast<size_t>(out.layout.value_dim) * kWireElement;
  for (Position at = part.tokens.begin; at < part.tokens.end; at += out.rows) {
    out.token = static_cast<int>(at % kSegmentTokens);
    out.rows = static_cast<int>(std::min<Position>(kSegmentTokens - out.token, part.tokens.end - at));
    const auto row = static_cast<size_t>(at - part.tokens.begin);
    for (int head = 0; head < part.heads; ++head, from += part.block_bytes) {
      out.k = part.rows.k + row * out.k_step + static_cast<size_t>(head) * key_bytes;
      out.v = part.rows.v + row * out.v_step + static_cast<size_t>(head) * value_bytes;
      GatherBlock(from, out);
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<OutgoingRows>> OutgoingRows::Create(kernels::cuda::CudaDevice& device) {
  DT_ASSIGN_OR_RETURN(auto stream, device.CreateCudaStream());
  return std::unique_ptr<OutgoingRows>(new OutgoingRows(std::move(stream)));
}

OutgoingRows::OutgoingRows(std::unique_ptr<kernels::cuda::CudaStream> stream)
    : stream_(std::move(stream)), thread_([this] { Run(); }) {}

OutgoingRows::~OutgoingRows() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

void OutgoingRows::Begin(int slot, std::vector<OutgoingPart> parts, std::shared_ptr<kernels::Buffer> rows,
                         std::shared_ptr<kernels::Buffer> staging) {
  auto job = std::make_shared<Job>();
  job->parts = std::move(parts);
  job->rows = std::move(rows);
  job->staging = std::move(staging);
  begun_[static_cast<size_t>(slot)].push_back(job);
  {
    MutexLock lock(mutex_);
    jobs_.push_back(std::move(job));
  }
  changed_.notify_one();
}

absl::StatusOr<bool> OutgoingRows::TakeOldest(int slot) {
  auto& begun = begun_[static_cast<size_t>(slot)];
  if (begun.empty()) return true;
  if (!begun.front()->ended.load(std::memory_order_acquire)) return false;
  const std::shared_ptr<Job> job = std::move(begun.front());
  begun.pop_front();
  DT_RETURN_IF_ERROR(job->status);
  return true;
}

void OutgoingRows::Run() {
  NameThread("dt-moves");
  const absl::Status current = stream_->UseDevice();
  while (true) {
    std::shared_ptr<Job> job;
    {
      MutexLock lock(mutex_);
      changed_.wait(lock, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return stopping_ || !jobs_.empty(); });
      if (jobs_.empty()) return;
      job = std::move(jobs_.front());
      jobs_.pop_front();
    }
    job->status = current;
    std::byte* staging = job->staging->data();
    for (const OutgoingPart& part : job->parts) {
      job->status.Update(CopyOut(part, *stream_, staging));
      staging += part.staging_bytes();
    }
    job->ended.store(true, std::memory_order_release);
  }
}

}  // namespace dovetail::attention
