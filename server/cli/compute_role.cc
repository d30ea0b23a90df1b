#include "server/cli/compute_role.h"

#include <utility>

#include "base/log.h"
#include "compute_worker/attention_specs.h"
#include "engine/device_choice.h"
#include "engine/exchange_choice.h"
#include "engine/host_limits.h"
#include "engine/remote_model.h"
#include "server/cli/capabilities.h"
#include "server/cli/deterministic_flags.h"
#include "server/cli/prefill_flags.h"

namespace dovetail::cli {
namespace {

absl::Status LoadModel(const ComputeWorkerFlags& flags, ComputeRole& role) {
  DT_ASSIGN_OR_RETURN(auto checkpoint, OpenModel(flags.engine));
  DT_ASSIGN_OR_RETURN(role.device, CreateDevice(flags.engine, *checkpoint));
  LogInfo(kComputesOn, role.device->name());
  control::DataPlane data = flags.data;
  if (data.spin_us == 0 && engine::AsGpu(*role.device) != nullptr) data.spin_us = engine::kSpinBesideGpuUs;
  DT_ASSIGN_OR_RETURN(role.connectors,
                      control::ConnectorsOf(data, role.options.security, {.address = role.options.scheduler}));
  DT_ASSIGN_OR_RETURN(const auto table, compute::AttentionTableOf(checkpoint->config(), KvDtypeOf(flags.engine),
                                                                  StateDtypeOf(flags.engine)));
  // Or no attention worker would join.
  DT_RETURN_IF_ERROR(attention::CheckKvStorage(table, KvStorageOf(flags.engine.kv_cache_dtype), /*gpu=*/""));
  DT_ASSIGN_OR_RETURN(role.loaded, LoadOpenModel(flags.engine, std::move(checkpoint), *role.device,
                                                 LogsAsJson() ? model::LoadProgress() : TerminalProgress("loading")));
  return absl::OkStatus();
}

// What the scheduler is told of it.
absl::Status Introduce(const ComputeWorkerFlags& flags, ComputeRole& role) {
  const model::LoadedModel& model = *role.loaded.model;
  control::WorkerMainOptions& options = role.options;
  options.role = control::Role::kComputeWorker;
  DT_ASSIGN_OR_RETURN(options.capabilities, MeasureCapabilities(*role.device, /*threads=*/0));
  options.join_timeout = absl::Seconds(flags.join_timeout);
  DT_ASSIGN_OR_RETURN(options.model,
                      engine::SummarizeModel(*model.checkpoint, KvDtypeOf(flags.engine), model.weight_bytes,
                                             options.files, StateDtypeOf(flags.engine)));
  options.model->kv_storage = KvStorageOf(flags.engine.kv_cache_dtype);
  options.model->deterministic = flags.engine.deterministic && role.loaded.on_gpu != nullptr;
  options.capabilities.arithmetic = ArithmeticOf(flags.engine, *role.device, role.loaded);
  LogInfo("loaded ", options.model->name, ": ", model.weight_bytes >> 20, " MiB of weights");
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckComputeWorkerFlags(const ComputeWorkerFlags& flags) {
  DT_RETURN_IF_ERROR(CheckPlanes(flags.control, flags.data));
  DT_RETURN_IF_ERROR(CheckTraceFlags(flags.traces));
  DT_RETURN_IF_ERROR(engine::CheckDeviceName("--device", flags.engine.device));
  DT_RETURN_IF_ERROR(CheckDeterministic(flags.engine, /*attends_on_cpu=*/false));
  return TuningOf(flags.engine).status();
}

absl::StatusOr<std::unique_ptr<ComputeRole>> PrepareComputeRole(const ComputeWorkerFlags& flags,
                                                                const std::string& service, const std::string& name) {
  auto role = std::make_unique<ComputeRole>();
  role->options.scheduler = flags.control.scheduler;
  role->options.name = name;
  DT_RETURN_IF_ERROR(control::CheckAddress("--scheduler", role->options.scheduler, /*may_be_free=*/false));
  DT_ASSIGN_OR_RETURN(role->options.security, SecurityOf(flags.control));
  DT_RETURN_IF_ERROR(CheckPlanes(flags.control, flags.data));
  DT_RETURN_IF_ERROR(LoadModel(flags, *role));
  DT_RETURN_IF_ERROR(Introduce(flags, *role));
  DT_ASSIGN_OR_RETURN(role->tuning, TuningOf(flags.engine));
  role->tuning.dense = role->loaded.on_gpu.get();
  DT_ASSIGN_OR_RETURN(role->tuning.exchange,
                      engine::ChooseExchange(flags.exchange, "the compute worker", *role->device));
  role->tuning.names_rank_memory = flags.exchange != "host";
  DT_ASSIGN_OR_RETURN(role->spans, MakeExporter(flags.traces, service, name));
  role->tuning.spans = role->spans.get();
  return role;
}

void ComputeRole::WarnOfWhatIsShort(const ComputeWorkerFlags& flags) {
  if (std::exchange(warned, true)) return;
  engine::WarnOfWhatIsShort(
      {.threads = flags.engine.threads, .on_cpu = engine::AsGpu(*device) == nullptr, .rdma = flags.data.lanes == "rc"});
}

}  // namespace dovetail::cli
