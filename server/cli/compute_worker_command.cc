#include <utility>

#include "base/log.h"
#include "compute_worker/attention_specs.h"
#include "compute_worker/compute_worker_main.h"
#include "engine/device_choice.h"
#include "engine/exchange_choice.h"
#include "engine/host_limits.h"
#include "engine/remote_model.h"
#include "server/cli/capabilities.h"
#include "server/cli/cluster_commands.h"
#include "server/cli/prefill_flags.h"
#include "server/cli/role.h"
#include "server/cli/stop_signal.h"

namespace dovetail::cli {
namespace {

absl::Status CheckFlags(const ComputeWorkerFlags& flags) {
  DT_RETURN_IF_ERROR(CheckPlanes(flags.control, flags.data));
  DT_RETURN_IF_ERROR(CheckTraceFlags(flags.traces));
  DT_RETURN_IF_ERROR(engine::CheckDeviceName("--device", flags.engine.device));
  return TuningOf(flags.engine).status();
}

}  // namespace

absl::Status RunComputeWorker(const ComputeWorkerFlags& flags) {
  if (flags.check_flags) return CheckFlags(flags);
  const std::string process = flags.name.empty() ? "compute" : flags.name;
  BeginRole(process);
  const LogWriter log(LogOptionsOf(flags.log, process));
  StopSignal stop;
  control::WorkerMainOptions options;
  options.scheduler = flags.control.scheduler;
  DT_RETURN_IF_ERROR(control::CheckAddress("--scheduler", options.scheduler, /*may_be_free=*/false));
  DT_ASSIGN_OR_RETURN(options.security, SecurityOf(flags.control));
  DT_RETURN_IF_ERROR(CheckPlanes(flags.control, flags.data));
  DT_ASSIGN_OR_RETURN(auto checkpoint, OpenModel(flags.engine));
  DT_ASSIGN_OR_RETURN(const auto device, CreateDevice(flags.engine, *checkpoint));
  LogInfo(kComputesOn, device->name());
  control::DataPlane data = flags.data;
  if (data.spin_us == 0 && engine::AsGpu(*device) != nullptr) data.spin_us = engine::kSpinBesideGpuUs;
  DT_ASSIGN_OR_RETURN(auto connectors, control::ConnectorsOf(data, options.security, {.address = options.scheduler}));
  DT_ASSIGN_OR_RETURN(const auto table, compute::AttentionTableOf(checkpoint->config(), KvDtypeOf(flags.engine),
                                                                  StateDtypeOf(flags.engine)));
  const KvStorage storage = KvStorageOf(flags.engine.kv_cache_dtype);
  DT_RETURN_IF_ERROR(attention::CheckKvStorage(table, storage, /*gpu=*/""));  // or no attention worker would join
  DT_ASSIGN_OR_RETURN(const ModelOnDevice loaded,
                      LoadOpenModel(flags.engine, std::move(checkpoint), *device,
                                    LogsAsJson() ? model::LoadProgress() : TerminalProgress("loading")));
  const std::unique_ptr<model::LoadedModel>& model = loaded.model;
  options.role = control::Role::kComputeWorker;
  options.name = flags.name.empty() ? DefaultName("compute") : flags.name;
  DT_ASSIGN_OR_RETURN(options.capabilities, MeasureCapabilities(*device, /*threads=*/0));
  options.join_timeout = absl::Seconds(flags.join_timeout);
  DT_ASSIGN_OR_RETURN(options.model,
                      engine::SummarizeModel(*model->checkpoint, KvDtypeOf(flags.engine), model->weight_bytes,
                                             options.files, StateDtypeOf(flags.engine)));
  options.model->kv_storage = storage;
  options.capabilities.arithmetic = ArithmeticOf(flags.engine, *device, loaded);
  LogInfo("loaded ", options.model->name, ": ", model->weight_bytes >> 20, " MiB of weights");
  const uint64_t digest = options.model->digest;
  DT_ASSIGN_OR_RETURN(compute::ComputeWorkerTuning tuning, TuningOf(flags.engine));
  tuning.dense = loaded.on_gpu.get();
  DT_ASSIGN_OR_RETURN(const engine::ExchangeChoice exchange,
                      engine::ChooseExchange(flags.exchange, "the compute worker", *device));
  tuning.exchange = exchange.means;
  tuning.names_rank_memory = flags.exchange != "host";
  DT_ASSIGN_OR_RETURN(const auto spans, MakeExporter(flags.traces, "dovetail-compute-worker", options.name));
  tuning.spans = spans.get();
  bool warned = false;  // once it has joined, so that refusals are one line
  control::WorkerMain worker(
      options, std::move(connectors), [&](transport::Connector& connector, const control::JoinReply&) {
        if (!std::exchange(warned, true))
          engine::WarnOfWhatIsShort({.threads = flags.engine.threads,
                                     .on_cpu = engine::AsGpu(*device) == nullptr,
                                     .rdma = flags.data.lanes == "rc"});
        return compute::MakeComputeWorker(*model, digest, *device, connector, tuning, flags.engine.trace_file);
      });
  if (!flags.engine.trace_file.empty()) stop.OwnerEnds();  // the trace is written at the end
  return stop.RunUntil([&] { return worker.Run(); }, [&] { worker.Stop(); });
}

}  // namespace dovetail::cli
