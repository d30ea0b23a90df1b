#pragma once
#include "base/status.h"
#include "scheduler/core/choices.h"
#include "scheduler/core/incarnations.h"
#include "scheduler/core/kv_accounts.h"
#include "scheduler/core/micro_batches.h"
#include "scheduler/core/moves.h"
#include "scheduler/core/probes.h"
#include "scheduler/core/replacement_wait.h"
#include "scheduler/core/request_table.h"
#include "scheduler/core/slots.h"

namespace dovetail::scheduler {

// What must be true of the parts of the core between two events, and of each of them with regard to the others: every
// sequence is where its phase says and nowhere else, what is charged and promised adds up, and steps in flight contain
// what sequences take for granted.
// Errors: kInternal says what is not so. The core has a bug then.
// Cost: proportional to requests, choices and micro-batches.
// Threads: thread-compatible.
class Invariants {
 public:
  // All outlive this.
  struct Parts {
    const KvAccounts& accounts;
    const RequestTable& requests;
    const Slots& slots;
    const MicroBatches& batches;
    const Probes& probes;
    const Moves& moves;
    const ReplacementWait& stranded;
    const Incarnations& incarnations;
    const Choices& choices;
  };
  explicit Invariants(const Parts& parts) : parts_(parts) {}

  absl::Status Check() const;

 private:
  absl::Status CheckRequests() const;
  absl::Status CheckWaiting() const;
  absl::Status CheckSlots() const;
  absl::Status CheckCharges() const;
  absl::Status CheckMembers() const;
  absl::Status CheckSteps() const;
  absl::Status CheckUnderWay() const;

  const Parts parts_;
};

}  // namespace dovetail::scheduler
