// The KV blocks of a CudaAttentionExecutor as memory: their layout, copies and poison.
#include <algorithm>

#include "attention_worker/block_digest.h"
#include "attention_worker/cpu/attention_executor.h"
#include "attention_worker/cuda/cuda_attention_executor.h"

namespace dovetail::attention {

size_t CudaAttentionExecutor::BlockBytes(const proto::AttentionTable& table, KvStorage storage) {
  if (storage == KvStorage::kAsSent) return AttentionExecutor::BlockBytes(table);
  size_t bytes = 0;
  for (const proto::SoftmaxSpec& spec : table.views)
    bytes = std::max<size_t>(
        bytes, kernels::cuda::CudaKvLayout{spec.key_dim, spec.value_dim, kernels::cuda::KvType::kE4M3}.bytes());
  return bytes;
}

kernels::cuda::CudaKvLayout CudaAttentionExecutor::LayoutOf(const proto::SoftmaxSpec& spec) const {
  using kernels::cuda::KvType;
  if (storage_ == KvStorage::kE4M3) return {spec.key_dim, spec.value_dim, KvType::kE4M3};
  return {spec.key_dim, spec.value_dim, spec.kv == DType::kBF16 ? KvType::kBF16 : KvType::kF16};
}

absl::Status CudaAttentionExecutor::Copy(std::span<const BlockCopy> copies) {
  for (const BlockCopy& copy : copies)
    DT_RETURN_IF_ERROR(stream_.Copy(BlockAt(copy.to), BlockAt(copy.from), block_bytes_));
  return absl::OkStatus();
}

// Copied to the host for it: a digest is asked for once a block of 64 tokens, and when one is taken from the cache.
absl::StatusOr<uint64_t> CudaAttentionExecutor::DigestOf(std::span<const KvBlockId> blocks) {
  DT_RETURN_IF_ERROR(Synchronize());
  DT_RETURN_IF_ERROR(Grow(digested_, blocks.size() * block_bytes_, /*pinned=*/true));
  std::byte* at = digested_->data();
  for (const KvBlockId block : blocks) {
    DT_RETURN_IF_ERROR(stream_.Copy(at, BlockAt(block), block_bytes_));
    at += block_bytes_;
  }
  DT_RETURN_IF_ERROR(stream_.SynchronizeStatus());
  return Digest({digested_->data(), blocks.size() * block_bytes_});
}

absl::Status CudaAttentionExecutor::Poison(std::span<const KvBlockId> blocks) {
  for (const KvBlockId block : blocks) DT_RETURN_IF_ERROR(stream_.Fill(BlockAt(block), kPoison, block_bytes_));
  return absl::OkStatus();
}

}  // namespace dovetail::attention
