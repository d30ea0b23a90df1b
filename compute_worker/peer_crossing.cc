#include "compute_worker/peer_crossing.h"

#include <algorithm>
#include <array>
#include <string>

#include "base/log.h"
#include "compute_worker/step_frames.h"
#include "exchange/cuda/step_exchange.h"
#include "proto/link_frames.h"

namespace dovetail::compute {

using exchange::GpuExchange;

absl::Status GpusMayExchange(const ComputeWorkerCore& core, MicroBatchId id,
                             const std::function<std::string_view(NodeId)>& gpu_of, PeerRows& rows) {
  const std::vector<WorkerPart>& parts = core.PartsOf(id);
  if (parts.size() > kernels::cuda::kMostExchangePeers)
    return FailedPrecondition("a step's sequences lie on more than ", kernels::cuda::kMostExchangePeers,
                              " attention workers");
  std::array<std::string_view, kernels::cuda::kMostExchangePeers> gpus;
  for (size_t p = 0; p < parts.size(); ++p) {
    gpus[p] = gpu_of(parts[p].node);
    if (gpus[p].empty()) return FailedPrecondition("");
    if (std::find(gpus.begin(), gpus.begin() + p, gpus[p]) != gpus.begin() + p)
      return FailedPrecondition("two attention workers of a step share the GPU ", std::string(gpus[p]));
  }
  rows.divides = CrossesAsDivided(core, id, rows.spread);
  if (rows.divides) return DivideRows(core, id, rows.divided);
  if (!core.PromptsOf(id).empty() && rows.spread.runs.size() > kMostPromptRuns)
    return FailedPrecondition("rows of a step's prompts and of its decodes take turns more than ", kMostPromptRuns,
                              " times");
  return absl::OkStatus();
}

// Partial results of many rows are larger than o. kFailedPrecondition: some slot is too small.
absl::Status PeerCrossing::CheckRoom(const std::vector<WorkerPart>& parts) const {
  bool fits_all = true;
  for (const DividedRows::Group& group : rows_.divided.groups)
    fits_all = fits_all && group.joined_rows_and_heads <= kernels::cuda::kMostJoinUnits;
  for (size_t p = 0; fits_all && p < parts.size(); ++p) {
    const GpuExchange& peer = *links_.With(parts[p].node);
    const auto fits = [](int64_t bytes, size_t room) { return static_cast<size_t>(bytes) <= room; };
    const size_t slot = peer.room().slot_bytes();
    fits_all = fits(rows_.divided.query_bytes[p], peer.key_value_at()) &&
               fits(rows_.divided.key_value_bytes[p], slot - peer.key_value_at()) &&
               fits(rows_.divided.answer_bytes[p], slot);
  }
  if (fits_all) return absl::OkStatus();
  return FailedPrecondition("many rows of a step are of sequences divided by tokens, whose partial results are more ",
                            "than an exchange has room for");
}

absl::StatusOr<bool> PeerCrossing::Takes(MicroBatchId id) {
  if (core_.PlanOf(id).part.in_group()) {  // what a rank asks may have to wait for another one's tokens
    if (!required_) return false;
    return FailedPrecondition(
        "--exchange device: the ranks of a prompt exchange through the hosts; use --prefill-ranks 1");
  }
  const std::vector<WorkerPart>& parts = core_.PartsOf(id);
  for (const WorkerPart& part : parts) {
    if (!required_ || !links_.Refused(part.node)) continue;
    return FailedPrecondition("--exchange device: with attention worker ", part.worker.value(), " it is ",
                              links_.Describe(part.node));
  }
  const auto gpu_of = [this](NodeId node) -> std::string_view {
    const GpuExchange* const linked = links_.With(node);
    return linked != nullptr ? linked->peer_gpu() : std::string_view();
  };
  std::vector<GpuExchange*>& peers = peers_[id.value()];
  peers.clear();
  absl::Status may = GpusMayExchange(core_, id, gpu_of, rows_);
  if (may.ok() && rows_.divides) may = CheckRoom(parts);
  if (!may.ok()) {
    if (!may.message().empty() && told_.insert(std::string(may.message())).second)
      LogInfo("steps cross between GPUs through the hosts where ", std::string(may.message()));
    return false;
  }
  for (const WorkerPart& part : parts) peers.push_back(links_.With(part.node));
  return !peers.empty();
}

absl::Status PeerCrossing::SendBegin(SendStepBegin& begin) {
  return SendBeginFrame(port_, proto::kStepBeginOnDevice, begin);
}

std::optional<PartialArrived> PeerCrossing::Answer(MicroBatchId id, int op, int p) {
  const WorkerPart& part = core_.PartsOf(id)[p];
  const proto::StepLayout& layout = part.layouts[core_.table().op_group[op].value()];
  if (layout.items.empty()) return std::nullopt;
  const auto bytes = static_cast<size_t>(layout.partial_bytes);
  return PartialArrived{part.node, part.epoch, core_.PlanOf(id).step,
                        id,        op,         {peers_[id.value()][p]->own_slot(id), bytes}};
}

int PeerCrossing::Unanswered(MicroBatchId id, StepId step) const {
  return exchange::Unanswered(peers_[id.value()], id, step);
}

void PeerCrossing::EndFailed(MicroBatchId id, StepId step) {
  for (GpuExchange* const peer : peers_[id.value()]) {
    if (const absl::Status status = peer->EndFailed(id, step); !status.ok())
      LogError("exchange between GPUs: ", std::string(status.message()));
  }
}

}  // namespace dovetail::compute
