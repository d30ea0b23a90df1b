#pragma once
#include <string>

#include "base/status.h"
#include "scheduler/core/choices.h"
#include "scheduler/core/events.h"
#include "scheduler/core/request_table.h"
#include "scheduler/core/scheduler.h"
#include "scheduler/core/tenant_queues.h"
#include "scheduler/core/turn.h"

namespace dovetail::scheduler {

// What clients ask for: requests arrive, are cancelled, stopped, paused and resumed. Late events are counted.
// Threads: thread-compatible; deterministic.
class ClientEvents {
 public:
  // All outlive this.
  ClientEvents(const SchedulerOptions& options, TenantQueues& queues, RequestTable& requests, Choices& choices,
               Turn& turn)
      : options_(options), queues_(queues), requests_(requests), choices_(choices), turn_(turn) {}

  // Takes the request, or refuses it with an update for each of its choices. A full queue is shared between tenants.
  void On(const RequestArrived& event);
  void On(const RequestCancelled& event);
  void On(const ChoiceStopped& event);
  void On(const RequestPaused& event);
  void On(const RequestResumed& event);

 private:
  absl::Status QueueFull(const std::string& tenant) const;
  bool MakeRoomInQueue(const std::string& tenant);
  void Refuse(const GenerationRequest& request, const absl::Status& status);

  const SchedulerOptions& options_;
  TenantQueues& queues_;
  RequestTable& requests_;
  Choices& choices_;
  Turn& turn_;
};

}  // namespace dovetail::scheduler
