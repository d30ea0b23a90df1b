#pragma once
#include <functional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "compute_worker/crossing.h"
#include "compute_worker/divided_rows.h"
#include "compute_worker/gpu_links.h"
#include "compute_worker/row_spread.h"
#include "transport/fabric.h"

namespace dovetail::compute {

// Whose the rows of a step between GPUs are.
struct PeerRows {
  bool divides = false;  // CrossesAsDivided: `divided` says how; else `spread`
  RowSpread spread;
  DividedRows divided;
};

// By the GPUs of two processes themselves, with no host between the step's begin and its tokens (ADR 26). Prompts of
// the step may be attended here (ADR 65).
// Threads: reactor-owned, as Crossing.
class PeerCrossing final : public Crossing {
 public:
  // All outlive it. `required`: a step whose attention workers have GPUs must cross this way.
  PeerCrossing(const ComputeWorkerCore& core, const GpuLinks& links, transport::Port& port, bool required)
      : core_(core), links_(links), port_(port), required_(required), peers_(core.options().micro_batches) {}

  absl::StatusOr<bool> Takes(MicroBatchId id) override;
  exchange::Seam SeamOf(MicroBatchId id) const override { return exchange::BetweenGpus{peers_[id.value()]}; }
  absl::Status SendBegin(SendStepBegin& begin) override;
  absl::Status SendQuery(MicroBatchId, int) override { return absl::OkStatus(); }  // kernels store it where it belongs
  absl::Status SendKeyValue(MicroBatchId, int) override { return absl::OkStatus(); }
  std::optional<PartialArrived> Answer(MicroBatchId id, int op, int p) override;
  int Unanswered(MicroBatchId id, StepId step) const override;
  void EndFailed(MicroBatchId id, StepId step) override;

 private:
  absl::Status CheckRoom(const std::vector<WorkerPart>& parts) const;

  const ComputeWorkerCore& core_;
  const GpuLinks& links_;
  transport::Port& port_;
  const bool required_;
  std::vector<std::vector<exchange::GpuExchange*>> peers_;  // by micro-batch and part
  PeerRows rows_;                                           // of the step at hand
  std::set<std::string> told_;                              // why steps went through the hosts; each is logged once
};

// Rows of a step with prompts that are attended here are copied to the peers run by run: a step of more runs goes
// through the hosts.
inline constexpr size_t kMostPromptRuns = 64;

// Whether a step may cross between GPUs; kFailedPrecondition: why not, in one line, which is empty where a link of the
// step's is missing, since GpuLinks::Describe has the reason. `gpu_of` each of its attention workers says which GPU it
// has that this one is linked with, at most kMostExchangePeers and no two the same; empty: no link. Processes that
// share a GPU take turns on it, so one that waits there holds up the other. Every sequence lies whole on one of these
// workers, where all of it is attended or, of a prompt, nothing; or its heads are divided among them, where all of it
// is attended. `rows` is scratch. Threads: pure, except for `rows`.
absl::Status GpusMayExchange(const ComputeWorkerCore& core, MicroBatchId id,
                             const std::function<std::string_view(NodeId)>& gpu_of, PeerRows& rows);

}  // namespace dovetail::compute
