#include "scheduler/scheduler_main.h"

#include <random>
#include <utility>

#include "base/log.h"

namespace dovetail::scheduler {

absl::StatusOr<std::unique_ptr<SchedulerMain>> SchedulerMain::Start(const SchedulerMainOptions& options, Epoch epoch,
                                                                    std::unique_ptr<transport::Connector> connector) {
  std::unique_ptr<SchedulerMain> main(new SchedulerMain());
  main->connector_ = std::move(connector);
  ClusterSchedulerOptions cluster;
  cluster.scheduler = options.scheduler;
  cluster.seed = options.seed;
  cluster.unserved_timeout = options.unserved_timeout;
  cluster.spans = options.spans;
  cluster.certificate_file = options.security.cert_file;
  cluster.membership.lease = options.lease;
  cluster.membership.suspect_lease = options.lease / 2;
  cluster.membership.heartbeat = options.lease / 8;
  cluster.membership.max_members = options.max_workers;
  cluster.membership.unlike_workers = options.unlike_workers;
  const scheduler::SchedulerOptions& core = options.scheduler;
  if (core.prefill_ranks != 1) {
    const bool forced = (core.prefill_exchange && IsBetweenRanks(*core.prefill_exchange)) ||
                        (core.linear_exchange && IsBetweenRanks(*core.linear_exchange));
    const bool chosen = !core.prefill_exchange || !core.linear_exchange;
    cluster.membership.compute_links = forced   ? ComputeLinks::kRequired
                                       : chosen ? ComputeLinks::kWherePossible
                                                : ComputeLinks::kNone;
  }
  cluster.membership.data_plane_version = main->connector_->version();
  cluster.membership.data_plane_address = main->connector_->address();
  cluster.membership.epoch = epoch;
  cluster.membership.cluster = std::random_device{}() | uint64_t{std::random_device{}()} << 32;
  cluster.membership.process = ThisProcess();
  cluster.membership.micro_batches = options.scheduler.micro_batches;
  main->scheduler_ = std::make_unique<ClusterScheduler>(std::move(cluster), *main->connector_, SystemClock());
  main->loop_ = std::make_unique<control::NodeLoop>(*main->connector_);
  ClusterScheduler* scheduler = main->scheduler_.get();
  main->loop_->Call([&] {
    main->loop_->SetNode(
        {[scheduler] { return scheduler->Turn(); }, [scheduler] { return scheduler->NextDeadline(); }});
  });
  DT_ASSIGN_OR_RETURN(main->service_,
                      ControlService::Start(options.listen, options.security, *main->loop_, *main->scheduler_));
  if (!options.security.tls() && options.listen.rfind("127.", 0) != 0 && options.listen.rfind("localhost:", 0) != 0)
    LogWarning("--listen ", options.listen,
               ": the control plane is not encrypted and takes everybody; give --tls-cert, --tls-key and --tls-ca");
  return main;
}

SchedulerMain::~SchedulerMain() {
  if (service_ != nullptr) service_->Stop();
  if (loop_ != nullptr) loop_->Stop();
  // The connector goes last: the scheduler's node sends over it.
  service_.reset();
  scheduler_.reset();
}

}  // namespace dovetail::scheduler
