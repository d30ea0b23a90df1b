#pragma once
#include <optional>

#include "base/status.h"
#include "compute_worker/core/compute_worker_core.h"
#include "exchange/seam.h"

namespace dovetail::compute {

// One way across the seam, as the compute worker's node uses it for the steps of all micro-batches. exchange/seam.h is
// the contract; numbers in brackets are its obligations.
//
// Errors: what fails ends the step, unless a function says otherwise.
// Threads: reactor-owned.
class Crossing {
 public:
  virtual ~Crossing() = default;

  // Whether the step that the micro-batch's plan describes may cross this way; then it does, until the next call for
  // this micro-batch [1]. kFailedPrecondition: it must, and cannot.
  virtual absl::StatusOr<bool> Takes(MicroBatchId id) = 0;
  // Of the step that was taken [3].
  virtual exchange::Seam SeamOf(MicroBatchId id) const = 0;
  // The frame that begins a part of it [2].
  virtual absl::Status SendBegin(SendStepBegin& begin) = 0;
  // Payloads for all parts that have rows in the op [4].
  virtual absl::Status SendQuery(MicroBatchId id, int op) = 0;
  virtual absl::Status SendKeyValue(MicroBatchId id, int op) = 0;
  // Payloads that the device had not computed when they were to be sent, and that are sent since: in the order in which
  // they were to be [4].
  struct Late {
    int sent = 0;     // now
    int waiting = 0;  // still
  };
  virtual absl::StatusOr<Late> SendLate(MicroBatchId) { return Late(); }
  virtual bool HasLate(MicroBatchId) const { return false; }
  // The answer of part `p`, asked for after the op's k and v; nullopt: a frame brings it [6].
  virtual std::optional<PartialArrived> Answer(MicroBatchId, int /*op*/, int /*p*/) { return std::nullopt; }
  // The part whose worker a step failed by that its tokens were waited for; -1: none, or that is not known.
  virtual int Unanswered(MicroBatchId, StepId) const { return -1; }
  // The step has failed, here or there [9]. Does not wait.
  virtual void EndFailed(MicroBatchId, StepId) {}
};

}  // namespace dovetail::compute
