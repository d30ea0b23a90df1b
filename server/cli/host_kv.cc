#include "server/cli/host_kv.h"

#include "absl/strings/str_format.h"
#include "model/describe.h"

namespace dovetail::cli {

HostKvOfBatch HostKvOf(const HostKv& memory, const model::ModelConfig& config, DType kv, int64_t tokens, int sequences,
                       double step_seconds, double stored) {
  const auto kv_bytes = static_cast<double>(model::KvBytes(config, tokens, kv));
  const auto state_bytes = static_cast<double>(model::StateBytes(config));
  HostKvOfBatch batch;
  batch.step_bytes = sequences * (kv_bytes * stored + 2 * state_bytes);
  batch.read_seconds = batch.step_bytes / memory.read_bytes_per_s;
  batch.share = batch.read_seconds / step_seconds;
  if (kv_bytes + state_bytes > 0) batch.gpu_batch = static_cast<int64_t>(memory.gpu_bytes / (kv_bytes + state_bytes));
  return batch;
}

std::string TextOf(const HostKvOfBatch& batch) {
  return absl::StrFormat(
      "KV %.2f GB a step: at least %.1f ms, %.0f%% of the read rate; the GPU's memory would hold %d such sequences",
      batch.step_bytes * 1e-9, batch.read_seconds * 1e3, batch.share * 100, batch.gpu_batch);
}

}  // namespace dovetail::cli
