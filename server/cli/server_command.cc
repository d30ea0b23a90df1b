#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <utility>

#include "base/log.h"
#include "server/cli/cluster_commands.h"
#include "server/cli/model_text.h"
#include "server/grpc/generation_service.h"
#include "server/http/http_server.h"
#include "server/remote_engine.h"
#include "server/remote_model.h"

namespace dovetail::cli {
namespace {

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
    std::error_code ignored;
    if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }

 private:
  explicit TemporaryFolder(std::string path) : path_(std::move(path)) {}
  std::string path_;
};

server::HttpServerOptions HttpOptionsOf(const ServerFlags& flags) {
  server::HttpServerOptions options;
  options.host = flags.host;
  options.port = flags.port;
  options.api_keys = flags.api_keys;
  options.metrics_api_keys = flags.metrics_api_keys;
  options.overload_status = flags.overload_status;
  options.seed = flags.seed;
  return options;
}

}  // namespace

absl::Status RunServer(const ServerFlags& flags) {
  StopSignal stop;
  server::RemoteEngineOptions remote;
  remote.scheduler = flags.control.scheduler;
  DT_ASSIGN_OR_RETURN(remote.security, SecurityOf(flags.control));
  DT_RETURN_IF_ERROR(control::CheckAddress("--scheduler", remote.scheduler, /*may_be_free=*/false));
  remote.connect_timeout = absl::Seconds(flags.connect_timeout);
  remote.cancelled = [&stop] { return stop.Raised(); };
  server::HttpServer http(HttpOptionsOf(flags));
  DT_RETURN_IF_ERROR(http.Start());
  auto connected = server::RemoteEngine::Connect(remote);
  if (stop.Raised()) return absl::OkStatus();
  if (!connected.ok()) return connected.status();
  const std::unique_ptr<server::RemoteEngine> engine = *std::move(connected);
  DT_ASSIGN_OR_RETURN(const TemporaryFolder folder, TemporaryFolder::Create());
  DT_ASSIGN_OR_RETURN(const auto model, server::OpenRemoteModel(engine->model(), engine->files(), folder.path()));
  DT_ASSIGN_OR_RETURN(auto served, MakeServedModel(*model, {.names = flags.served_model_names,
                                                            .accept_any_name = flags.ignore_model_name,
                                                            .chat_template = flags.chat_template,
                                                            .max_model_len = engine->max_model_len(),
                                                            .model_digest = engine->model().digest}));
  LogInfo("serving ", served->names.front(), " of the scheduler at ", remote.scheduler);
  const std::shared_ptr<const server::ServedModel> served_model = served;
  http.Serve(std::move(served), engine.get(), kSegmentTokens);
  std::unique_ptr<server::GrpcServer> grpc;
  if (!flags.grpc_listen.empty()) {
    server::GrpcServerOptions options;
    options.listen = flags.grpc_listen;
    options.api_keys = flags.api_keys;
    options.max_num_seqs = engine->max_num_seqs();
    options.kv_cache_dtype = std::string(Name(engine->model().attention.softmax(LayerGroup(0)).kv));
    DT_ASSIGN_OR_RETURN(grpc, server::GrpcServer::Start(options, served_model, engine.get()));
    std::printf("listening on grpc://%s:%d\n", flags.grpc_listen.substr(0, flags.grpc_listen.rfind(':')).c_str(),
                grpc->port());
  }
  std::printf("listening on http://%s:%d\n", flags.host.c_str(), http.port());
  std::fflush(stdout);
  stop.Wait();
  LogInfo("draining: running requests have ", flags.shutdown_timeout, " s; a second signal ends them at once");
  stop.RestoreDefault();
  if (grpc != nullptr) grpc->Stop(absl::Seconds(flags.shutdown_timeout));
  http.Drain(absl::Seconds(flags.shutdown_timeout));
  http.Stop();
  return absl::OkStatus();
}

}  // namespace dovetail::cli
