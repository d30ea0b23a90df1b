#include <cstdlib>
#include <filesystem>
#include <utility>

#include "base/log.h"
#include "engine/remote_engine.h"
#include "engine/remote_model.h"
#include "server/cli/api_server.h"
#include "server/cli/cluster_commands.h"
#include "server/cli/role.h"
#include "server/cli/stop_signal.h"

namespace dovetail::cli {
namespace {

void RemoveFolder(const std::string& path) {
  std::error_code ignored;
  std::filesystem::remove_all(path, ignored);
}

// A folder for the model's text files, gone with this object.
class TemporaryFolder {
 public:
  static absl::StatusOr<TemporaryFolder> Create() {
    std::string path = (std::filesystem::temp_directory_path() / "dovetail-server-XXXXXX").string();
    if (mkdtemp(path.data()) == nullptr)
      return ResourceExhausted("no folder can be made in ", path, "; is the disk full? (TMPDIR names another)");
    return TemporaryFolder(path);
  }
  TemporaryFolder(TemporaryFolder&& other) noexcept : path_(std::exchange(other.path_, {})) {}
  ~TemporaryFolder() {
    if (!path_.empty()) RemoveFolder(path_);
  }
  const std::string& path() const { return path_; }

 private:
  explicit TemporaryFolder(std::string path) : path_(std::move(path)) {}
  std::string path_;
};

// The files are gone when this returns: what is served needs them no longer.
absl::Status Serve(engine::RemoteEngine& engine, ApiServer& api, StopSignal& stop) {
  DT_ASSIGN_OR_RETURN(const TemporaryFolder folder, TemporaryFolder::Create());
  stop.AtEnd([path = folder.path()] { RemoveFolder(path); });
  DT_ASSIGN_OR_RETURN(const auto model, engine::OpenRemoteModel(engine.model(), engine.files(), folder.path()));
  return api.Serve({.checkpoint = model.get(),
                    .engine = &engine,
                    .model_digest = engine.model().digest,
                    .max_model_len = engine.max_model_len(),
                    .max_num_seqs = engine.max_num_seqs(),
                    .kv_dtype = engine.model().attention.softmax(LayerGroup(0)).kv,
                    .kv_storage = engine.model().kv_storage});
}

}  // namespace

absl::Status RunServer(const ServerFlags& flags) {
  if (flags.check_flags) {
    DT_RETURN_IF_ERROR(CheckControlFlags(flags.control));
    DT_RETURN_IF_ERROR(CheckTraceFlags(flags.traces));
    return CheckApiFlags(flags.api);
  }
  BeginRole("server");
  const LogWriter log(LogOptionsOf(flags.log, "server"));
  StopSignal stop;
  DT_ASSIGN_OR_RETURN(const auto spans, MakeExporter(flags.traces, "dovetail-server", DefaultName("server")));
  engine::RemoteEngineOptions remote;
  remote.scheduler = flags.control.scheduler;
  DT_ASSIGN_OR_RETURN(remote.security, SecurityOf(flags.control));
  DT_RETURN_IF_ERROR(control::CheckAddress("--scheduler", remote.scheduler, /*may_be_free=*/false));
  remote.connect_timeout = absl::Seconds(flags.connect_timeout);
  remote.cancelled = [&stop] { return stop.Raised(); };
  DT_ASSIGN_OR_RETURN(const std::unique_ptr<ApiServer> api, ApiServer::Start(flags.api, flags.seed, spans));
  auto connected = engine::RemoteEngine::Connect(remote);
  if (stop.Raised()) return absl::OkStatus();
  if (!connected.ok()) return connected.status();
  const std::unique_ptr<engine::RemoteEngine> engine = *std::move(connected);
  DT_RETURN_IF_ERROR(Serve(*engine, *api, stop));
  stop.OwnerEnds();
  LogInfo("serving ", api->model_name(), " of the scheduler at ", remote.scheduler);
  api->PrintAddresses();
  stop.Wait();
  stop.EndsAtOnce();
  api->Drain();
  return absl::OkStatus();
}

}  // namespace dovetail::cli
